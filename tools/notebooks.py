"""Writes the tutorials' notebooks with their outputs: python tools/notebooks.py

A notebook has the cells of its page: each fenced block of Python is a code cell, the text between is Markdown. The code
runs in one namespace, in a temporary folder, and its printed lines become the outputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("tutorial_optimizer", "tutorial_federated")
_PYTHON = re.compile(r"^```python\n(.*?)^```\n?", re.M | re.S)


def cells(text: str) -> list[dict[str, Any]]:
    """Return the cells of a page, without outputs."""
    blocks = []
    for number, part in enumerate(_PYTHON.split(text)):
        source = part.strip()
        if not source:
            continue
        name = hashlib.sha256(f"{number} {source}".encode()).hexdigest()[:8]
        cell: dict[str, Any] = {"cell_type": "markdown", "id": name, "metadata": {}, "source": _lines(source)}
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        blocks.append(cell)
    return blocks


def run(code_cells: list[dict[str, Any]]) -> None:
    """Execute the code cells in order and store their printed lines as outputs."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(code_cells, 1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec", dont_inherit=True), names)
        cell["execution_count"] = number
        if text := output.getvalue():
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": _lines(text)}]


def notebook(text: str) -> dict[str, Any]:
    """Return the notebook of a page, executed in a temporary folder."""
    blocks, start = cells(text), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run([cell for cell in blocks if cell["cell_type"] == "code"])
        finally:
            os.chdir(start)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": blocks, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Write both notebooks next to their pages."""
    for name in PAGES:
        document = notebook((ROOT / "docs" / f"{name}.md").read_text())
        (ROOT / "docs" / f"{name}.ipynb").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
