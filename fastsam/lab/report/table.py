"""A table of texts, for pages and terminals."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import fill, wrap
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
    is_folded: bool = False  # a web page shows only the title until a reader opens it
    best_row: int | None = None  # number of the row that a terminal shows in bold
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

    def html(self) -> str:
        """Return the table in HTML."""
        head, *rows = self.lines()
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        return "<table>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"

    def csv(self) -> str:
        """Return the table as comma-separated values."""
        output = io.StringIO()
        csv.writer(output, lineterminator="\n").writerows(self.lines())
        return output.getvalue()

    def tex(self) -> str:
        """Return the table as a `tabular` of LaTeX."""
        head, *rows = (" & ".join(map(_tex, row)) + r" \\" for row in self.lines())
        lines = [rf"\begin{{tabular}}{{{self.sides}}}", r"\hline", head, r"\hline", *rows, r"\hline", r"\end{tabular}"]
        return "\n".join(lines) + "\n"

    @property
    def widths(self) -> list[int]:
        """Return the number of characters of each column."""
        columns = zip(self.head, *self.rows, strict=True)
        return [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]

    @property
    def width(self) -> int:
        """Return the number of characters of a line of `text()`."""
        return sum(self.widths) + 2 * (len(self.head) - 1)

    @property
    def longest_word(self) -> int:
        """Return the number of characters of the longest word in the first column."""
        return max(len(word) for row in (self.head, *self.rows) for word in row[0].split() or [""])

    @property
    def least_width(self) -> int:
        """Return the number of characters of a line of `text()` whose first column is folded between words."""
        return self.width - self.widths[0] + self.longest_word

    def text(self, width: int | None = None) -> str:
        """Return the table with columns of one width. If it is wider than `width`, the first column is folded."""
        return "\n".join(line for _, line in self._numbered_lines(width))

    def _numbered_lines(self, width: int | None) -> list[tuple[int, str]]:
        """Return the lines of `text`, each with the number of its row; the head and the rule below it have -1."""
        cells = [[cell.split("\n") for cell in row] for row in (self.head, *self.rows)]
        widths = self.widths
        if width is not None and self.width > width:
            widths[0] = first = max(widths[0] - self.width + width, self.longest_word)
            for row in cells:
                row[0] = [part for line in row[0] for part in wrap(line, first, break_on_hyphens=False) or [""]]
        lines: list[tuple[int, str]] = []
        for number, row in enumerate(cells):
            for i in range(max(map(len, row))):
                texts = [cell[i] if i < len(cell) else "" for cell in row]
                sides = zip(texts, widths, self.sides, strict=True)
                line = "  ".join(t.ljust(w) if side == "l" else t.rjust(w) for t, w, side in sides).rstrip()
                lines.append((number - 1, line))
            if not number:
                lines.append((-1, "  ".join("─" * w for w in widths)))
        return lines

    def show(self, console: Console) -> None:
        """Print title, table and note on a terminal, with folded heads if the table is too wide for it."""
        heads = [head if "\n" in head or self.width <= console.width else fill(head, 16) for head in self.head]
        title, note = (
            fill(text, console.width, break_on_hyphens=False) if console.is_terminal else text
            for text in (self.title, self.note)
        )
        console.print(f"\n{title}\n", soft_wrap=True)
        for number, line in replace(self, head=heads)._numbered_lines(console.width):
            is_best = number >= 0 and number == self.best_row
            console.print(line, soft_wrap=True, style="bold" if is_best else None)
        console.print(note, soft_wrap=True)

    def lines(self) -> list[Sequence[str]]:
        """Return head and rows, each cell in one line."""
        return [[cell.replace("\n", " ") for cell in row] for row in (self.head, *self.rows)]


def _escape(cell: str) -> str:
    """Return a cell without what Markdown would take for markup of a table or of HTML; code stays as it is."""
    text = cell.replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")


_TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "|": r"\textbar{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "–": "--", "†": r"\dag{}",
    "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "ρ": r"$\rho$", "σ": r"$\sigma$", "δ": r"$\delta$",
    "ε": r"$\varepsilon$", "φ": r"$\varphi$", "α": r"$\alpha$", "β": r"$\beta$", "µ": r"$\mu$",
}  # fmt: skip


def _tex(cell: str) -> str:
    """Return a cell with LaTeX's commands in place of the characters that LaTeX does not print."""
    return re.sub("|".join(map(re.escape, _TEX)), lambda match: _TEX[match[0]], cell)
