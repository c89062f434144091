"""A report: `report.md`, which links its figures, and `report.html`, the same text in one file with its figures."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsam.fed.common.atomic_files import write_bytes
from fastsam.lab.report.table import Table


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
        """Write `report.md` and `report.html` into the directory, which has the figures."""
        text = self.markdown(directory)
        write_bytes(directory / "report.md", text.encode())
        folded = ["Runs", *(table.title for table in self.tables if table.is_folded)]
        write_bytes(directory / "report.html", page(self.title, text, directory, folded).encode())

    def markdown(self, directory: Path) -> str:
        """Return the report in Markdown, for a file in `directory`."""
        parts = [f"# {_escape(self.title)}", "\n".join(f"- {_escape(f'{k}: {v}')}" for k, v in self.facts.items())]
        if self.sentences:
            parts += ["## Result", "\n".join(f"- {_escape(sentence)}" for sentence in self.sentences)]
        for table in self.tables:
            parts += [f"## {_escape(table.title)}", table.markdown(), _escape(table.note)]
        for figure in self.figures:
            caption, path = _escape(figure.caption), os.path.relpath(figure.path, directory)
            parts += [f"## {caption}", f"![{caption}](<{path}>)"]
        parts += ["## Runs", "\n".join(f"- {_escape(name)}: `{path}`" for name, path in self.runs)]
        parts += ["Repeat with", f"    {self.command}"]
        return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    """Return the text without characters that Markdown would take for markup."""
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", text)


def page(title: str, text: str, directory: Path, folded: Sequence[str] = ()) -> str:
    """Return Markdown as a web page that loads nothing: the figures in `directory` become data URIs.

    A reader opens the sections with a title in `folded`.
    """
    from markdown_it import MarkdownIt

    def embed(match: re.Match[str]) -> str:
        from urllib.parse import unquote

        data = (directory / unquote(html.unescape(match[1]))).read_bytes()
        return f'src="data:image/png;base64,{base64.b64encode(data).decode()}"'

    def fold(section: re.Match[str]) -> str:
        if section[1] not in map(html.escape, folded):
            return section[0]
        return f"<details><summary>{section[1]}</summary>\n{section[2]}</details>\n"

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r"<h2>(.*?)</h2>\n(.*?)(?=<h2>|<p>Repeat with</p>|\Z)", fold, body, flags=re.S)
    return _PAGE.format(title=html.escape(title), body=re.sub(r'src="([^"]*)"', embed, body))


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
  th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }}
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
