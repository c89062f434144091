"""The paper's ordering of methods compared with ours: claims that held, their margins and seeds.

A claim: in a section of a table, by one metric, a method that the paper proposes is ahead of another method. Sizes of
scaled runs cannot be compared with the paper's, the order of methods can.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastsam.lab.plots.curves import deviation
from fastsam.lab.report.finished import spelled
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce.metrics import (
    METRICS,
    failed_seeds,
    failure_text,
    groups_of,
    seeds_of,
    values_by_seed,
)
from fastsam.lab.reproduce.runner import Outcome
from fastsam.lab.reproduce.table import PaperTable, Part, Section

PROPOSED_METHODS = {  # by paper
    "fedsam": ("fedsam", "mofedsam"),
    "fedlesam": ("fedlesam", "fedlesam-s", "fedlesam-d"),
    "fedgmt": ("fedgmt",),
}
Outcomes = Mapping[Part, Outcome]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: the method `winner` has a better number than the method `loser`."""

    section: str
    metric: str
    winner: str  # the better method in the paper
    loser: str  # the method that it is compared with
    columns: int  # number of the section's columns in which the paper has `winner` ahead
    paper_margin: float  # mean margin over these columns in the paper
    measured_margins: tuple[float, ...]  # mean margin over these columns in our runs, one number per seed
    sample: float = 0.0  # margin of one test sample, or 0 for numbers that are not accuracies
    failed_seeds: tuple[int, ...] = ()  # seeds without a run of one of the two methods

    @property
    def is_tie(self) -> bool:
        """Return True if the mean margin over the seeds is one sample or less, in either direction."""
        return bool(self.measured_margins) and abs(float(np.mean(self.measured_margins))) <= self.sample + 1e-9

    @property
    def is_reproduced(self) -> bool:
        """Return True if `winner` is ahead in our runs too, on the mean over the seeds."""
        return bool(self.measured_margins) and not self.is_tie and float(np.mean(self.measured_margins)) > 0


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
    claim_list = []
    for section, metric in itertools.product(table.sections, table.metrics):
        paper_numbers = _paper_numbers(table, section, metric)
        measured_numbers = _measured_numbers(table, section, metric, outcomes)
        for winner, loser in itertools.product(methods, table.algorithms):
            margins: dict[int, float] = {}
            for column in range(len(section.columns)):
                better, worse = (paper_numbers.get((column, name)) for name in (winner, loser))
                if better is not None and worse is not None and better > worse:
                    margins[column] = better - worse
            if margins:
                pairs = [(measured_numbers[c, winner], measured_numbers[c, loser]) for c in margins]
                means, failed = _margins(pairs), _failed_seeds(section, [*margins], (winner, loser), outcomes)
                mean = float(np.mean(list(margins.values())))
                parts = [part for column in margins for part in section.columns[column].parts if part in outcomes]
                samples = min((outcomes[part].samples for part in parts), default=0)
                sample = 100 / samples if samples and METRICS[metric].direction > 0 else 0.0
                claim_list.append(
                    Claim(section.title, metric, winner, loser, len(margins), mean, means, sample, failed)
                )
    return claim_list


def text_tables(table: PaperTable, outcomes: Outcomes) -> list[TextTable]:
    """Return the tables of claims. Claims that did not hold come first.

    The list is empty if the paper prints no numbers or no run was finished.
    """
    all_claims = claims(table, outcomes)
    measured_claims = [claim for claim in all_claims if claim.measured_margins]
    count = len(measured_claims)
    if not count:
        return []
    note = (
        "Margins are in favour of the first method, means over the columns in which the paper has it ahead; ours with "
        "their standard deviation over the seeds."
    )
    if table.scale is not None:
        note += f" Ours are of the scaled run on {table.scale}: only their sign can be compared."
    if missing_count := len(all_claims) - count:
        note += f" {missing_count} claim{'s' * (missing_count > 1)} more: a run failed or a target was not reached."
    kinds: dict[str, list[Claim]] = {"Did not hold": [], "Undecided, by one test sample or less": [], "Held": []}
    for claim in sorted(measured_claims, key=lambda claim: (claim.metric, claim.section, -claim.paper_margin)):
        kinds[[*kinds][1 if claim.is_tie else 2 if claim.is_reproduced else 0]].append(claim)
    head = ["claim", "where", "paper: by", "ours: by", "seeds in favour"]
    return [
        TextTable(f"{verdict}: {len(group)} of {count} claims", head, [_row(claim, table) for claim in group], note)
        for verdict, group in kinds.items()
        if group
    ]


def record(table: PaperTable, outcomes: Outcomes) -> dict[str, Any]:
    """Return the claims for summary.json."""
    return {"claims": [_claim_record(claim) for claim in claims(table, outcomes)]}


def _claim_record(claim: Claim) -> dict[str, Any]:
    """Return a claim with the names of summary.json."""
    return {
        "section": claim.section, "metric": claim.metric, "ahead": claim.winner, "other": claim.loser,
        "columns": claim.columns, "paper": claim.paper_margin, "ours": claim.measured_margins, "sample": claim.sample,
        "failed_seeds": claim.failed_seeds, "held": claim.is_reproduced, "undecided": claim.is_tie,
    }  # fmt: skip


def _paper_numbers(table: PaperTable, section: Section, metric: str) -> dict[tuple[int, str], float]:
    """Return the paper's numbers by column and algorithm, with signs such that larger is better.

    Cells without a number and cells that cannot be trusted are left out.
    """
    kind, numbers = METRICS[metric], {}
    for name, i in itertools.product(section.published, range(len(section.columns))):
        text, doubts = table.published(section, i, name, metric)
        base, _ = table.published(section, i, "fedavg", metric)
        uses_base = kind.shows_multiple or kind.is_multiple
        number = multiple_of(text or "", base or "") if uses_base else number_of(text or "")
        if number is not None and not doubts:
            numbers[i, name] = kind.direction * number
    return numbers


def _measured_numbers(
    table: PaperTable, section: Section, metric: str, outcomes: Outcomes
) -> dict[tuple[int, str], dict[int, float | None]]:
    """Return the number of each finished seed by column and algorithm, with signs such that larger is better.

    If the paper prints multiples of FedAvg's number, ours are multiples of FedAvg's mean.
    """
    kind, numbers_by_cell = METRICS[metric], {}
    for i, column in enumerate(section.columns):
        groups = {name: groups_of(column, name, outcomes) for name in table.algorithms}
        seed_numbers = {name: values_by_seed(kind, group, column.target) for name, group in groups.items()}
        unit = float(kind.direction)
        if kind.shows_multiple or kind.is_multiple:
            base = [v for v in seed_numbers["fedavg"].values() if v is not None]
            is_complete = base and len(base) == len(seed_numbers["fedavg"])
            unit = kind.direction / float(np.mean(base)) if is_complete else math.nan
        for name, values in seed_numbers.items():
            numbers_by_cell[i, name] = {
                seed: None if v is None or math.isnan(unit) else unit * v for seed, v in values.items()
            }
    return numbers_by_cell


Numbers = Mapping[int, float | None]  # by seed


def _margins(columns: Sequence[tuple[Numbers, Numbers]]) -> tuple[float, ...]:
    """Return the mean margin of each seed for which both methods have a number in all columns."""
    means = []
    for seed in columns[0][0]:
        pairs = [(winner.get(seed), loser.get(seed)) for winner, loser in columns]
        margins = [a - b for a, b in pairs if a is not None and b is not None]
        if len(margins) == len(pairs):
            means.append(float(np.mean(margins)))
    return tuple(means)


def _failed_seeds(
    section: Section, columns: Sequence[int], methods: Sequence[str], outcomes: Outcomes
) -> tuple[int, ...]:
    """Return the seeds without a run of one of the methods in one of the columns."""
    failed: set[int] = set()
    for column, name in itertools.product([section.columns[c] for c in columns], methods):
        failed |= {*failed_seeds(groups_of(column, name, outcomes), seeds_of(column, outcomes))}
    return tuple(sorted(failed))


def _row(claim: Claim, table: PaperTable) -> list[str]:
    spread = f" ± {float(deviation(claim.measured_margins)):.3g}" if len(claim.measured_margins) > 1 else ""
    names = f"{spelled(claim.winner)} over {spelled(claim.loser)}"
    metric = f", {METRICS[claim.metric].head}" if len(table.metrics) > 1 else ""
    place = f"{claim.section}{metric}, {claim.columns} column{'s' * (claim.columns > 1)}"
    favour_count = sum(margin > 0 for margin in claim.measured_margins)
    margin = f"{np.mean(claim.measured_margins):.3g}{spread}"
    favour = f"{favour_count} of {len(claim.measured_margins)}"
    failure = failure_text(claim.failed_seeds)
    return [names, place, f"{claim.paper_margin:.3g}", margin, favour + (f" ({failure})" if failure else "")]
