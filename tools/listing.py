"""Writes what `fastsam reproduce --list` prints, from the tables' files: python tools/listing.py."""

from __future__ import annotations

import json
from pathlib import Path

from fastsam.lab.reproduce.command import listing

FILE = Path(__file__).parents[1] / "fastsam" / "lab" / "reproduce" / "tables" / "listing.json"


def text() -> str:
    """Return a line for each table: name, title, data sets, numbers of runs."""
    lines = (json.dumps(row, ensure_ascii=False) for row in listing())
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())
