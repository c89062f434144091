"""The workflow that builds, tests and publishes the packages."""

import re

from tests.helpers.places import ROOT

WORKFLOW = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()


def test_the_workflow_builds_for_what_the_metadata_promise_and_publishes_without_a_password() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    (matrix,) = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r'"([\d.]+)"', matrix) == versions
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', metadata)
    assert f'torch: "{oldest}.0" }}' in WORKFLOW
    targets = re.findall(r"run: make (\S+)", WORKFLOW)
    assert targets == ["wheels"] and re.search(r"^wheels:", (ROOT / "Makefile").read_text(), re.M)
    match = re.search(r"pytest .* (tests/\S+) (tests/\S+)$", WORKFLOW, re.M)
    assert match and all(list((ROOT / folder).glob("test_*.py")) for folder in match.groups())
    assert "id-token: write" in WORKFLOW and "secrets." not in WORKFLOW
    image, tag = re.search(r"pypa/(manylinux\w+)", WORKFLOW), re.search(r"PLAT=(\S+)", WORKFLOW)
    assert image and tag and image[1] == tag[1]
