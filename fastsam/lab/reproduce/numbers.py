"""The numbers of a table, computed from our runs: its cells, and the paper's order of methods next to ours.

A claim: in a section of a table, by one metric, a method that the paper proposes is ahead of another method. Sizes of
scaled runs cannot be compared with the paper's, the order of methods can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from fastsam.fed.algorithms import registry
from fastsam.fed.rundir.result import to_target
from fastsam.lab.plots.curves import deviation
from fastsam.lab.report.finished import FinishedRun, flat, spelled
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce.table import DOUBT, Column, PaperTable, Part, Section

DASH = "–"
FAILED, TIED, HELD, MISSING = VERDICTS = ("did not hold", "undecided", "held", "no number")  # in the report's order
NOTE = (
    "Margins are in favour of the first method, means over the columns in which the paper has it ahead. In a scaled "
    "run only the sign counts. Undecided: by one test sample or less. No number: a run failed or missed its target."
)


class Outcome(NamedTuple):
    """The finished runs of a part, and facts of its data."""

    runs: Sequence[FinishedRun]
    failures: Mapping[str, str]  # reason of each failed run, by the run's name
    counts: np.ndarray  # numbers of samples, `[clients, classes]`
    samples: int = 0  # number of test samples, 0 if unknown


Outcomes = Mapping[Part, Outcome]


class Metric(NamedTuple):
    """A kind of cell. Accuracies show the standard deviation over the seeds."""

    head: str  # text in the head of a column
    key: str  # name of the number in a run's summary
    form: str  # format of the number
    unit: int = 1  # factor of the number
    is_relative: bool = False  # show the multiple of FedAvg's number after the number, as in "1.26x"
    uses_target: bool = False  # the number counts until the column's target was reached
    direction: int = -1  # 1 if a larger number is better, -1 if a smaller number is better

    def number(self, run: FinishedRun, target: float | None) -> float | None:
        """Return the number of a run, or None if the run has none. `target` is the accuracy in 0..1 of the column."""
        if self.key == "stored_vectors":  # that a client receives or keeps between rounds
            algorithm = registry[run.algorithm](**run.summary["hyperparameters"])
            kept: float = run.summary["client_vectors"]
            return algorithm.download_vectors + kept
        number = to_target(run.history, target)[self.key] if self.uses_target else flat(run).get(self.key)
        return None if number is None else self.unit * number


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("test accuracy (%)", "accuracy_final", ".2f", 100, direction=1),
    "train": Metric("train", "train_set_accuracy", ".2f", 100, direction=1),
    "validation": Metric("validation", "client_accuracy_mean", ".2f", 100, direction=1),
    "rounds": Metric("rounds", "rounds_to_target", ".0f", uses_target=True),
    "relative_rounds": Metric("rounds", "rounds_to_target", ".1f", is_relative=True, uses_target=True),
    "relative_traffic": Metric("traffic", "megabytes_to_target", ".2f", is_relative=True, uses_target=True),
    "relative_compute": Metric("computing time", "seconds_to_target", ".2f", is_relative=True, uses_target=True),
    "memory": Metric("stored memory", "stored_vectors", ".3g", is_relative=True),
    "traffic": Metric("traffic", "megabytes", ".2f", is_relative=True),
    "backprops": Metric("back-propagations", "backprops", ".0f", is_relative=True),
    "seconds": Metric("seconds per round", "seconds_per_round", ".4f", is_relative=True),
}


def values_by_seed(metric: str, column: Column, algorithm: str, outcomes: Outcomes) -> dict[int, float]:
    """Return an algorithm's number of each seed that has one in every part of the column: the mean over the parts."""
    groups = [[run for run in outcomes[part].runs if run.algorithm == algorithm] for part in column.parts]
    parts = [{run.seed: METRICS[metric].number(run, column.target) for run in group} for group in groups]
    rows = {seed: [part.get(seed) for part in parts] for seed in sorted(parts[0])}
    return {s: float(np.mean([v for v in row if v is not None])) for s, row in rows.items() if None not in row}


def cell(metric: str, column: Column, algorithm: str, outcomes: Outcomes, seeds: int) -> tuple[float | None, str]:
    """Return the number and the text of a cell: the mean over the seeds that have a number, or None and a dash.

    If the cell is of fewer than the requested number of `seeds`, the text says of how many. A multiple, and the number
    before it, are of the seeds that FedAvg has too.
    """
    kind, values = METRICS[metric], values_by_seed(metric, column, algorithm, outcomes)
    base = values_by_seed(metric, column, "fedavg", outcomes) if kind.is_relative else {}
    pairs = [(value, base[seed]) for seed, value in values.items() if seed in base]
    numbers = [value for value, _ in pairs] or list(values.values())
    if not numbers:
        return None, DASH
    mean, extra = float(np.mean(numbers)), ""
    if pairs:
        extra = f" ({np.divide(*np.mean(pairs, axis=0)):.3g}x)"
    elif len(numbers) > 1 and kind.direction > 0:
        extra = f" ± {float(deviation(numbers)):{kind.form}}"
    return mean, f"{mean:{kind.form}}{extra}" + (f" ({len(numbers)} of {seeds} seeds)" if len(numbers) < seeds else "")


class Claim(NamedTuple):
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
        """Return whether `winner` is ahead in our runs too, on the mean over the seeds."""
        margin = float(np.mean(self.measured_margins)) if self.measured_margins else math.nan
        is_tied = abs(margin) <= self.sample + 1e-9
        return MISSING if math.isnan(margin) else TIED if is_tied else HELD if margin > 0 else FAILED


def number_of(text: str, base: str = "") -> float:
    """Return the number of a published cell, NaN for a dash, a bound or a cell in doubt.

    Examples: 79.52 for "79.52 ± 0.13". If FedAvg's cell `base` is given, the multiple of it: 0.31 for "0.31x", 1 for
    "246 (1x)", 253/246 for "253" if FedAvg's cell is "246 (1x)".
    """
    number, multiple = re.match(r"\d+(?:\.\d+)?", text), re.search(r"(\d+(?:\.\d+)?)x", text)
    if number is None or DOUBT in text:
        return math.nan
    if base and multiple:
        return float(multiple[1])
    # FedLESAM's Table 9 has a multiple without its x.
    return float(number[0]) / (number_of(base) if base and float(number[0]) >= 10 else 1)


def claims(table: PaperTable, outcomes: Outcomes) -> list[Claim]:
    """Return the claims about the methods that the paper proposes: they have the paper's name in their names."""
    methods = [name for name in table.algorithms if table.name.partition("-")[0] in name]
    result = []
    for section, metric in product(table.sections, table.metrics):
        numbers = {(i, n): _numbers(table, section, metric, i, n, outcomes)
                   for i, n in product(range(len(section.columns)), table.algorithms)}  # fmt: skip
        for winner, loser in product(methods, table.algorithms):
            pairs = [(column, *numbers[i, winner], *numbers[i, loser]) for i, column in enumerate(section.columns)]
            pairs = [pair for pair in pairs if pair[1] > pair[3]]  # columns in which the paper has `winner` ahead
            if not pairs:
                continue
            seeds = sorted(set.intersection(*(a.keys() & b.keys() for _, _, a, _, b in pairs)))
            margins = tuple(float(np.mean([a[seed] - b[seed] for _, _, a, _, b in pairs])) for seed in seeds)
            samples = min(outcomes[part].samples for column, *_ in pairs for part in column.parts)
            sample = 100 / samples if samples and METRICS[metric].direction > 0 else 0.0
            paper_margin = float(np.mean([ahead - behind for _, ahead, _, behind, _ in pairs]))
            result.append(Claim(section.title, metric, winner, loser, len(pairs), paper_margin, margins, sample))
    return sorted(result, key=lambda claim: (VERDICTS.index(claim.verdict), claim.metric, claim.section))


def _numbers(
    table: PaperTable, section: Section, metric: str, column: int, algorithm: str, outcomes: Outcomes
) -> tuple[float, dict[int, float]]:
    """Return the paper's number and our number of each seed, with signs such that larger is better.

    If the paper prints multiples of FedAvg's number, ours are multiples of FedAvg's mean.
    """
    kind = METRICS[metric]
    texts = [table.published(section, column, name, metric) for name in (algorithm, "fedavg")]
    ours, base = (values_by_seed(metric, section.columns[column], name, outcomes) for name in (algorithm, "fedavg"))
    if not kind.is_relative:
        return kind.direction * number_of(texts[0]), {seed: kind.direction * value for seed, value in ours.items()}
    mean = np.mean(list(base.values())) if base else math.nan
    return kind.direction * number_of(*texts), {s: kind.direction * float(v / mean) for s, v in ours.items() if base}


def claims_table(found: list[Claim]) -> TextTable:
    """Return the table of claims. Claims that did not hold come first."""
    counts = ", ".join(f"{sum(claim.verdict == verdict for claim in found)} {verdict}" for verdict in VERDICTS)
    rows = []
    for claim in found:
        margins, place = claim.measured_margins, f"{claim.section}, {METRICS[claim.metric].head}, {claim.columns}"
        spread = f" ± {float(deviation(margins)):.3g}" if len(margins) > 1 else ""
        ours = f"{np.mean(margins):.3g}{spread}" if margins else DASH
        favour = f"{sum(margin > 0 for margin in margins)} of {len(margins)}"
        names = f"{spelled(claim.winner)} over {spelled(claim.loser)}"
        rows.append([names, claim.verdict, place, f"{claim.paper_margin:.3g}", ours, favour])
    head = ["claim", "verdict", "where, by, columns", "paper: by", "ours: by", "seeds in favour"]
    return TextTable(f"The paper's order next to ours: {counts}", head, rows, NOTE)
