"""The check of docstrings and comments (`tools/check_prose.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

TOOL = ROOT / "tools" / "check_prose.py"
LONG = " ".join(["word"] * 41)


def check(folder: Path, source: str) -> tuple[int, str]:
    file = folder / "made.py"
    file.write_text(source)
    made = subprocess.run([sys.executable, str(TOOL), str(file)], capture_output=True, text=True, cwd=ROOT)
    return made.returncode, made.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('def f():\n    """Whether it is so."""\n', ":2: begins with 'Whether'"),
        ('"""Of the module."""\n', ":1: begins with 'Of'"),
        ("x = 1  # nobody reads it\n", ":1: has the word 'nobody'"),
        (f'class A:\n    """A class. {LONG}."""\n', ":2: has a sentence of 41 words"),
    ],
    ids=["question word", "preposition", "banned", "long"],
)
def test_what_is_found(tmp_path: Path, source: str, words: str) -> None:
    code, output = check(tmp_path, source)
    assert code == 1 and words in output


def test_plain_sentences_and_formulas_pass(tmp_path: Path) -> None:
    source = f'def f():\n    """Return x.\n\n        {LONG} nobody\n\n    Raises:\n        ValueError: no.\n    """\n'
    assert check(tmp_path, source) == (0, "")
