"""docs/recipes.md quotes messages that fastsam really gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.pages import text_of
from tests.helpers.places import ROOT

pytestmark = pytest.mark.pages

HOLE = "…"  # part of a message that differs from case to case
ROOMS = ("*.py", "optim/*.py", "lab/*.py", *(f"fed/{room}/*.py" for room in ("common", "loop", "rundir", "update")))


def texts() -> Iterator[str]:
    """The strings of the rooms that speak to users first, with holes where values go."""
    for path in (path for room in ROOMS for path in (ROOT / "fastsam").glob(room)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_its_quotes_are_messages() -> None:
    quotes = re.findall(r"^> (.+)$", text_of("docs/recipes.md"), re.M)
    assert len(quotes) >= 10
    messages = list(texts())
    for quote in quotes:
        pieces = [piece.strip(" .:") for piece in re.split(rf"{HOLE}|; ", quote)]
        missing_pieces = [piece for piece in pieces if not any(piece in text for text in messages)]
        assert not missing_pieces, f"no message says {missing_pieces}"
