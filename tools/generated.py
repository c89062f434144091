"""Writes the texts that are made from the package: python -m tools.generated

They are the code that pages quote, the table of a config's keys in docs/cli.md, and the list that `fastsam reproduce
--list` prints. A page marks a quotation by `<!-- code:PATH NAMES -->` and `<!-- /code -->`. The fenced block between
the marks has the functions NAMES of the file PATH, or all of the file except its docstring if no name is given. Readers
can run it without further imports.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from bench import ROOT, report
from fastsam.lab.reproduce.command import make_plans
from fastsam.lab.reproduce.table import PaperTable, load, names
from fastsam.lab.run_config import KEYS, OPTION_TABLES

LISTING = ROOT / "fastsam" / "lab" / "reproduce" / "tables" / "listing.json"


def pages() -> dict[Path, str]:
    """Return the present text of every page of docs/ that has a generated part."""
    texts = {path: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    return {path: text for path, text in texts.items() if _parts(text)}


def page(text: str) -> str:
    """Return the text of a page with new generated parts."""
    return report.fill(text, _parts(text))


def _parts(text: str) -> dict[str, str]:
    """Return the generated parts of a page by the names of their places."""
    parts = {}
    for place in report.places(text):
        kind, _, name = place.partition(":")
        if kind == "code":
            parts[place] = f"```python\n{quote_code(*name.split())}\n```"
        elif kind == "keys":
            parts[place] = key_table()
    return parts


def quote_code(path: str, *names: str) -> str:
    """Return the source of the functions `names` of a file, or all code of the file without `names`.

    The formatter's marks are left out. Functions come after an import of the file's names, so that they can be copied.
    """
    text = (ROOT / path).read_text().replace("  # fmt: skip", "")
    nodes = {getattr(node, "name", ""): node for node in ast.parse(text).body}
    if not names:
        return text.split('"""', 2)[2].strip()
    header = f"from {path.removesuffix('.py').replace('/', '.')} import *"
    return "\n\n\n".join([header, *(ast.get_source_segment(text, nodes[name]) or "" for name in names)])


def key_table() -> str:
    """Return the table of all keys of a config. docs/measures.md has the keys of the table `measures`."""
    tables = {table: rows for table, rows in OPTION_TABLES.items() if table != "measures"}
    keys = KEYS | {f"{table}.{key}": row for table, rows in tables.items() for key, row in rows.items()}
    rows = [f"| `{key}` | `{row.default_text}` | {row.meaning} |" for key, row in keys.items()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def count_runs(table: PaperTable) -> int:
    """Return the number of runs of a table of a paper."""
    return sum(len(plan.runs) for plan in make_plans(table, (), table.seeds).values())


def listing() -> str:
    """Return a line for each table: name, title, data sets at the paper's scale, numbers of runs at both scales."""
    lines = []
    for name in names():
        table = load(name)
        runs = f"{count_runs(table)}; {count_runs(load(name, 'digits'))}"
        lines.append(json.dumps([name, table.title, table.data, runs], ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(page(text))
    LISTING.write_text(listing())
