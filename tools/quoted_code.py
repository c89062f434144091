"""Writes the code that pages quote from the package: python tools/quoted_code.py

A page marks the place by `<!-- code:PATH NAMES -->` and `<!-- /code -->`. The fenced block between them holds the
functions NAMES of the file PATH, or all of the file but its docstring if no name is given.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUOTED = re.compile(r"(<!-- code:(\S+)((?: \w+)*) -->\n).*?(<!-- /code -->)", re.S)


def quote_code(path: str, names: list[str]) -> str:
    """Return the source of the functions `names` of a file, or all code of the file if `names` is empty."""
    text = (ROOT / path).read_text()
    nodes = {getattr(node, "name", ""): node for node in ast.parse(text).body}
    if not names:
        return text.split('"""', 2)[2].strip()
    return "\n\n\n".join(ast.get_source_segment(text, nodes[name]) or "" for name in names)


def page(text: str) -> str:
    """Return the text of a page with the quoted code between its marks."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}```python\n{quote_code(match[2], match[3].split())}\n```\n{match[4]}"

    return QUOTED.sub(fill, text)


def pages() -> dict[Path, str]:
    """Return the present text of every page of docs/ that quotes code."""
    texts = {path: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    return {path: text for path, text in texts.items() if QUOTED.search(text)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(page(text))
