"""A report: one web page with its figures, and each of its tables as .csv and .tex."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fastsam.fed.common.atomic_files import make_directory, write_bytes
from fastsam.lab.report.table import Table

TABLES = "tables"  # folder of the tables' files


@dataclass(frozen=True)
class Figure:
    """A PNG file and its caption."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Document:
    """The content of a report.

    Args:
        tables, figures: in this order.
    """

    title: str
    facts: Mapping[str, Any]  # listed below the title
    tables: Sequence[Table]
    figures: Sequence[Figure]
    runs: Sequence[tuple[str, str]]  # name and directory of each run
    command: str  # repeats all of it
    sentences: Sequence[str] = ()  # one for each algorithm, above the tables

    def write(self, directory: Path) -> None:
        """Write `report.html`, which loads nothing from elsewhere, and each table as `tables/NAME.csv` and `.tex`."""
        write_bytes(directory / "report.html", self.page().encode())
        make_directory(directory / TABLES)
        for name, table in zip(_file_names(self.tables), self.tables, strict=True):
            write_bytes(directory / TABLES / f"{name}.csv", table.csv().encode())
            write_bytes(directory / TABLES / f"{name}.tex", table.tex().encode())

    def page(self) -> str:
        """Return the report as a web page. Tables and the list of runs that are folded are opened by a reader."""
        parts = [f"<h1>{escape(self.title)}</h1>", _list(f"{key}: {value}" for key, value in self.facts.items())]
        if self.sentences:
            parts += ["<h2>Result</h2>", _list(self.sentences)]
        for table in self.tables:
            body = f"{table.html()}\n<p>{escape(table.note)}</p>"
            parts.append(_folded(table.title, body) if table.is_folded else f"<h2>{escape(table.title)}</h2>\n{body}")
        for figure in self.figures:
            data, caption = base64.b64encode(figure.path.read_bytes()).decode(), escape(figure.caption)
            parts.append(f'<h2>{caption}</h2>\n<p><img src="data:image/png;base64,{data}" alt="{caption}"></p>')
        parts.append(_folded("Runs", _list(f"{name}: {path}" for name, path in self.runs)))
        parts.append(f"<p>Repeat with</p>\n<pre><code>{escape(self.command)}</code></pre>")
        return _PAGE.format(title=escape(self.title), body="\n".join(parts) + "\n")


def _list(texts: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{escape(text)}</li>\n" for text in texts) + "</ul>"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{body}\n</details>"


def _file_names(tables: Sequence[Table]) -> list[str]:
    """Return a name for the files of each table: its title, numbered if a table before it has this title too."""
    names: list[str] = []
    for table in tables:
        name = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")
        count = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in names)
        names.append(f"{name}-{count + 1}" if count else name)
    return names


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
  h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem; }}
  table {{ display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }}
  th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; text-align: right; }}
  th:first-child, td:first-child {{ text-align: left; }}
  th {{ border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }}
  table + p {{ color: #555; font-size: .9rem; }}
  summary {{ font-size: 1.2rem; font-weight: bold; margin-top: 2.2rem; cursor: pointer; }}
  img {{ max-width: 100%; }}
  @page {{ size: A4 landscape; }} @media print {{ body {{ font-size: 10px; margin: 0; }} }}
  code, pre {{ background: #f4f4f4; padding: .1rem .3rem; }} pre {{ padding: .6rem; overflow-x: auto; }}
</style>
</head>
<body>
{body}</body>
</html>
"""
