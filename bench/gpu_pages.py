"""The pages' figures of a GPU, from the file that `python bench/gpu.py --merge DIR...` writes: `python -m
bench.gpu_pages`.

Between `<!-- gpu:NAME -->` and `<!-- /gpu -->` is what bench/results/gpu.json says under that name, with commit and
device, or "Not measured.". A test holds the pages to it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import family_gpu, kernel_report, ncu, predictions
from bench.fed import report as federated

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "kernels.md")
UNMEASURED = "Not measured."
PREDICTIONS = "predictions"  # is there before anything is measured
_PLACE = re.compile(r"(<!-- gpu:(\S+) -->\n).*?(<!-- /gpu -->)", re.DOTALL)


def _kernels(record: dict[str, Any]) -> str:
    return "\n\n".join(kernel_report.sections(record).values())


TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kernels": _kernels,
    "federated": federated.page,
    "family": family_gpu.page,
    "ncu": ncu.page,
}


def text(name: str, results: Path = RESULTS) -> str:
    """Return the Markdown of one name. Raises KeyError for a name that is not in `TEXTS`."""
    path = results / "gpu.json"
    merged = json.loads(path.read_text()) if path.exists() else {}
    if name == PREDICTIONS:
        return predictions.tables(merged)
    page = TEXTS[name]
    if name in merged:
        return page(merged[name]).strip()
    part = next((part for part in merged.get("parts", ()) if part["name"] == name), None)
    return UNMEASURED if part is None else f"Not measured: {part['reason'] or part['result']}."


def fill(page: str, results: Path = RESULTS) -> str:
    """Return the page with the text in its places replaced."""
    return _PLACE.sub(lambda found: f"{found[1]}{text(found[2], results)}\n{found[3]}", page)


def places(page: str) -> list[str]:
    """The files that it names."""
    return [found[2] for found in _PLACE.finditer(page)]


def main() -> int:
    for path in PAGES:
        path.write_text(fill(path.read_text()))
        print(f"{path.relative_to(ROOT)}: {', '.join(places(path.read_text()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
