"""The features of FusedSAM that each trainer supports, as a page.

`python -m tests.integrations.report FILE.json` writes docs/compatibility.md from a run of the tests.
"""

import sys
from typing import Any

from tests.helpers.generated_page import GeneratedPage

KIND = "fastsam.compatibility/1"
PACKAGES: dict[
    str, str | None
] = {  # the libraries by the names of their packages; None: written down in the test, for it cannot be installed
    "transformers": "transformers",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "timm": "timm",
    "peft": "peft",
    "TRL": "trl",
    "skorch": "skorch",
    "Flower": "flwr",
    "Opacus": "opacus",
    "pytorch-optimizer": "pytorch-optimizer",
    "torch": "torch",
    "the copied SAM class": None,
    "Composer's `SAM`": None,
}
MEANINGS = ("works", "clear error", "warning")  # nothing may be silently wrong


def check(record: dict[str, Any]) -> None:
    """Raise ValueError for a row whose test did not pass or whose library is not in the list."""
    for row in record["rows"]:
        if row["outcome"] != "passed":
            raise ValueError(f"{row['test']} is {row['outcome']}: a page is made from a run in which every test passed")
        if row["library"] not in PACKAGES or row["result"] not in MEANINGS:
            raise ValueError(
                f"{row['test']} shows {row['library']}: {row['result']}; there are {[*PACKAGES]} and {[*MEANINGS]}"
            )


def table(record: dict[str, Any]) -> str:
    """Return a list per library, with the version that was tried, and the environment."""
    lines = []
    for library, package in PACKAGES.items():
        version = f" {record['versions'][package]}" if package else ""
        lines += [f"**{library}{version}**", ""]
        rows = [row for row in record["rows"] if row["library"] == library]
        lines += [*(f"- {row['feature']}: *{row['result']}*" for row in rows), ""]
    return "\n".join([*lines, f"Made on {record['date']} with torch {record['versions']['torch']}."])


PAGE = GeneratedPage(
    "compatibility", "compatibility", KIND, "`make test-integrations` (written to FASTSAM_COMPATIBILITY)", table, check
)

if __name__ == "__main__":
    sys.exit(PAGE.main())
