"""The paper's ordering of methods compared with ours.

A claim: in a section of a table, by one metric, a method that the paper proposes is ahead of another method. Sizes of
scaled runs cannot be compared with the paper's, the order of methods can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from fastsam.lab.plots.curves import deviation
from fastsam.lab.report.finished import spelled
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce.metrics import METRICS, groups_of, values_by_seed
from fastsam.lab.reproduce.runner import Outcome
from fastsam.lab.reproduce.table import PaperTable, Part, Section

PROPOSED_METHODS = {  # by paper
    "fedsam": ("fedsam", "mofedsam"),
    "fedlesam": ("fedlesam", "fedlesam-s", "fedlesam-d"),
    "fedgmt": ("fedgmt",),
}
FAILED, TIED, HELD = "Did not hold", "Undecided, by one test sample or less", "Held"  # in the order of the report
Outcomes = Mapping[Part, Outcome]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: the method `winner` has a better number than the method `loser`."""

    section: str
    metric: str
    winner: str
    loser: str
    columns: int  # number of the section's columns in which the paper has `winner` ahead
    paper_margin: float  # mean margin over these columns in the paper
    measured_margins: tuple[float, ...]  # mean margin over these columns in our runs, one number per seed
    sample: float = 0.0  # margin of one test sample, or 0 for numbers that are not accuracies

    @property
    def verdict(self) -> str:
        """Return whether `winner` is ahead in our runs too, on the mean over the seeds; "" without runs."""
        if not self.measured_margins:
            return ""
        margin = float(np.mean(self.measured_margins))
        return TIED if abs(margin) <= self.sample + 1e-9 else HELD if margin > 0 else FAILED


def number_of(text: str) -> float | None:
    """Return the number at the start of a published cell, 79.52 for "79.52 ± 0.13"; None for a dash or a bound."""
    match = re.match(r"\d+(?:\.\d+)?", text)
    return None if match is None else float(match[0])


def multiple_of(text: str, base: str) -> float | None:
    """Return a published cell as a multiple of FedAvg's cell `base`, or None for a dash.

    Examples: .31 for "0.31x", 1 for "246 (1x)", 253/246 for "253" if FedAvg's cell is "246 (1x)".
    """
    match, number, base_number = re.search(r"(\d+(?:\.\d+)?)x", text), number_of(text), number_of(base)
    if match is not None or number is None or not base_number:
        return None if match is None else float(match[1])
    return number if number < 10 else number / base_number  # FedLESAM's Table 9 has a multiple without its x


def claims(table: PaperTable, outcomes: Outcomes) -> list[Claim]:
    """Return the claims about the methods that the paper proposes, without cells that cannot be trusted."""
    methods = [name for name in PROPOSED_METHODS[table.name.partition("-")[0]] if name in table.algorithms]
    result = []
    for section, metric in product(table.sections, table.metrics):
        paper, ours = _paper_numbers(table, section, metric), _measured_numbers(table, section, metric, outcomes)
        for winner, loser in product(methods, table.algorithms):
            gaps = {i: paper.get((i, winner), math.nan) - paper.get((i, loser), math.nan)
                    for i in range(len(section.columns))}  # fmt: skip
            columns = [i for i, gap in gaps.items() if gap > 0]
            if not columns:
                continue
            by_seed = [{seed: a - ours[i, loser][seed] for seed, a in ours[i, winner].items() if seed in ours[i, loser]}
                       for i in columns]  # fmt: skip
            seeds = sorted(set.intersection(*map(set, by_seed)))
            margins = tuple(float(np.mean([column[seed] for column in by_seed])) for seed in seeds)
            parts = [part for i in columns for part in section.columns[i].parts if part in outcomes]
            samples = min((outcomes[part].samples for part in parts), default=0)
            sample = 100 / samples if samples and METRICS[metric].direction > 0 else 0.0
            paper_margin = float(np.mean([gaps[i] for i in columns]))
            result.append(Claim(section.title, metric, winner, loser, len(columns), paper_margin, margins, sample))
    return result


def _paper_numbers(table: PaperTable, section: Section, metric: str) -> dict[tuple[int, str], float]:
    """Return the paper's numbers by column and algorithm, with signs such that larger is better.

    Cells without a number and cells that cannot be trusted are left out.
    """
    kind, numbers = METRICS[metric], {}
    for name, i in product(section.published, range(len(section.columns))):
        (text, doubts), (base, _) = (table.published(section, i, n, metric) for n in (name, "fedavg"))
        is_relative = kind.shows_multiple or kind.is_multiple
        number = multiple_of(text or "", base or "") if is_relative else number_of(text or "")
        if number is not None and not doubts:
            numbers[i, name] = kind.direction * number
    return numbers


def _measured_numbers(
    table: PaperTable, section: Section, metric: str, outcomes: Outcomes
) -> dict[tuple[int, str], dict[int, float]]:
    """Return the numbers of the seeds that have one by column and algorithm, with signs such that larger is better.

    If the paper prints multiples of FedAvg's number, ours are multiples of FedAvg's mean.
    """
    kind, result = METRICS[metric], {}
    for i, column in enumerate(section.columns):
        groups = {name: groups_of(column, name, outcomes) for name in table.algorithms}
        values = {name: values_by_seed(kind, group, column.target) for name, group in groups.items()}
        unit = float(kind.direction)
        if kind.shows_multiple or kind.is_multiple:
            base = [math.nan if v is None else v for v in values["fedavg"].values()]
            unit /= float(np.mean(base)) if base else math.nan
        for name, numbers in values.items():
            result[i, name] = {s: unit * v for s, v in numbers.items() if v is not None and not math.isnan(unit)}
    return result


def text_tables(table: PaperTable, outcomes: Outcomes) -> list[TextTable]:
    """Return the tables of claims. Claims that did not hold come first.

    The list is empty if the paper prints no numbers or no run was finished.
    """
    all_claims = sorted(claims(table, outcomes), key=lambda claim: (claim.metric, claim.section, -claim.paper_margin))
    count = sum(bool(claim.verdict) for claim in all_claims)
    note = (
        "Margins are in favour of the first method, means over the columns in which the paper has it ahead; ours with "
        "their standard deviation over the seeds."
    )
    if table.scale is not None:
        note += f" Ours are of the scaled run on {table.scale}: only their sign can be compared."
    if missing := len(all_claims) - count:
        note += f" {missing} claim{'s' * (missing > 1)} more: a run failed or a target was not reached."
    head, tables = ["claim", "where", "paper: by", "ours: by", "seeds in favour"], []
    for verdict in (FAILED, TIED, HELD):
        rows = [_row(claim, table) for claim in all_claims if claim.verdict == verdict]
        tables += [TextTable(f"{verdict}: {len(rows)} of {count} claims", head, rows, note)] if rows else []
    return tables


def _row(claim: Claim, table: PaperTable) -> list[str]:
    margins = claim.measured_margins
    spread = f" ± {float(deviation(margins)):.3g}" if len(margins) > 1 else ""
    metric = f", {METRICS[claim.metric].head}" if len(table.metrics) > 1 else ""
    place = f"{claim.section}{metric}, {claim.columns} column{'s' * (claim.columns > 1)}"
    favour = f"{sum(margin > 0 for margin in margins)} of {len(margins)}"
    names = f"{spelled(claim.winner)} over {spelled(claim.loser)}"
    return [names, place, f"{claim.paper_margin:.3g}", f"{np.mean(margins):.3g}{spread}", favour]
