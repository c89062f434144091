"""The paper's ordering of methods compared with ours: claims that held, their margins and seeds, and rank correlations.

A claim: in a section of a table, by one metric, a method that the paper proposes is ahead of another method. Sizes of
scaled runs cannot be compared with the paper's, the order of methods can.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fastsam.fed.algorithms import registry
from fastsam.lab.plots.curves import deviation
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce.metrics import METRICS, groups_of, value
from fastsam.lab.reproduce.runner import Outcome
from fastsam.lab.reproduce.table import Part, Section, Table

OWN = {
    "fedsam": ("fedsam", "mofedsam"),
    "fedlesam": ("fedlesam", "fedlesam-s", "fedlesam-d"),
    "fedgmt": ("fedgmt",),
}  # by paper
Outcomes = Mapping[Part, Outcome]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: `ahead` is ahead of `other`."""

    section: str
    metric: str
    ahead: str  # the better method
    other: str  # the method that it is compared with
    columns: int  # number of the section's columns in which the paper has `ahead` ahead
    paper: float  # mean margin over these columns in the paper
    ours: tuple[float, ...]  # mean margin over these columns in our runs, one number per seed
    sample: float = 0.0  # margin of one test sample, or 0 for numbers that are not accuracies

    @property
    def undecided(self) -> bool:
        """Return True if the mean margin over the seeds is one sample or less, in either direction."""
        return bool(self.ours) and abs(float(np.mean(self.ours))) <= self.sample + 1e-9

    @property
    def held(self) -> bool:
        """Return True if `ahead` is ahead in our runs too, on the mean over the seeds."""
        return bool(self.ours) and not self.undecided and float(np.mean(self.ours)) > 0


def number_of(text: str) -> float | None:
    """Return the number at the start of a published cell, 79.52 for "79.52 ± 0.13"; None for a dash or a bound."""
    found = re.match(r"\d+(?:\.\d+)?", text)
    return None if found is None else float(found[0])


def multiple_of(text: str, base: str) -> float | None:
    """Return a published cell as a multiple of FedAvg's cell `base`, or None for a dash.

    Examples: .31 for "0.31x", 1 for "246 (1x)", 253/246 for "253" if FedAvg's cell is "246 (1x)".
    """
    found, number, whole = re.search(r"(\d+(?:\.\d+)?)x", text), number_of(text), number_of(base)
    if found is not None or number is None or not whole:
        return None if found is None else float(found[1])
    return number if number < 10 else number / whole  # FedLESAM's Table 9 has a multiple without its x


def claims(table: Table, outcomes: Outcomes) -> list[Claim]:
    """Return the claims about the methods that the paper proposes, without cells that cannot be trusted."""
    own = [name for name in OWN[table.name.partition("-")[0]] if name in table.algorithms]
    found = []
    for section, metric in itertools.product(table.sections, table.metrics):
        paper, ours = _paper(table, section, metric), _ours(table, section, metric, outcomes)
        for ahead, other in itertools.product(own, table.algorithms):
            margins = {c: paper[c, ahead] - paper[c, other] for c in _columns(section, paper, ahead, other)}
            margins = {column: margin for column, margin in margins.items() if margin > 0}
            if margins:
                seeds = zip(*(_margins(ours[c, ahead], ours[c, other]) for c in margins), strict=False)
                means = tuple(float(np.mean(each)) for each in seeds if None not in each)
                mean = float(np.mean(list(margins.values())))
                parts = [part for column in margins for part in section.columns[column].parts if part in outcomes]
                samples = min((outcomes[part].samples for part in parts), default=0)
                sample = 100 / samples if samples and METRICS[metric].better > 0 else 0.0
                found.append(Claim(section.title, metric, ahead, other, len(margins), mean, means, sample))
    return found


def rank_correlations(table: Table, outcomes: Outcomes) -> dict[tuple[str, str], float]:
    """Return Kendall's tau-b of the paper's and our order of all methods, by section and metric: the mean over the
    columns.

    Sections without any tau are left out.
    """
    found = {}
    for section, metric in itertools.product(table.sections, table.metrics):
        paper, ours = _paper(table, section, metric), _ours(table, section, metric, outcomes)
        taus = []
        for column in range(len(section.columns)):
            both = [
                (paper[column, name], float(np.mean(known)))
                for name in table.algorithms
                if (column, name) in paper and (known := _complete(ours[column, name]))
            ]
            taus.append(kendall(*zip(*both, strict=True)) if len(both) > 1 else math.nan)
        if not all(map(math.isnan, taus)):
            found[section.title, metric] = float(np.nanmean(taus))
    return found


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-b of two orders: 1 for the same order, -1 for the reverse.

    Pairs that are equal in one of the orders do not count. It is NaN if all pairs are equal in one of them.
    """
    signs = [
        (np.sign(a - b), np.sign(c - d)) for (a, c), (b, d) in itertools.combinations(zip(one, other, strict=True), 2)
    ]
    different = [sum(1 for pair in signs if pair[i]) for i in (0, 1)]
    return float(sum(a * b for a, b in signs) / math.sqrt(math.prod(different))) if all(different) else math.nan


def text_tables(table: Table, outcomes: Outcomes) -> list[TextTable]:
    """Return the tables of claims, first the claims that did not hold, and the table of ranks.

    The list is empty if the paper prints no numbers or no run was finished.
    """
    found = claims(table, outcomes)
    every = [claim for claim in found if claim.ours]
    if not every:
        return []
    scaled = (
        "" if table.scale is None else f" Ours are of the scaled run on {table.scale}: only their sign can be compared."
    )
    note = (
        "Margins are in favour of the first method, means over the columns in which the paper has it ahead; ours with "
        "their standard "
        f"deviation over the seeds.{scaled}"
    )
    if unknown := len(found) - len(every):
        note += f" {unknown} claim{'s' * (unknown > 1)} more: a run failed or a target was not reached."
    undecided, held = [c for c in every if c.undecided], [c for c in every if c.held]
    failed = [c for c in every if not c.held and not c.undecided]
    head = ["claim", "where", "paper: by", "ours: by", "seeds in favour"]
    tables = [
        TextTable(
            f"{what}: {len(some)} of {len(every)} claims", head, [_row(claim, table) for claim in _by_size(some)], note
        )
        for what, some in (
            ("Did not hold", failed),
            ("Undecided, by one test sample or less", undecided),
            ("Held", held),
        )
        if some
    ]
    taus = rank_correlations(table, outcomes)
    rows = [[f"{section}{_about(table, metric)}", f"{tau:.2f}"] for (section, metric), tau in taus.items()]
    about = (
        "Kendall's tau of the order of all methods, the mean over the columns: 1 for the paper's order, 0 for none, -1 "
        "for its reverse."
    )
    return [*tables, *([TextTable("Rank correlation with the paper", ["where", "tau"], rows, about)] if rows else [])]


def record(table: Table, outcomes: Outcomes) -> dict[str, Any]:
    """Return claims and rank correlations for summary.json."""
    taus = [
        {"section": section, "metric": metric, "tau": tau}
        for (section, metric), tau in rank_correlations(table, outcomes).items()
    ]
    return {
        "claims": [{**asdict(c), "held": c.held, "undecided": c.undecided} for c in claims(table, outcomes)],
        "rank_correlations": taus,
    }


def _paper(table: Table, section: Section, metric: str) -> dict[tuple[int, str], float]:
    """Return the paper's numbers by column and algorithm, with signs such that larger is better.

    Cells without a number and cells that cannot be trusted are left out.
    """
    j, kind, found = table.metrics.index(metric), METRICS[metric], {}
    for name, cells in section.published.items():
        for i, column in enumerate(section.columns):
            at = i * len(table.metrics) + j
            compared = kind.relative or kind.ratio
            number = multiple_of(cells[at], section.published["fedavg"][at]) if compared else number_of(cells[at])
            doubted = any(entry.covers(section.title, column.name, name, metric) for entry in table.distrust)
            if number is not None and not doubted:
                found[i, name] = kind.better * number
    return found


def _ours(table: Table, section: Section, metric: str, outcomes: Outcomes) -> dict[tuple[int, str], list[float | None]]:
    """Return the number of each seed by column and algorithm, with signs such that larger is better.

    If the paper prints multiples of FedAvg's number, ours are multiples of FedAvg's mean.
    """
    kind, found = METRICS[metric], {}
    for i, column in enumerate(section.columns):
        numbers = {name: value(kind, groups_of(column, name, outcomes), column.target) for name in table.algorithms}
        unit = float(kind.better)
        if kind.relative or kind.ratio:
            base = _complete(numbers["fedavg"])
            unit = kind.better / float(np.mean(base)) if base else math.nan
        for name, values in numbers.items():
            found[i, name] = [None if v is None or math.isnan(unit) else unit * v for v in values]
    return found


def _complete(values: Sequence[float | None]) -> list[float]:
    """Return the values, or an empty list if one is missing."""
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) else []


def _columns(section: Section, paper: Mapping[tuple[int, str], float], *names: str) -> Iterator[int]:
    return (i for i in range(len(section.columns)) if all((i, name) in paper for name in names))


def _margins(ahead: Sequence[float | None], other: Sequence[float | None]) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(ahead, other, strict=False)]


def _by_size(some: Sequence[Claim]) -> list[Claim]:
    return sorted(some, key=lambda claim: (claim.metric, claim.section, -claim.paper))


def _row(claim: Claim, table: Table) -> list[str]:
    spread = f" ± {float(deviation(claim.ours)):.3g}" if len(claim.ours) > 1 else ""
    names = " over ".join(registry[name].__name__.replace("_", "-") for name in (claim.ahead, claim.other))
    where = f"{claim.section}{_about(table, claim.metric)}, {claim.columns} column{'s' * (claim.columns > 1)}"
    won = sum(margin > 0 for margin in claim.ours)
    return [names, where, f"{claim.paper:.3g}", f"{np.mean(claim.ours):.3g}{spread}", f"{won} of {len(claim.ours)}"]


def _about(table: Table, metric: str) -> str:
    return f", {METRICS[metric].head}" if len(table.metrics) > 1 else ""
