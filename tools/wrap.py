"""Wraps the prose of Markdown pages at 120 columns, by mdformat.

    python tools/wrap.py [--check] PAGE.md ...

Paragraphs and lists with a longer line are given to mdformat, one by one. Code, tables, headings and what is written by
a program (from `<!-- name:...` to `<!-- /name -->`) stay as they are. A page is written only where it is the same HTML
as before.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mdformat
from markdown_it import MarkdownIt

COLUMNS = 120
PROSE = ("paragraph_open", "bullet_list_open", "ordered_list_open", "blockquote_open")
MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.add_render_rule("softbreak", lambda *_: " ")


def _prose(text: str) -> Iterator[tuple[int, int]]:
    """From which line to before which the page has a paragraph or a list."""
    written = ""  # by a program, under this name
    tokens = MARKDOWN.parse(text)
    for number, token in enumerate(tokens):
        if token.level or token.map is None:
            continue
        if token.type == "html_block":
            begin, end = (re.match(rf"<!-- {mark}", token.content) for mark in (r"(\w+):\S+ -->", r"/(\w+) -->"))
            written = begin[1] if begin else "" if end and end[1] == written else written
        elif token.type in PROSE and not written:
            last = next(i for i in range(number, len(tokens)) if tokens[i].level == 0 and tokens[i].nesting < 0)
            if not any(inside.type == "table_open" for inside in tokens[number:last]):
                yield token.map[0], token.map[1]


def wrapped(page: str) -> str:
    """The page with lines of prose of at most 120 columns, but for what cannot be broken. Raises ValueError where it
    would read differently."""
    lines = page.splitlines()
    for first, end in reversed(list(_prose(page))):
        while not lines[end - 1].strip():
            end -= 1
        if max(map(len, lines[first:end])) > COLUMNS:
            made = mdformat.text("\n".join(lines[first:end]), options={"wrap": COLUMNS, "number": True})
            lines[first:end] = made.splitlines()
    made = "\n".join(lines) + "\n"
    if MARKDOWN.render(made) != MARKDOWN.render(page):
        raise ValueError(
            "wrapped, the page would be another; wrap it by hand, or write its links and lists more simply"
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/wrap.py", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page has longer lines")
    options = parser.parse_args(argv)
    changed = 0
    for path in options.pages:
        text = path.read_text()
        try:
            made = wrapped(text)
        except ValueError as error:
            raise SystemExit(f"{path}: {error}") from error
        if made != text:
            changed += 1
            print(f"{path}: {'has' if options.check else 'had'} lines of more than {COLUMNS} columns")
            if not options.check:
                path.write_text(made)
    return int(options.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
