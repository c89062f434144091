"""Writes what `fastsam reproduce --list` prints, from the tables' files: python tools/listing.py."""

from __future__ import annotations

import json
from pathlib import Path

from fastsam.lab.reproduce import runner
from fastsam.lab.reproduce.table import PaperTable, load, names

FILE = Path(__file__).parents[1] / "fastsam" / "lab" / "reproduce" / "tables" / "listing.json"


def count_runs(table: PaperTable) -> int:
    """Return the number of runs of a table."""
    return sum(len(plan.runs) for plan in runner.plans(table, (), table.seeds).values())


def text() -> str:
    """Return a line for each table: name, title, data sets at the paper's scale, numbers of runs at both scales."""
    lines = []
    for name in names():
        table = load(name)
        runs = f"{count_runs(table)}; {count_runs(load(name, 'digits'))}"
        lines.append(json.dumps([name, table.title, ", ".join(table.needs), runs], ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())
