"""A page of docs/ whose figures come from a record of a run, kept in bench/results/."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record as records
from bench import report
from tests.helpers.places import ROOT

Record = dict[str, Any]


@dataclass(frozen=True)
class GeneratedPage:
    """A page `docs/PAGE.md` with the marks `<!-- NAME:last -->` ... `<!-- /NAME -->`, filled from
    `bench/results/NAME.json`, whose kind is `kind`."""

    page_name: str
    name: str
    kind: str
    source: str  # program that writes such a record, for the error
    table: Callable[[Record], str]  # Markdown
    check: Callable[[Record], None] = lambda record: None  # raises ValueError if the record is unfit for the page

    @property
    def path(self) -> Path:
        return ROOT / "docs" / f"{self.page_name}.md"

    @property
    def results(self) -> Path:
        return ROOT / "bench" / "results" / f"{self.name}.json"

    def read(self, path: Path) -> Record:
        """Return the record of a file. Raise ValueError if it is a different file, or unfit for the page."""
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or record.get("kind") != self.kind:
            raise ValueError(f"{path} must be a record of {self.source}, with the kind {self.kind!r}")
        self.check(record)
        return record

    def fill(self, text: str, record: Record) -> str:
        """Return the page's text with the table of `record` at its mark. Raise ValueError if the mark is missing."""
        if f"<!-- {self.name}:last -->" not in text:
            raise ValueError(f"the page has no place marked `<!-- {self.name}:last -->` ... `<!-- /{self.name} -->`")
        return report.fill(text, {f"{self.name}:last": self.table(record)})

    def main(self) -> int:
        """Copy the file of the command line to the page's record, and write the page."""
        record = self.read(Path(sys.argv[1]) if len(sys.argv) > 1 else self.results)
        records.write(record, self.results)
        self.path.write_text(self.fill(self.path.read_text(), record))
        return 0
