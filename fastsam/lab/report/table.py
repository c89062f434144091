"""A table of texts, for pages and terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str  # heading, which is not part of the rendered table
    head: Sequence[str]  # texts above the columns, which may have several lines
    rows: Sequence[Sequence[str]]  # texts of each row, one for each column
    note: str = ""  # explanation of the numbers, which is not part of the rendered table either
    alignment: str = ""  # `l` or `r` per column; by default the first column is on the left and the others on the right

    @property
    def sides(self) -> str:
        """Return `l` or `r` per column."""
        return self.alignment or "l" + "r" * (len(self.head) - 1)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        marks = "|".join("---" if side == "l" else "---:" for side in self.sides)
        lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in map(_escape, row)) for row in self.lines()]
        return "\n".join([lines[0], f"|{marks}|", *lines[1:]])

    @property
    def widths(self) -> list[int]:
        """Return the number of characters of each column."""
        columns = zip(self.head, *self.rows, strict=True)
        return [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]

    @property
    def width(self) -> int:
        """Return the number of characters of a line of `text()`."""
        return sum(self.widths) + 2 * (len(self.head) - 1)

    def text(self, width: int | None = None) -> str:
        """Return the table with columns of one width. If it is wider than `width`, the first column is folded."""
        cells = [[cell.split("\n") for cell in row] for row in (self.head, *self.rows)]
        widths = self.widths
        if width is not None and self.width > width:
            widths[0] = first = max(widths[0] - self.width + width, 8)
            for row in cells:
                row[0] = [line[i : i + first] for line in row[0] for i in range(0, max(len(line), 1), first)]
        lines = []
        for number, row in enumerate(cells):
            for i in range(max(map(len, row))):
                texts = [cell[i] if i < len(cell) else "" for cell in row]
                sides = zip(texts, widths, self.sides, strict=True)
                lines.append("  ".join(t.ljust(w) if side == "l" else t.rjust(w) for t, w, side in sides).rstrip())
            if not number:
                lines.append("  ".join("─" * w for w in widths))
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Print title, table and note on a terminal, with folded heads if the table is too wide for it."""
        heads = [head if "\n" in head or self.width <= console.width else fill(head, 16) for head in self.head]
        parts = ["", self.title, "", replace(self, head=heads).text(console.width), self.note]
        console.print("\n".join(parts), soft_wrap=True)

    def lines(self) -> list[Sequence[str]]:
        """Return head and rows, each cell in one line."""
        return [[cell.replace("\n", " ") for cell in row] for row in (self.head, *self.rows)]


def _escape(cell: str) -> str:
    """Return a cell without what Markdown would take for markup of a table or of HTML; code stays as it is."""
    text = cell.replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")
