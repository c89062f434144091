"""Writes the tutorials' notebooks, and the outputs and figures of their pages: python tools/notebooks.py

A notebook has the cells of its page: each fenced block of Python is a code cell, the text between is Markdown. Before
them a cell installs fastsam where it is missing, as on a fresh machine with a GPU. The code runs in one namespace, in a
temporary folder. Its printed lines become the outputs of the cell, and in the page a block
of text after the code. A file `curves.svg` that the code saves becomes the figure of the page.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("tutorial_optimizer", "tutorial_federated")
FIGURE = "curves.svg"
INSTALL = """\
# On a new machine: fastsam beside the torch that is there, compiled for this machine's processor and GPU
try:
    import fastsam
except ImportError:
    import os
    import shutil
    import subprocess

    SOURCE = ".."  # the folder of the checkout: `!git clone` makes one where there is only this notebook
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        os.environ["TORCH_CUDA_ARCH_LIST"] = subprocess.check_output(query, text=True).split()[0]
    %pip install --quiet "setuptools>=77" ninja
    %pip install --quiet --no-build-isolation "{SOURCE}[lab]"
"""
_PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.M | re.S)  # code, and its output


def cells(text: str) -> list[dict[str, Any]]:
    """Return the cells of a page, without outputs."""
    blocks = []
    for number, source in enumerate(map(str.strip, _PYTHON.split(text))):
        name = hashlib.sha256(f"{number} {source}".encode()).hexdigest()[:8]
        cell = {"cell_type": "markdown", "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
        code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []} if number % 2 else {}
        blocks += [cell | code] if source else []
    return blocks


def run(code_cells: list[dict[str, Any]]) -> None:
    """Execute the code cells in order and store their printed lines as outputs."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(code_cells, 1):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile("".join(cell["source"]), f"cell {number}", "exec", dont_inherit=True), names)
        lines = output.getvalue().splitlines(keepends=True)
        items = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        cell.update(execution_count=number, outputs=items)


def notebook(text: str, figure: Path | None = None) -> dict[str, Any]:
    """Return the notebook of a page, executed in a temporary folder. A saved figure is copied to `figure`."""
    blocks = cells(text)
    matplotlib.use("Agg")
    style = {"svg.fonttype": "none", "svg.hashsalt": "fastsam", "figure.figsize": (3.7, 3.0), "font.size": 9}
    style |= {"figure.autolayout": True}
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context(style), contextlib.ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        os.chdir(folder)
        run([cell for cell in blocks if cell["cell_type"] == "code"])
        if figure and Path(FIGURE).exists():
            shutil.copy(FIGURE, figure)
    install = {"cell_type": "code", "id": "install", "metadata": {"tags": ["install"]}, "execution_count": None}
    blocks.insert(0, {**install, "outputs": [], "source": INSTALL.splitlines(keepends=True)})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": blocks, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def page_code(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells that are the page's."""
    return [c for c in document["cells"] if c["cell_type"] == "code" and "install" not in c["metadata"].get("tags", ())]


def outputs(document: dict[str, Any]) -> list[str]:
    """Return the output of each code cell of the page, "" for a cell that prints nothing."""
    code = page_code(document)
    return ["".join(line for item in cell["outputs"] for line in item["text"]) for cell in code]


def page(text: str, printed: list[str]) -> str:
    """Return the page with the printed lines after each block of Python."""
    left = iter(printed)

    def block(match: re.Match[str]) -> str:
        lines = next(left)
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{lines}```\n" if lines else "")

    return _PYTHON.sub(block, text)


def main() -> None:
    """Write both notebooks next to their pages, and the outputs into the pages."""
    for name in PAGES:
        path = ROOT / "docs" / f"{name}.md"
        document = notebook(path.read_text(), ROOT / "docs" / "pictures" / f"{name}.svg")
        path.with_suffix(".ipynb").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        path.write_text(page(path.read_text(), outputs(document)))


if __name__ == "__main__":
    main()
