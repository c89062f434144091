"""The workflows that check, build, test and publish the packages, and the page of the package index."""

import re
from itertools import pairwise

import pytest

import fastsam
from tests.helpers.places import ROOT
from tools.index_page import absolute

FOLDER = ROOT / ".github" / "workflows"
WORKFLOW, RELEASE = ((FOLDER / name).read_text() for name in ("wheels.yml", "release.yml"))


def test_the_workflow_builds_for_what_the_metadata_promise() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    (matrix,) = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r'"([\d.]+)"', matrix) == versions
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', metadata)
    assert f'torch: "{oldest}.0" }}' in WORKFLOW
    targets = re.findall(r"run: make (\S+)", WORKFLOW)
    assert targets == ["wheels"] and re.search(r"^wheels:", (ROOT / "Makefile").read_text(), re.M)
    folders = re.findall(r" (tests/\w+)", "\n".join(re.findall(r"-m pytest .*", WORKFLOW)))
    assert len(folders) == 3 and all(list((ROOT / folder).glob("test_*.py")) for folder in folders)
    image, tag = re.search(r"pypa/(manylinux\w+)", WORKFLOW), re.search(r"PLAT=(\S+)", WORKFLOW)
    assert image and tag and image[1] == tag[1]
    assert "-abi3-manylinux_" in WORKFLOW and "-py3-none-any.whl" in WORKFLOW  # both are tested


def test_a_release_is_tested_and_rehearsed_before_it_is_published_without_a_password() -> None:
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)+)", RELEASE.partition("\njobs:\n")[2], re.M))
    order = ["version", "wheels", "rehearsal", "install", "publish"]
    assert list(jobs) == order
    for earlier, later in pairwise(order):
        assert re.search(rf"needs: .*\b{earlier}\b", jobs[later])
    assert "uses: ./.github/workflows/wheels.yml" in jobs["wheels"] and "workflow_call:" in WORKFLOW
    assert "test.pypi.org" in jobs["rehearsal"] and "test.pypi.org" not in jobs["publish"]
    assert "if: github.ref_type == 'tag'" in jobs["publish"]
    assert RELEASE.count("id-token: write") == 2 and "secrets." not in RELEASE


def test_actions_are_pinned_by_hash_and_have_no_rights_by_default() -> None:
    for path in FOLDER.glob("*.yml"):
        text = path.read_text()
        for action in re.findall(r"uses: (?!\./)(\S+.*)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), f"{path.name}: {action}"
        assert re.search(r"^permissions:\n  contents: read\n", text, re.M), path.name
    assert "run: .ci/run" in (FOLDER / "checks.yml").read_text() and "make docs" in (FOLDER / "docs.yml").read_text()


def test_the_steps_name_targets_of_make_and_files_that_exist() -> None:
    yaml = pytest.importorskip("yaml", reason="no PyYAML")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    scripts = [(ROOT / ".ci" / "run").read_text()]
    for path in FOLDER.glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        needs = [job.get("needs", []) for job in jobs.values()]
        assert {name for names in needs for name in ([names] if isinstance(names, str) else names)} <= set(jobs)
        scripts += [step["run"] for job in jobs.values() for step in job.get("steps", ()) if "run" in step]
    named = re.findall(r"^make ([a-z-]+)", "\n".join(scripts), re.M)
    assert {"test", "check", "docs", "wheels"} <= set(named) <= targets
    files = re.findall(r"(?:^|[ /])(tools/[\w.]+|\.ci/\w+)", "\n".join(scripts), re.M)
    assert len(files) >= 2 and all((ROOT / name).exists() for name in files)


def test_the_version_is_the_same_everywhere() -> None:
    assert re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == fastsam.__version__
    # The release workflow reads the version with sed, and without an import.
    (pattern,) = re.findall(r"sed -n 's/\^(.*?)\\\(", RELEASE)
    assert f'{pattern}{fastsam.__version__}"\n' in (ROOT / "fastsam" / "__init__.py").read_text()


def test_the_page_of_the_package_index_has_absolute_links() -> None:
    text = absolute((ROOT / "README.md").read_text(), "owner/name", "v1.2.3")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert all(link.startswith(("https://", "http://")) for _, link in links)
    files = [
        re.match(r"https://(?:raw.githubusercontent.com/owner/name/|github.com/owner/name/blob/)v1.2.3/([^#]+)", x)
        for _, x in links
    ]
    assert len([match for match in files if match]) > 20 and all((ROOT / match[1]).exists() for match in files if match)
    assert "(https://raw.githubusercontent.com/owner/name/v1.2.3/docs/pictures/logo.svg)" in text
    assert "[![checks](https://github.com/owner/name/actions/workflows/checks.yml/badge.svg)]" in text
    badges = re.findall(r"actions/workflows/([\w.]+)", text)
    assert badges and all((FOLDER / name).exists() for name in badges)
    with pytest.raises(ValueError, match="OWNER/NAME"):
        absolute("", "name", "v1")
