"""Short tables of the pages: one table for all cases of a part, with one figure per contender and case.

The complete tables, with quartiles and times, are printed by `python -m bench.report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bench.record import Record, Row, has_failed, median
from fastsam.lab.report.finished import spelled
from fastsam.lab.report.table import Table

NONE = "–"
Show = Callable[[Any], str]


def digits(number: int, scale: float = 1.0) -> Show:
    """Return a function that shows a number with `number` digits after the point."""
    return lambda value: f"{scale * value:.{number}f}"


TWO_DIGITS = digits(2)
PEERS = {"fedjax": "FedJAX", "fedlab": "FedLab", "blazefl": "BlazeFL", "flower": "Flower", "jax": "JAX by hand"}


def shown(title: str) -> str:
    """Return a title with algorithms and packages as their authors spell them."""
    name, comma, rest = title.partition(", ")
    return f"{PEERS.get(name, spelled(name))}{comma}{spelled(rest)}"


@dataclass(frozen=True)
class Figure:
    """The figure of a part: its place in a row, its text, and the words above its table."""

    path: str
    words: str
    show: Show = TWO_DIGITS


# The first figure that any row has is shown.
FIGURES: dict[str, tuple[Figure, ...]] = {
    "step": (Figure("eager.to.copied", "Time of the optimizer part of a step; the copied SAM class is 1"),),
    "whole": (Figure("eager.to.copied", "Time of a whole step, both passes included; the copied SAM class is 1"),),
    "steps": (
        Figure("replayed.to.foreach", "Time of a replayed step; foreach with fused SGD is 1"),
        Figure("eager.to.copied", "Time of the optimizer part of a step; the copied SAM class is 1"),
    ),
    "variants": (Figure("eager.to.SAM", "Time of the optimizer part of a step; `SAM` is 1"),),
    "speed-1": (Figure("speed", "Rounds per second on one core; the bare loop is 1"),),
    "speed-2": (Figure("speed", "Rounds per second on two cores; the bare loop on one core is 1"),),
    "bert": (Figure("speed", "Rounds per second of BERT with LoRA on one core; the bare loop is 1"),),
    "overhead": (Figure("round", "Time of a round; FedAvg is 1"),),
    "ranks": (Figure("speed", "Rounds per second; one rank is 1"),),
    "growth": (Figure("speed", "Rounds per second; the first size is 1"),),
    "share": (Figure("own_share", "Part of a round that is neither autograd nor a kernel", "{:.1%}".format),),
    "gpu": (Figure("seconds", "Milliseconds of a round", digits(1, 1e3)),),
}
FURTHER = {
    "variants": Figure("peer.to.ours", "Time of pytorch-optimizer's class of the same name; ours is 1", digits(1)),
}
SIZES = ("unequal clients", "digits, alpha 0.3", "equal clients")  # in titles of races; unequal clients come first
LINES = ("ranks", "growth", "share")  # cases that have different contenders: a line each


def tables(cases: Sequence[Record]) -> Iterator[str]:
    """Yield one table, or some lines, for each part, in the order of `FIGURES`."""
    order = list(FIGURES)
    ordered_cases = sorted(cases, key=lambda case: (order.index(case["part"]), size_place(case["title"])))
    for part, group in groupby(ordered_cases, lambda case: str(case["part"])):
        members = list(group)
        figure = next(
            (one for one in FIGURES[part] if any(median(row, one.path) is not None for row in _rows(members))), None
        )
        if figure is None:
            continue
        if part in LINES:
            yield "\n".join([f"{figure.words}:\n", *(line(case, figure) for case in members)])
        else:
            separate = [case for case in members if _shares_no_row(case, members)] if len(members) > 1 else []
            members = [case for case in members if case not in separate]
            for one in (figure, FURTHER.get(part)):
                if one and any(median(row, one.path) is not None for row in _rows(members)):
                    yield f"{one.words}:\n\n{table(members, one).markdown()}"
            if separate:
                yield "\n".join(line(case, figure) for case in separate)


def size_place(title: str) -> int:
    """Return the place of a race in the order of clients' sizes, or 0 for a different case."""
    return next((place for place, sizes in enumerate(SIZES) if f", {sizes}, " in title), 0)


def _shares_no_row(case: Record, cases: Sequence[Record]) -> bool:
    names = {row["name"] for row in case["rows"]}
    return names.isdisjoint(row["name"] for other_case in cases if other_case is not case for row in other_case["rows"])


def line(case: Record, figure: Figure) -> str:
    """Return a case as an item of a list: its title, then each contender that was measured, with its figure."""
    values = [(shown(row.get("title", row["name"])), _cell(row, figure)) for row in case["rows"]]
    return f"- {shown(case['title'])}: {'; '.join(f'{title} {value}' for title, value in values if value != NONE)}"


def table(cases: Sequence[Record], figure: Figure) -> Table:
    """Return contenders down and cases across; contenders that were not measured in any case are left out."""
    by_name = {row["name"]: row for row in reversed(_rows(cases)) if median(row, figure.path) is not None}
    order = [name for name in dict.fromkeys(row["name"] for row in _rows(cases)) if name in by_name]
    rows = []
    for name in order:
        bold = "**" if by_name[name].get("ours") and any(not row.get("ours") for row in by_name.values()) else ""
        cells = [_cell(next((row for row in case["rows"] if row["name"] == name), {}), figure) for case in cases]
        rows.append([f"{bold}{shown(by_name[name].get('title', name))}{bold}", *cells])
    return Table("", ["", *(shown(case["title"]) for case in cases)], rows)


def _rows(cases: Sequence[Record]) -> list[Row]:
    return [row for case in cases for row in case["rows"]]


def _cell(row: Row, figure: Figure) -> str:
    value = None if has_failed(row) else median(row, figure.path)
    return NONE if value is None else figure.show(value)
