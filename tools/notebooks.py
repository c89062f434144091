"""The tutorials as notebooks, made from their pages: `python tools/notebooks.py` writes them, tests/test_docs_site.py
holds them to the pages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = {
    "docs/tutorial_optimizer.md": "examples/optimizer.ipynb",
    "docs/tutorial_federated.md": "examples/federated.ipynb",
}


def notebook(page: str) -> str:
    """The text of the notebook of a page: a cell for each block of Python, and one for what stands between them."""
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)):
        source = part.strip() if number % 2 else re.sub(r"\]\((\w+\.md)", r"](../docs/\1", part.strip())
        if source:
            cells.append(_cell("code" if number % 2 else "markdown", source, len(cells)))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, source: str, number: int) -> dict[str, Any]:
    made = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def main() -> int:
    for page, path in NOTEBOOKS.items():
        (ROOT / path).write_text(notebook((ROOT / page).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
