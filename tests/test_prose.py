"""The check of docstrings and comments (`tools/check_prose.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

pytestmark = pytest.mark.pages

TOOL = ROOT / "tools" / "check_prose.py"
LONG = " ".join(["word"] * 41)


def check(folder: Path, source: str) -> tuple[int, str]:
    file = folder / "made.py"
    file.write_text(source)
    result = subprocess.run([sys.executable, str(TOOL), str(file)], capture_output=True, text=True, cwd=ROOT)
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('def f():\n    """Whether it is so."""\n', ":2: begins with 'Whether'"),
        ('"""Of the module."""\n', ":1: begins with 'Of'"),
        ("x = 1  # nobody reads it\n", ":1: has the word 'nobody'"),
        (f'class A:\n    """A class. {LONG}."""\n', ":2: has a sentence of 41 words"),
        (
            'def f(x):\n    """Return x.\n\n    Args:\n        y: a number.\n    """\n',
            ":2: describes 'y', which does not",
        ),
        ('class A:\n    """A class.\n\n    Attributes:\n        y: a number.\n    """\n', ":2: describes 'y', which"),
        ('def f(x):\n    """Return x. x: a number."""\n', ":2: describes 'x' in a sentence"),
    ],
    ids=["question word", "preposition", "banned", "long", "no parameter", "no attribute", "in a sentence"],
)
def test_a_slip_is_found(tmp_path: Path, source: str, words: str) -> None:
    code, output = check(tmp_path, source)
    assert code == 1 and words in output


def test_plain_sentences_and_formulas_pass(tmp_path: Path) -> None:
    formula = f"        {LONG} nobody\n\n"
    sections = (
        "    Args:\n        x, y (float): two numbers,\n            or more.\n        **z: others.\n\n    Raises:\n"
    )
    docstring = f'    """Return x.\n\n{formula}{sections}        ValueError: no.\n    """\n'
    assert check(tmp_path, f"def f(x, y, **z):\n{docstring}") == (0, "")
