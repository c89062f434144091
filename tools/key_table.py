"""Writes the table of a config's keys in docs/cli.md from the sources: python tools/key_table.py."""

from __future__ import annotations

from pathlib import Path

from fastsam.lab.run_config import KEYS, OPTION_TABLES

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
START, END = "<!-- keys:all -->\n", "<!-- /keys -->\n"


def page(text: str) -> str:
    """Return the page with the table between its marks."""
    head, _, tail = text.partition(START)
    keys = KEYS | {f"{table}.{key}": row for table, rows in OPTION_TABLES.items() for key, row in rows.items()}
    rows = [f"| `{key}` | `{row.default_text}` | {row.meaning} |\n" for key, row in keys.items()]
    return "".join([head, START, "| key | default | meaning |\n|---|---|---|\n", *rows, END, tail.partition(END)[2]])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
