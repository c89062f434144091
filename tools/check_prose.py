"""Check of docstrings and comments on changed lines: python tools/check_prose.py [--since REV] [FILE ...].

A docstring must not begin with a question word or a preposition, a sentence has at most 40 words, and some words are
banned because readers took them for something else (CONTRIBUTING.md has the rules). Without files it checks the lines
of Python files that differ from REV, by default the last commit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FIRST = {"What", "Whether", "Where", "Which", "Who", "Whom", "Whose", "How", "Those", "Of", "As"}
BANNED = re.compile(r"\b(nobody|somebody|whoever|everybody|behind|beside|told|lent)\b")
MOST_WORDS = 40


def texts(source: str) -> Iterator[tuple[int, int, str, bool]]:
    """Yield first line, last line, text and kind (True for a docstring) of every docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                statement = node.body[0]
                yield statement.lineno, statement.end_lineno or statement.lineno, text, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.start[0], token.string.lstrip("#: "), False


def problems(text: str, is_docstring: bool) -> Iterator[str]:
    """Yield what is wrong with a text."""
    words = text.split()
    if is_docstring and words and words[0].rstrip(",:") in FIRST:
        yield f"begins with {words[0]!r}; begin with a verb (functions) or a noun (classes, modules)"
    prose = "\n".join(line for line in text.split("\n") if not line.startswith("    "))  # formulas and examples aside
    for word in BANNED.findall(prose):
        yield f"has the word {word!r}"
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", prose):
        if len(sentence.split()) > MOST_WORDS:
            yield f"has a sentence of {len(sentence.split())} words: {' '.join(sentence.split()[:8])} ..."


def changed_lines(rev: str) -> dict[str, set[int]]:
    """Return the changed lines of Python files since `rev`, by file."""
    diff = subprocess.run(
        ["git", "diff", "-U0", "--no-color", rev, "--", "*.py"], capture_output=True, text=True, check=True
    ).stdout
    lines: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif match := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines.setdefault(file, set()).update(range(first, first + count))
    return {name: rows for name, rows in lines.items() if rows and Path(name).is_file()}


def main() -> int:
    """Print every problem. Return 1 if any was found, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files to check as a whole")
    parser.add_argument("--since", default="HEAD", metavar="REV", help="check lines that changed since this commit")
    args = parser.parse_args()
    lines_by_file: dict[str, set[int] | None] = dict.fromkeys(args.files)
    if not args.files:
        lines_by_file |= changed_lines(args.since)
    num_problems = 0
    for file, rows in sorted(lines_by_file.items()):
        for first, last, text, is_docstring in texts(Path(file).read_text()):
            if rows is None or rows.intersection(range(first, last + 1)):
                for problem in problems(text, is_docstring):
                    print(f"{file}:{first}: {problem}")
                    num_problems += 1
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
