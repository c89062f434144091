"""Check of docstrings and comments on changed lines: python tools/check_prose.py [--since REV] [FILE ...].

A docstring must not begin with a question word or a preposition, a sentence has at most 40 words, and some words are
banned because readers took them for something else (CONTRIBUTING.md has the rules). Parameters are described in a
section `Args` or `Attributes`, by names that exist. Without files it checks the lines of Python files that differ from
REV, by default the last commit.
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
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?(?:\n|$))+)", re.M)  # with its indented lines
ENTRY = re.compile(r"^ {4}(\**\w+(?:, \**\w+)*)(?: \([^)]*\))?: ", re.M)  # the names that one line describes

Described = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts(source: str) -> Iterator[tuple[int, int, str, Described | None]]:
    """Yield first line, last line, text and owner (None for a comment) of every docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Described):
            text = ast.get_docstring(node)
            if text:
                statement = node.body[0]
                yield statement.lineno, statement.end_lineno or statement.lineno, text, node
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.start[0], token.string.lstrip("#: "), None


def parameters(node: ast.AST) -> set[str]:
    """Return the names of a function's parameters."""
    arguments = [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.arguments)]
    return {inner.arg for one in arguments for inner in ast.walk(one) if isinstance(inner, ast.arg)}


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, attributes, methods, and parameters of methods."""
    names = set[str]()
    for inner in ast.walk(node):
        names |= parameters(inner)
        names |= {getattr(inner, key) for key in ("id", "attr", "name") if isinstance(getattr(inner, key, None), str)}
    return names


def problems_of_names(text: str, node: Described) -> Iterator[str]:
    """Yield the names in `Args` and `Attributes` that do not exist, and parameters that are described elsewhere."""
    names = attributes(node) if isinstance(node, ast.ClassDef) else parameters(node)
    inherits = isinstance(node, ast.ClassDef) and bool(node.bases)
    sections = "\n".join(SECTION.findall(text))
    described_names = {name.lstrip("*") for entry in ENTRY.findall(sections) for name in entry.split(", ")}
    if not inherits:
        yield from (f"describes {name!r}, which does not exist" for name in sorted(described_names - names))
    prose = " ".join(SECTION.sub("", text).split())
    for name in sorted(parameters(node) - described_names):
        if re.search(rf"(?:^|[.;] ){re.escape(name)}: ", prose):
            yield f"describes {name!r} in a sentence; use a section Args, or `{name}` in a whole sentence"


def problems(text: str, node: Described | None) -> Iterator[str]:
    """Yield what is wrong with a text. `node` is the owner of a docstring, None for a comment."""
    words = text.split()
    if node is not None:
        if words and words[0].rstrip(",:") in FIRST:
            yield f"begins with {words[0]!r}; begin with a verb (functions) or a noun (classes, modules)"
        yield from problems_of_names(text, node)
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
        for first, last, text, node in texts(Path(file).read_text()):
            if rows is None or rows.intersection(range(first, last + 1)):
                for problem in problems(text, node):
                    print(f"{file}:{first}: {problem}")
                    num_problems += 1
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
