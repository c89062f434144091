"""The versions that `make` installs."""

import re
import sys

import pytest

from tests.helpers.places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from constraints import keep_installed_torch

PINS = "# versions\ntorch==2.13.0\ntriton==3.7.1  # torch's own\npytest==9.2.0\n"


@pytest.mark.parametrize(
    ("torch_version", "expected"),
    [
        (None, PINS),
        ("2.13.0", PINS),
        ("2.13.0+cpu", PINS),
        ("2.11.0+cu128", "# versions\npytest==9.2.0\ntorch==2.11.0+cu128\n"),
        ("2.13.1", "# versions\npytest==9.2.0\ntorch==2.13.1\n"),
    ],
)
def test_constraints_keep_an_installed_torch(torch_version: str | None, expected: str) -> None:
    assert keep_installed_torch(PINS, torch_version) == expected


def test_constraints_refuse_an_old_torch() -> None:
    with pytest.raises(SystemExit, match="has torch 2.9.1, fastsam needs 2.10 or newer"):
        keep_installed_torch(PINS, "2.9.1")


def test_the_pins_are_of_the_project() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==2\.\d+\.\d+$", text, re.MULTILINE)
    assert keep_installed_torch(text, "2.11.0").count("torch==") == 1
