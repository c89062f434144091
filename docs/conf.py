"""The pages as a site: `make docs`, with Sphinx, MyST and Furo. The Markdown stays what GitHub shows; this file binds
it.

The source folder is the checkout, so that links to README's neighbours, examples and pictures lead to the same files as
on GitHub.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastsam

project, author, release = "fastsam", "the fastsam authors", fastsam.__version__
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
OPTIONAL = ("sphinx_copybutton", "sphinx_design")  # the second needs Python 3.11
extensions += [name for name in OPTIONAL if importlib.util.find_spec(name)]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = [".*", "build", "dist", "runs", "**/__pycache__"]
highlight_language = "text"  # for blocks without a language, such as commands
smartquotes = False  # "auto" and --flag stay what one types
default_role = "code"

myst_heading_anchors = 4  # GitHub's, which the pages link to
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["math"]  # GitHub's fence for a formula
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning"]  # the base of `SAMCallback`
python_maximum_signature_line_length = 100

html_theme = "furo"
html_logo = "pictures/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # MathJax would be loaded from the network
html_title = f"fastsam {release}"
html_show_copyright = False
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
templates_path = ["_templates"]
html_additional_pages = {"index": "front.html"}  # the site's own first address leads to docs/index.html


def sections(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each heading of the index with its list of pages, (title, file) each."""
    for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        pages = re.findall(r"^- \[([^\]]+)\]\((\S+?)\.md\)", body, re.M)
        if pages:
            yield heading, pages


def with_toctrees(text: str) -> str:
    """Return the index with a table of contents for each of its lists.

    GitHub shows the lists. The site also has them next to every page.
    """
    made = [text]
    for heading, pages in sections(text):
        lines = "\n".join(f"{title} <{file}>" for title, file in pages)
        made.append(f"```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{lines}\n```\n")
    return "\n".join(made)


_ITEM = re.compile(r"^- \[([^\]]+)\]\((\S+?)\.md\): (.+)\n?", re.M)
_LIST = re.compile(rf"(?:{_ITEM.pattern})+", re.M)


def with_cards(text: str) -> str:
    """Return the index with a grid of cards for each of its lists of pages."""

    def grid(found: re.Match[str]) -> str:
        cards = [
            f":::{{grid-item-card}} {title}\n:link: {file}\n:link-type: doc\n\n{about}\n:::\n"
            for title, file, about in _ITEM.findall(found[0])
        ]
        return "\n".join(["::::{grid} 1 2 2 3", ":gutter: 2", "", *cards, "::::", ""])

    return _LIST.sub(grid, text)


ALGORITHMS = "<!-- algorithms: here the site shows every class -->"


def with_algorithms(text: str) -> str:
    """Return the reference with every built-in algorithm, at the place that is marked for them."""
    from fastsam.fed import algorithms

    classes = "\n\n".join(f".. autoclass:: fastsam.fed.{made.__name__}" for made in algorithms.registry.values())
    return text.replace(ALGORITHMS, f"```{{eval-rst}}\n{classes}\n```")


_SECTION = re.compile("(Args|Attributes|Returns|Yields|Raises|Note):")
# "rho, eta: their meaning" and "rho (float): its meaning", as docstrings list arguments
_NAMED = re.compile(r"((?:\*\*)?[A-Za-z_]\w*(?:, (?:\*\*)?[A-Za-z_]\w*)*)( \([^)]*\))?: (.*)")


def as_rst(lines: list[str]) -> list[str]:
    """Return a docstring as reStructuredText. It is prose with `code`, named values, definitions and indented
    equations, whose signs RST would read as markup."""
    made: list[str] = []
    outside: int | None = None  # the indentation of the text before an equation, which is indented more
    literal = False
    for paragraph in _paragraphs(lines):
        base = _indent(paragraph[0])
        if _SECTION.fullmatch(paragraph[0].strip()) and len(paragraph) > 1:
            made += [" " * base + f"**{paragraph[0].strip()}**", ""]
            inner = [line[_indent(paragraph[1]) - base :] for line in paragraph[1:]]
            named = all(_NAMED.fullmatch(line.strip()) for line in inner if _indent(line) == base)
            made += [*(_items(inner, base) if named else _prose(inner)), ""]
            outside, literal = base, False
            continue
        equation = outside is not None and base > outside
        if equation and not literal:
            made += [" " * (outside or 0) + "::", ""]
        if equation:
            made += paragraph
        else:
            outside = _indent(paragraph[-1])
            heads = [line.strip() for line in paragraph if _indent(line) <= base]
            made += _items(paragraph, base) if all(map(_NAMED.fullmatch, heads)) else _prose(paragraph)
        literal = equation
        made.append("")
    return made


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    for blank, run in itertools.groupby(lines, lambda line: not line.strip()):
        if not blank:
            yield list(run)


def _items(paragraph: list[str], base: int) -> Iterator[str]:
    """Yield the lines of named values as a list."""
    for line in paragraph:
        named = _NAMED.fullmatch(line.strip()) if _indent(line) == base else None
        text = f"- ``{named[1]}``{named[2] or ''}: {_escaped(named[3])}" if named else f"  {_escaped(line.strip())}"
        yield " " * base + text


def _prose(paragraph: list[str]) -> Iterator[str]:
    depth = 0
    for line in paragraph:
        if _indent(line) < depth:
            yield ""  # the end of a definition or of an item
        depth = _indent(line)
        yield " " * depth + _escaped(line.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _escaped(text: str) -> str:
    """Return the text with its code marked as RST's, and with no other markup."""
    parts = re.split(r"(`+[^`]+`+)", text)
    code = [f"``{part.strip('`')}``" for part in parts[1::2]]
    prose = [re.sub(r"[*|\\`]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(text for pair in zip(prose, [*code, ""], strict=True) for text in pair)


def mathml(text: str, block: bool) -> str:
    """Return a formula of LaTeX as MathML, which browsers render by themselves."""
    from docutils.utils.math.latex2mathml import tex2mathml

    made = tex2mathml(text.strip())
    return made.replace("<math ", '<math display="block" ', 1) if block else made


def visit_math(translator: Any, node: Any, block: bool = False) -> None:
    """Write a formula, and skip the rest of its node."""
    from docutils.nodes import SkipNode

    tag = "div" if block else "span"
    translator.body += [translator.starttag(node, tag, "", CLASS="math"), mathml(node.astext(), block), f"</{tag}>"]
    raise SkipNode


def setup(app: Any) -> None:
    def source_read(_: Any, page: str, source: list[str]) -> None:
        text = with_toctrees(source[0]) if page == root_doc else with_algorithms(source[0])
        if "sphinx_design" in extensions and page == root_doc:
            text = with_cards(text)
        source[0] = text

    def process_docstring(_: Any, what: str, name: str, it: object, options: Any, lines: list[str]) -> None:
        lines[:] = as_rst(lines)

    def process_signature(
        _: Any, what: str, name: str, it: Any, options: Any, signature: str | None, result: str | None
    ) -> tuple[str | None, str | None]:
        """Return the hyper-parameters of an algorithm, whose `__new__` has the parameters of `__init__`."""
        if what == "class" and signature is not None and signature.startswith("(*arguments"):
            from sphinx.util.inspect import signature as of
            from sphinx.util.inspect import stringify_signature

            made = of(it.__init__, bound_method=True)
            signature = stringify_signature(made, show_return_annotation=False, unqualified_typehints=True)
        return signature, result

    app.add_html_math_renderer("mathml", (visit_math, None), (functools.partial(visit_math, block=True), None))
    app.connect("autodoc-process-signature", process_signature)
    app.connect("source-read", source_read)
    app.connect("autodoc-process-docstring", process_docstring)
