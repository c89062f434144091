"""The paper's order of the methods and the measured order: claims, when they hold, and how orders are compared."""

import math
from pathlib import Path

import numpy as np
import pytest

from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.reproduce import numbers as ordering
from fastsam.lab.reproduce.numbers import Outcome
from fastsam.lab.reproduce.table import PaperTable, Part, load


def outcomes_of(table: PaperTable, numbers: dict[str, list[float]], key: str) -> dict[Part, Outcome]:
    """Return outcomes in which every part has these `numbers`, one for each seed."""
    runs = [
        FinishedRun(name, seed, {key: number}, [], Path(), name)
        for name, case in numbers.items()
        for seed, number in enumerate(case)
    ]
    return {part: Outcome(runs, {}, np.zeros((1, 1))) for part in table.parts}


SECONDS = {  # the paper: 20.34, 25.71, 28.73, 29.88, 29.67, 20.99, 25.81, 25.70
    "fedavg": [1.0, 1.0],
    "fedsam": [2.0, 2.0],
    "mofedsam": [2.1, 2.1],
    "fedgamma": [2.3, 2.3],
    "fedsmoo": [2.2, 2.2],
    "fedlesam": [2.4, 2.6],  # ahead of all but FedAvg in the paper, here the last
    "fedlesam-s": [1.2, 2.2],  # worse than FedSAM in the paper
    "fedlesam-d": [1.5, 1.1],
}


def test_claims_are_the_papers_own_methods_ahead_of_others() -> None:
    table = load("fedlesam-table8", "digits")
    claims = {(c.winner, c.loser): c for c in ordering.claims(table, outcomes_of(table, SECONDS, "seconds_per_round"))}
    assert not any(other_name == "fedavg" for _, other_name in claims), "nothing is quicker than FedAvg in the paper"
    assert ("fedlesam-s", "fedsam") not in claims and ("fedlesam-d", "fedsam") in claims
    claim = claims["fedlesam-d", "fedsam"]
    assert claim.paper_margin == pytest.approx((25.71 - 25.70) / 20.34)
    assert claim.measured_margins == pytest.approx((0.5, 0.9)) and claim.verdict == ordering.HELD
    last = claims["fedlesam", "fedgamma"]
    assert last.measured_margins == pytest.approx((-0.1, -0.3)) and last.verdict == ordering.FAILED
    assert claims["fedlesam-s", "mofedsam"].measured_margins == pytest.approx((0.9, -0.1))


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [
        (100 / 360, ordering.TIED), (-100 / 360, ordering.TIED), (0.0, ordering.TIED), (0.3, ordering.HELD),
        (-0.3, ordering.FAILED),
    ],
)  # fmt: skip
def test_a_margin_of_one_sample_is_undecided(margin: float, verdict: str) -> None:
    claim = ordering.Claim("", "accuracy", "fedlesam", "fedsam", 1, 1.0, (margin, margin), 100 / 360)
    assert claim.verdict == verdict


def test_the_size_of_the_test_set_decides_what_a_tie_is() -> None:
    table = load("fedlesam-table2", "digits")
    numbers = {name: [0.8 + (0.0025 if name == "fedlesam" else 0)] for name in table.algorithms}
    outcomes = {
        part: outcome._replace(samples=360) for part, outcome in outcomes_of(table, numbers, "accuracy_final").items()
    }
    claims = [c for c in ordering.claims(table, outcomes) if c.winner == "fedlesam"]
    assert claims and {c.verdict for c in claims} == {ordering.TIED} and len(table.seeds) == 3


def test_what_did_not_hold_is_said_first() -> None:
    table = load("fedlesam-table8", "digits")
    report = ordering.claims_table(ordering.claims(table, outcomes_of(table, SECONDS, "seconds_per_round")))
    assert report.title.endswith(": 6 did not hold, 0 undecided, 8 held, 0 no number")
    assert [row[1] for row in report.rows] == ["did not hold"] * 6 + ["held"] * 8
    rows = {row[0]: row[-2:] for row in report.rows}
    assert rows["FedLESAM over FedGAMMA"] == ["-0.2 ± 0.141", "0 of 2"]
    assert rows["FedLESAM-S over MoFedSAM"][-1] == "1 of 2"


def test_cells_not_to_be_trusted_claim_nothing() -> None:
    table = load("fedsam-table1", "digits")
    outcomes = outcomes_of(table, {name: [0.5] for name in table.algorithms}, "client_accuracy_mean")
    claims = {(c.section, c.metric, c.winner, c.loser) for c in ordering.claims(table, outcomes)}
    assert ("CIFAR-10", "train", "fedsam", "fedavg") in claims and (
        "CIFAR-10", "validation", "fedsam", "fedavg",
    ) not in claims  # fmt: skip


def test_equal_numbers_hold_nothing_and_a_run_without_a_number_has_no_verdict() -> None:
    table = load("fedlesam-table8", "digits")
    same = outcomes_of(table, {name: [1.0] for name in SECONDS}, "seconds_per_round")
    assert {claim.verdict for claim in ordering.claims(table, same)} == {ordering.TIED}
    without_one = outcomes_of(table, {k: v for k, v in SECONDS.items() if k != "fedlesam-d"}, "seconds_per_round")
    claims = ordering.claims(table, without_one)
    missing = [claim for claim in claims if claim.verdict == ordering.MISSING]
    assert len(missing) == 6 and all("fedlesam-d" in (claim.winner, claim.loser) for claim in missing)
    assert ordering.claims_table(claims).rows[-1][-2:] == ["–", "0 of 0"]


def test_margins_are_of_the_same_seed() -> None:
    """Seed 1 of FedLESAM-D failed: seed 2 is compared with seed 2."""
    table = load("fedlesam-table8", "digits")
    numbers = {**{name: [2.0, 9.0, 4.0] for name in SECONDS}, "fedavg": [1.0] * 3, "fedlesam-d": [1.5, 0.0, 3.0]}
    outcomes = {
        part: outcome._replace(runs=[r for r in outcome.runs if (r.algorithm, r.seed) != ("fedlesam-d", 1)])
        for part, outcome in outcomes_of(table, numbers, "seconds_per_round").items()
    }
    claims = {(c.winner, c.loser): c for c in ordering.claims(table, outcomes)}
    claim = claims["fedlesam-d", "fedsam"]
    assert claim.measured_margins == pytest.approx((0.5, 1.0))


def test_figures_have_no_claims() -> None:
    table = load("fedlesam-fig2", "digits")
    assert ordering.claims(table, outcomes_of(table, {}, "")) == []


@pytest.mark.parametrize(
    ("text", "base", "number"),
    [("0.31x", "786 (1x)", 0.31), ("246 (1x)", "246 (1x)", 1), ("253", "246 (1x)", 253 / 246),
        ("0.54", "156 (1x)", 0.54), ("–", "88 (1x)", math.nan), ("0.30x †", "88 (1x)", math.nan),
        ("79.52 ± 0.13", "", 79.52), (">900", "", math.nan), ("77.82 ± 0.19 †", "", math.nan)],
)  # fmt: skip
def test_numbers_as_the_papers_print_them(text: str, base: str, number: float) -> None:
    assert ordering.number_of(text, base) == pytest.approx(number, nan_ok=True)
