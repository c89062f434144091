"""The parts of all tables, and the records that they are made from. Standard library only, because `bench/gpu.py` runs
where an environment may be broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

STEP, KERNELS, FAMILY, FEDERATED, ACCURACY, NCU, GPU = (
    f"fastsam.bench.{name}/1" for name in ("step", "kernels", "family", "federated", "accuracy", "ncu", "gpu")
)
Record = Mapping[str, Any]
Row = Mapping[str, Any]
Cell = Callable[[Any], str]


# --- records ---


def file_name(record: Record) -> str:
    """Return the name that a results file has in a folder of results."""
    name = record["kind"].removeprefix("fastsam.bench.").removesuffix("/1")
    device = record.get("device", "cpu")
    return f"{name}-{device}.json" if name == "kernels" or device == "cuda" else f"{name}.json"


def rows_of(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the rows of all results."""
    for result in (*record.get("steps", ()), *record.get("ops", ()), *record.get("results", ())):
        yield from result[next(key for key in ("rows", "contenders", "variants") if key in result)]


def reasons(record: Record) -> list[str]:
    """Return why rows were not measured, a line each."""
    found = (f"Not measured: {row['title']}: {row['reason']}." for row in rows_of(record) if "reason" in row)
    return list(dict.fromkeys(found))


# --- cells and tables ---


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], aligned: str = "") -> str:
    """Return Markdown. aligned: `l` or `r` per column; by default only the first column is on the left."""
    marks = ["---" if side == "l" else "---:" for side in aligned or "l" + "r" * (len(heads) - 1)]
    lines = ["|" + "|".join(f" {cell} " if cell != "" else " " for cell in row) + "|" for row in (heads, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(marks)}|", *lines[1:]])


def padded(markdown: str) -> str:
    """Return a table of Markdown with columns of one width, for a terminal."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    marks = rows.pop(1)
    just = [str.rjust if mark.endswith(":") else str.ljust for mark in marks]
    return "\n".join("  ".join(j(c, w) for j, c, w in zip(just, row, widths, strict=True)).rstrip() for row in rows)


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def median(*keys: str) -> Callable[[Row], Any]:
    """Return a function for the median of a summary deep in a row, or a plain number; None if it is missing."""

    def get(row: Row) -> Any:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value["median"] if isinstance(value, Mapping) else value

    return get


def matrix(titles: Sequence[str], results: Sequence[Sequence[Row]], cell: Cell, bold: bool = False) -> str:
    """Return a table with names down and results across. A name without a cell in any result is left out.

    cell: text of a row, empty if it has no figure; then its gate is shown, or a dash.
    """
    rows = []
    for name, title in {row["name"]: row["title"] for result in results for row in result}.items():
        found = [next((row for row in result if row["name"] == name), None) for result in results]
        texts = [cell(row) if row else "" for row in found]
        if any(texts):
            state = lambda row: row["gate"] if row and row["gate"] == "red" else "-"  # noqa: E731
            texts = [title, *(text or state(row) for text, row in zip(texts, found, strict=True))]
            ours = bold and any(row and row["ours"] for row in found)
            rows.append([f"**{text}**" if ours else text for text in texts])
    return table(["", *titles], rows) if rows else ""


def commit(e: Record) -> str:
    """Return twelve digits of a record's commit, with "+changes" if the sources differed from it."""
    return e["commit"][:12] + ("+changes" if e["commit"].endswith("+changes") else "")


def made_by(e: Record) -> str:
    """Return how and when a record was made."""
    return f"Made by `{e['command']}` on {e['date'][:10]}, commit `{commit(e)}`"


def on_device(e: Record) -> str:
    """Return the line below a table of a GPU."""
    return f"{made_by(e)}; {', '.join(e['machine'].get('gpus', [])[:1]) or e['machine']['cpu']}."


def threads_of(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def best(row: Row) -> Any:
    """Return the figures to show of an op: the replayed ones, else the eager ones, else None."""
    return row.get("replayed") or row.get("eager")


def failed(problem: str) -> str:
    """Return a problem as the cell of a table."""
    return "failed: " + " ".join(problem.replace("|", "/").split())[:80]


def quartiles(summary: Row | None, digits: int = 2) -> list[str]:
    """Return the cells of a median and of its quartiles."""
    if not summary:
        return ["–", "–"]
    return [f"{summary['median']:.{digits}f}", f"{summary['q1']:.{digits}f}–{summary['q3']:.{digits}f}"]
