"""A report as one Markdown or HTML file that needs no other: the figures are inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsam.lab.report.tables import Table


@dataclass(frozen=True)
class Figure:
    """A PNG file and what it shows."""

    path: Path
    caption: str

    @property
    def uri(self) -> str:
        """The file as a data URI."""
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True)
class Document:
    """What a report says. runs: a name and a directory for each run. command: repeats it all."""

    title: str
    facts: Mapping[str, Any]
    tables: Sequence[Table]
    figures: Sequence[Figure]
    runs: Sequence[tuple[str, str]]
    command: str


def markdown(document: Document) -> str:
    """The report in Markdown. The figures' data stand at the end, so that the text above can be read as it is."""
    lines = [f"# {document.title}", "", *(f"- {key}: {value}" for key, value in document.facts.items()), ""]
    for table in document.tables:
        lines += [f"## {table.title}", "", _row(table.head), _row(["---", *["---:"] * (len(table.head) - 1)])]
        lines += [*map(_row, table.rows), "", table.note, ""]
    for figure in document.figures:
        lines += [f"## {figure.caption}", "", f"![{figure.caption}][{figure.path.stem}]", ""]
    lines += ["## Runs", "", *(f"- {name}: `{where}`" for name, where in document.runs), ""]
    lines += ["Repeat with", "", f"    {document.command}", ""]
    return "\n".join([*lines, *(f"[{figure.path.stem}]: {figure.uri}" for figure in document.figures), ""])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def html(document: Document) -> str:
    """The report as a web page that loads nothing."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(document=document)


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ document.title }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
  th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }
  th:first-child, td:first-child { text-align: left; }
  .note, figcaption { color: #555; font-size: .9rem; }
  figure { margin: 1rem 0; } img { max-width: 100%; }
  dt { font-weight: 600; float: left; clear: left; min-width: 9rem; margin-right: 1rem; }
  dd { margin: 0 0 .2rem 10rem; }
  @page { size: A4 landscape; } @media print { body { font-size: 10px; margin: 0; } }
  code, pre { background: #f4f4f4; padding: .1rem .3rem; } pre { padding: .6rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ document.title }}</h1>
<dl>
{% for key, value in document.facts.items() %}
  <dt>{{ key }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% for table in document.tables %}
<h2>{{ table.title }}</h2>
<div class="wide"><table>
  <thead><tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
  <tbody>
  {% for row in table.rows %}
    <tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table></div>
<p class="note">{{ table.note }}</p>
{% endfor %}
{% for figure in document.figures %}
<h2>{{ figure.caption }}</h2>
<figure><img src="{{ figure.uri }}" alt="{{ figure.caption }}"></figure>
{% endfor %}
<h2>Runs</h2>
<ul>
{% for name, where in document.runs %}
  <li>{{ name }}: <code>{{ where }}</code></li>
{% endfor %}
</ul>
<p>Repeat with</p>
<pre>{{ document.command }}</pre>
</body>
</html>
"""
