"""Which trainer does what with FusedSAM: `python -m tests.integrations.report FILE.json` writes docs/compatibility.md from a run of the tests."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers.places import ROOT

KIND = "fastsam.compatibility/1"
PAGE, RESULTS = ROOT / "docs" / "compatibility.md", ROOT / "bench" / "results" / "compatibility.json"
PACKAGES = {  # the libraries by the names of their packages
    "transformers": "transformers",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "timm": "timm",
    "peft": "peft",
    "Flower": "flwr",
}
MEANINGS = ("works", "clear error", "warning")  # nothing may be silently wrong
_PLACE = re.compile(r"(<!-- compatibility:last -->\n).*?(<!-- /compatibility -->)", re.DOTALL)


def read(path: Path) -> dict[str, Any]:
    """The record of a file. Raises ValueError when it is none, and for a row whose test did not pass or whose library is not in the list."""
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(
            f"{path} is no record of `make test-integrations`, whose kind is {KIND!r}; its tests write one to FASTSAM_COMPATIBILITY"
        )
    for row in record["rows"]:
        if row["outcome"] != "passed":
            raise ValueError(f"{row['test']} is {row['outcome']}: a page is made from a run in which every test passed")
        if row["library"] not in PACKAGES or row["result"] not in MEANINGS:
            raise ValueError(
                f"{row['test']} shows {row['library']}: {row['result']}; there are {[*PACKAGES]} and {[*MEANINGS]}"
            )
    return record


def table(record: dict[str, Any]) -> str:
    """Markdown: a row per feature, the libraries in order, and what it was tried with."""
    lines = ["| library | version | feature | result | test in `tests/integrations/` |", "|---|---|---|---|---|"]
    for library, package in PACKAGES.items():
        version = record["versions"][package]
        for row in (row for row in record["rows"] if row["library"] == library):
            test = row["test"].removeprefix("tests/integrations/")
            lines.append(f"| {library} | {version} | {row['feature']} | {row['result']} | `{test}` |")
    return "\n".join([*lines, f"\nMade on {record['date']} with torch {record['versions']['torch']}."])


def fill(page: str, record: dict[str, Any]) -> str:
    """The page with the rows of `record` in its marked place. Raises ValueError where there is none."""
    if not _PLACE.search(page):
        raise ValueError("the page has no place marked `<!-- compatibility:last -->` ... `<!-- /compatibility -->`")
    return _PLACE.sub(lambda found: f"{found[1]}{table(record)}\n{found[2]}", page)


def main() -> int:
    """Copies the file to where the page's rows are kept, and writes the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    record = read(path)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
