"""What the pages say of a GPU, from the files that `make gpu` writes: `python -m bench.gpu_pages`, after they were
copied to bench/results/.

Between `<!-- gpu:FILE -->` and `<!-- /gpu -->` stands what that file says, with commit and device; "Not measured."
until there is one. A test holds the pages to it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import kernel_report, predictions
from bench.fed import report as federated
from bench.variants import report as variants

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "kernels.md")
UNMEASURED = "Not measured."
PREDICTIONS = "predictions"  # beside what was measured of them: there before any file is
_PLACE = re.compile(r"(<!-- gpu:(\S+) -->\n).*?(<!-- /gpu -->)", re.DOTALL)


def _kernels(record: dict[str, Any]) -> str:
    return "\n\n".join(kernel_report.sections(record).values())


def _variants(record: dict[str, Any]) -> str:
    e = record["environment"]
    gpu = ", ".join(e["machine"].get("gpus", [])[:1])
    made = f"Made by `{e['command']}` on {e['date'][:10]}, commit `{e['commit'][:12]}`; {gpu}."
    return f"{variants.table(record)}\n\n{made}"


TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kernels-cuda.json": _kernels,
    "federated-cuda.json": federated.page,
    variants.FILE: _variants,
}


def text(name: str, results: Path = RESULTS) -> str:
    """What a file says, or the predictions. Raises KeyError for a name that is none of `TEXTS`."""
    if name == PREDICTIONS:
        return predictions.tables(results)
    say, path = TEXTS[name], results / name
    return say(json.loads(path.read_text())).strip() if path.exists() else UNMEASURED


def fill(page: str, results: Path = RESULTS) -> str:
    """The page with what stands in its places replaced."""
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
