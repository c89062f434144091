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

    def write(self, directory: Path) -> None:
        """Write `report.md` and `report.html` into the directory, which has the figures."""
        text = self.markdown(directory)
        write_bytes(directory / "report.md", text.encode())
        write_bytes(directory / "report.html", page(self.title, text, directory).encode())

    def markdown(self, directory: Path) -> str:
        """Return the report in Markdown, for a file in `directory`."""
        parts = [f"# {_escape(self.title)}", "\n".join(f"- {_escape(f'{k}: {v}')}" for k, v in self.facts.items())]
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


def page(title: str, text: str, directory: Path) -> str:
    """Return Markdown as a web page that loads nothing: the figures in `directory` become data URIs."""
    from markdown_it import MarkdownIt

    def embed(match: re.Match[str]) -> str:
        from urllib.parse import unquote

        data = (directory / unquote(html.unescape(match[1]))).read_bytes()
        return f'src="data:image/png;base64,{base64.b64encode(data).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
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
  img {{ max-width: 100%; }}
  @page {{ size: A4 landscape; }} @media print {{ body {{ font-size: 10px; margin: 0; }} }}
  code, pre {{ background: #f4f4f4; padding: .1rem .3rem; }} pre {{ padding: .6rem; overflow-x: auto; }}
</style>
</head>
<body>
{body}</body>
</html>
"""
