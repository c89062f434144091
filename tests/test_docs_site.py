"""The settings of the site (docs/conf.py), and that the site has every page and every public name."""

import importlib.util
import inspect
import io
import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fastsam
from fastsam import fed
from tests.helpers.pages import PAGES, anchors, blocks, links, text_of
from tests.helpers.places import ROOT
from tools import notebooks

pytestmark = pytest.mark.pages

INDEX = "docs/index.md"
FOLDERS = ("fastsam", "kernels", "csrc", "bench", "tests", "tools", "docs", "examples")


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        result = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        assert not result.startswith(".."), f"{page}: {target} leads out of the checkout"
        assert (ROOT / result).exists(), f"{page}: {target} leads nowhere"
        if anchor:
            assert anchor in anchors(result), f"{page}: {target}: no such heading"


READER_FILES = {"study.py", "train.py", "QUESTION.json"}  # files of the reader, or of another project
RUN_FILES = {"config.json", "environment.json", "summary.json"}  # files that a run writes


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_the_files_that_it_names_exist(page: str) -> None:
    code = re.findall(r"`([\w./-]+\.(?:py|h|cu|cuh|cpp|json|toml|js))`", text_of(page))
    names = {name for name in code if "NAME" not in name and not name.startswith(("runs/", "DIR"))} - READER_FILES
    names -= RUN_FILES
    result = ["/" + path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    missing_names = [name for name in sorted(names) if not any(path.endswith(f"/{name}") for path in result)]
    assert not missing_names, f"{page} names {missing_names}"


def test_the_files_of_a_run_have_these_names() -> None:
    source = "".join(path.read_text() for path in (ROOT / "fastsam").rglob("*.py"))
    assert all(f'"{name}"' in source for name in RUN_FILES)


def test_the_choices_of_a_variant_are_attributes_of_sam() -> None:
    """Otherwise an example that overrides one would do nothing, and say nothing."""
    part = text_of("docs/own_variant.md")
    choices = re.findall(r"^\| `(\w+)", part, re.M) + re.findall(r"^    def (\w+)\(self", part, re.M)
    assert len(choices) > 8 and not [name for name in choices if not hasattr(fastsam.SAM, name) and name != "rho_fn"]


def test_every_page_has_one_place(conf: ModuleType) -> None:
    files = [file for _, pages in conf.sections(text_of(INDEX)) for _, file in pages]
    places = [posixpath.normpath(posixpath.join("docs", f"{file}.md")) for file in files]
    expected = [page for page in PAGES if page not in (INDEX, "README.md")]  # the index stands for these
    missing_pages = sorted(set(expected) - set(places))
    assert not missing_pages, (
        f"{INDEX} needs an item `- [Title](page.md): what it is for` in one of its lists for {missing_pages}"
    )
    assert sorted(places) == sorted(expected)


def test_a_reader_who_skims_finds_the_example_first(conf: ModuleType) -> None:
    """In each page that says how to do something, within its first fifteen lines."""
    pages = [page for name, entries in conf.sections(text_of(INDEX)) if name.startswith("How to") for page in entries]
    assert len(pages) > 15
    for _, file in pages:
        lines = text_of(f"docs/{file}.md").splitlines()
        code = [
            n
            for n, line in enumerate(lines)
            if line.startswith("```") or (line.startswith("    ") and not lines[n - 1])
        ]
        assert code[0] < 15, f"docs/{file}.md has its first example in line {code[0] + 1}"


def test_the_pages_stay_short() -> None:
    """README and all pages have 38,000 words at most, and a page 2,500."""
    words = {page: len(text_of(page).split()) for page in PAGES if page.startswith("docs/")}
    assert sum(words.values()) + len(text_of("README.md").split()) <= 38_000, words
    assert not {page: count for page, count in words.items() if count > 2_500}


def test_the_tables_of_contents_are_the_lists(conf: ModuleType) -> None:
    page = (
        "# Top\n\n- [No](no.md)\n\n## Guides\n\n- [A b](a.md): with `code`, and [another](c.md)\n- [D](../D.md)\n\n## "
        "Else\n\nText.\n"
    )
    result = conf.with_toctrees(page)
    assert result.startswith(page)
    assert " ".join(result[len(page) :].split()) == "```{toctree} :hidden: :caption: Guides A b <a> D <../D> ```"


@pytest.mark.parametrize(
    ("docstring", "rst"),
    [
        ("Adds `x*y` to w_, 2*3 and |z|.", r"Adds ``x*y`` to w\_, 2\*3 and \|z\|."),
        ("A step.\n\n    w <- w - lr*|g|\n\n    m <- g\n\nIt `is`.",
            "A step.\n\n::\n\n    w <- w - lr*|g|\n\n    m <- g\n\nIt ``is``."),
        ("Runs.\n\nrho, eta: radius\n    and more\nseed: of it",
            "Runs.\n\n- ``rho, eta``: radius\n  and more\n- ``seed``: of it"),
        ("model: a copy. history: a\nlist of dicts.", "model: a copy. history: a\nlist of dicts."),
        ("Runs.\n\nArgs:\n    rho (float): radius\n        and more\n    **own: others\n\nNote:\n    Some `text`.",
            "Runs.\n\n**Args:**\n\n- ``rho`` (float): radius\n  and more\n- ``**own``: others\n\n"
            "**Note:**\n\nSome ``text``."),
        ("Takes\n\nlr\n    0 or more\nbetas\n    two numbers", "Takes\n\nlr\n    0 or more\n\nbetas\n    two numbers"),
    ],
)  # fmt: skip
def test_docstrings_become_rst(conf: ModuleType, docstring: str, rst: str) -> None:
    assert "\n".join(conf.as_rst(docstring.splitlines())).rstrip() == rst


def test_docutils_reads_every_docstring_of_the_reference(conf: ModuleType) -> None:
    """Sphinx would stop at the first that it cannot read."""
    core = pytest.importorskip("docutils.core", reason="no docutils: `make docs` installs it with Sphinx")
    page = conf.with_algorithms(text_of("docs/api.md"))
    for name in re.findall(r"^\.\. auto\w+:: (fastsam\.[\w.]+)$", page, re.M):
        if name.endswith("SAMCallback"):
            continue  # it is made where Lightning is installed
        member: object = fastsam
        for part in name.split(".")[1:]:
            member = getattr(member, part, None) or importlib.import_module(f"{vars(member)['__name__']}.{part}")
        text, output = "\n".join(conf.as_rst((inspect.getdoc(member) or "").splitlines())), io.StringIO()
        core.publish_doctree(text, settings_overrides={"report_level": 2, "warning_stream": output})
        assert not output.getvalue(), f"{name}: {output.getvalue()}"


def test_the_reference_has_every_public_name(conf: ModuleType) -> None:
    page = conf.with_algorithms(text_of("docs/api.md"))
    entries = set(re.findall(r"^\.\. auto\w+:: fastsam\.([\w.]+)$", page, re.M))
    names = set(fastsam.__all__) - {"variants"}  # the page lists its names, and the names of fed's modules, one by one
    names |= {f"variants.{name}" for name in fastsam.variants.__all__ if name not in names}
    public_names = set(fed.__all__) - {"State"}  # which is a dict
    rooms = {name for name in public_names if isinstance(getattr(fed, name), ModuleType)}
    names |= {f"fed.{name}" for name in public_names - rooms}
    names |= {f"fed.{room}.{name}" for room in rooms for name in getattr(fed, room).__all__ if name not in public_names}
    names.discard("fed.algorithms.State")
    assert not sorted(names - entries), "docs/api.md does not show these"
    for name in entries - {"integrations.lightning.SAMCallback"}:  # which is made where Lightning is installed
        member: object = fastsam
        for part in name.split("."):
            name = f"{member.__name__}.{part}"  # type: ignore[attr-defined]
            member = getattr(member, part, None) or importlib.import_module(name)
        assert member.__doc__, f"fastsam.{name} has no docstring"


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_the_notebooks_are_their_pages(name: str) -> None:
    """Their code is the page's, every cell that prints has its output, and the page has the same outputs."""
    document = json.loads((ROOT / "docs" / f"{name}.ipynb").read_text())
    cells, code = document["cells"], notebooks.page_code(document)
    assert "".join(cells[0]["source"]) == notebooks.INSTALL, "a notebook installs fastsam first"
    expected = [block.code.strip() for block in blocks(f"docs/{name}.md") if block.language == "python"]
    repeat = "a notebook differs from its page: python tools/notebooks.py writes it again"
    assert ["".join(cell["source"]) for cell in code] == expected, repeat
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], repeat
    for cell in code:
        assert bool(cell["outputs"]) == ("print(" in "".join(cell["source"])), repeat
    assert notebooks.page(text_of(f"docs/{name}.md"), notebooks.outputs(document)) == text_of(f"docs/{name}.md"), repeat
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert all(text in text_of(f"docs/{name}.md") for text in texts), repeat


def test_a_tutorial_gets_its_printed_lines_once() -> None:
    code = "```python\nprint(1)\n```\n"
    text = f"{code}\nProse.\n\n```python\nx = 1\n```\n\n```\nmake demo\n```\n"
    first, second = (f"{code}\n```text\n{number}\n```\n{text.removeprefix(code)}" for number in (1, 2))
    assert notebooks.page(text, ["1\n", ""]) == first
    assert notebooks.page(first, ["2\n", ""]) == second
    assert notebooks.cells(first) == notebooks.cells(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_prints_what_its_code_prints(name: str) -> None:
    result = notebooks.notebook(text_of(f"docs/{name}.md"))
    committed_notebook = json.loads((ROOT / "docs" / f"{name}.ipynb").read_text())
    outputs, expected = (
        [re.sub(r"[\d.]+", "", "".join(item["text"])) for cell in book["cells"] for item in cell.get("outputs", [])]
        for book in (result, committed_notebook)
    )  # numbers differ between machines
    assert outputs == expected


def internal(conf: ModuleType) -> set[str]:
    """Return the pages that a search shows last: for developers, and the changelog."""
    (pages,) = [pages for name, pages in conf.sections(text_of(INDEX)) if name == "For developers"]
    return {"CHANGELOG", *(posixpath.normpath(posixpath.join("docs", file)) for _, file in pages)}


def test_the_search_knows_the_internal_pages(conf: ModuleType) -> None:
    assert set(re.findall(r'^  "(.+)",$', text_of("docs/search_scorer.js"), re.M)) == internal(conf)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("no Sphinx: `make docs` installs the extra docs")
    result = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(result)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return result


@pytest.mark.slow
def test_it_is_made_without_a_warning(site: Path) -> None:
    result = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", *(page.replace(".md", ".html") for page in PAGES if page != "README.md")} <= result
    reference = (site / "docs" / "api.html").read_text()
    assert "fastsam.FusedSAM.first_step" in reference and "Sharpness-Aware Minimization (SAM) around" in reference
    for page in PAGES:
        num_formulas = sum(block.language == "math" for block in blocks(page))
        assert (
            not num_formulas or (site / page.replace(".md", ".html")).read_text().count("</math></div>") == num_formulas
        )


@pytest.mark.slow
def test_it_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//')
    assert not [path.name for path in site.rglob("*.html") if loaded.search(path.read_text())]
    assert not [
        path.name for path in site.rglob("*.css") if re.search(r"(?:url\(|@import )\W*(?:https?:)?//", path.read_text())
    ]


def found(site: Path, query: str) -> list[str]:
    """Return the pages that a search finds, best first, by the site's own script and index."""
    if shutil.which("node") is None:
        pytest.skip("no node, which runs the script of the search")
    script = ROOT / "tests" / "helpers" / "search.js"
    process = subprocess.run(["node", str(script), str(site), query], capture_output=True, text=True, check=True)
    result: list[str] = json.loads(process.stdout)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("several GPUs", "docs/fused_sam"),
        ("per-client accuracy", "docs/data"),
        ("learning rate over rounds", "docs/federated"),
        ("how fast on my GPU", "docs/about_speed"),
        ("how to cite", "docs/index"),
    ],
)
def test_the_words_of_a_reader_find_the_page(site: Path, query: str, page: str) -> None:
    assert found(site, query)[0] == page


@pytest.mark.slow
@pytest.mark.parametrize("query", ["clipping", "resume", "dropout", "LoRA", "BatchNorm"])
def test_a_search_shows_the_users_pages_first(site: Path, conf: ModuleType, query: str) -> None:
    results = found(site, query)
    num_user_pages = next((n for n, page in enumerate(results) if page in internal(conf)), len(results))
    assert num_user_pages >= 3 and not [page for page in results[num_user_pages:] if page not in internal(conf)], (
        results
    )


def test_lists_become_cards(conf: ModuleType) -> None:
    cards = conf.with_cards("Before.\n\n- [A b](a.md): with `code`\n- [D](../D.md): d\n\nAfter.\n")
    assert re.findall(r"grid-item-card} (.+)\n:link: (.+)\n", cards) == [("A b", "a"), ("D", "../D")]
    assert cards.startswith("Before.\n\n::::{grid}") and cards.endswith("::::\n\nAfter.\n")
