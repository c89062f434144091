"""Clients that come and go, and what each of them counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastsam import fed
from fastsam.fed.clients.sampling import draw_present
from tests.helpers import oracle
from tests.helpers.fed_rundir import records, start
from tests.helpers.fed_runs import same_bits


@pytest.mark.parametrize("sampler", ["bernoulli", "fixed"])
def test_where_all_are_there_nothing_changes(sampler, tmp_path):
    plain = start(tmp_path / "plain", sampler=sampler)
    same = start(tmp_path / "same", sampler=sampler, available=lambda t: range(5))
    assert same_bits(plain.model, same.model) and records(tmp_path / "plain") == records(tmp_path / "same")


@pytest.mark.parametrize(
    "available",
    [
        lambda t: [4, 1, 2],
        lambda t: {1, 2, 4},
        lambda t: torch.tensor([1, 2, 4]),
        lambda t: [False, True, True, False, True],
        lambda t: np.array([0, 1, 1, 0, 1], bool),
    ],
)
def test_only_those_that_are_there_take_part(available, tmp_path):
    asked = start(tmp_path / "a", participation=1.0, available=available)
    named = start(tmp_path / "b", sampler=lambda t, g: [1, 2, 4])
    assert same_bits(asked.model, named.model) and records(tmp_path / "a") == records(tmp_path / "b")


def test_the_share_is_one_of_those_that_are_there():
    cohorts = [draw_present("fixed", 0.5, lambda t: range(t, 10), t, 10, 0) for t in range(9)]
    assert [len(cohort) for cohort in cohorts] == [5, 5, 4, 4, 3, 3, 2, 2, 1]
    assert all(min(cohort) >= t and cohort == sorted({*cohort}) for t, cohort in enumerate(cohorts))
    draws = [draw_present("bernoulli", 0.3, lambda t: range(0, 100, 2), t, 100, 0) for t in range(200)]
    assert all(i % 2 == 0 for cohort in draws for i in cohort)
    assert sum(map(len, draws)) / 200 == pytest.approx(15, abs=1)


def test_a_round_with_nobody_is_skipped_and_says_so(tmp_path):
    class Models(fed.Callback):
        def on_start(self, run):
            self.found = [run.model()]

        def on_round(self, run, record):
            self.found.append(run.model())

    def available(t):
        return [] if t in (0, 2) else [0, 3]

    models = Models()
    options = {"available": available, "algorithm": fed.SCAFFOLD(), "buffers": None}
    result = start(tmp_path / "run", rounds=4, callbacks=[models], **options)
    assert [same_bits(a, b) for a, b in zip(models.found, models.found[1:])] == [True, False, True, False]
    skipped, trained = result.history[2], result.history[1]
    assert [r.get("skipped") for r in result.history] == ["nobody was available", None] * 2
    assert (skipped["clients"], skipped["steps"], skipped["train_loss"]) == (0, 0, None)
    assert skipped["test_loss"] == trained["test_loss"] and {*trained} == {*skipped} - {"skipped"}
    assert result.summary()["rounds"] == 4 and result.summary()["megabytes"] > 0
    # Killed after a skipped round, and resumed.
    start(tmp_path / "again", rounds=3, **options)
    resumed = start(tmp_path / "again", rounds=4, resume=True, **options)
    assert same_bits(resumed.model, result.model) and records(tmp_path / "again") == records(tmp_path / "run")


def test_weights_of_the_clients_own(tmp_path):
    sizes = [len(y) for _, y in oracle.ragged_clients()]
    samples = start(tmp_path / "samples", weighting="samples")
    for i, weighting in enumerate((sizes, np.array(sizes), sizes.__getitem__)):
        assert same_bits(start(tmp_path / f"{i}", weighting=weighting).model, samples.model)
    uniform = start(tmp_path / "uniform")
    assert same_bits(start(tmp_path / "ones", weighting=lambda i: 4).model, uniform.model)
    assert not same_bits(uniform.model, samples.model)
    with pytest.raises(fed.RunDirectoryError, match="another weighting"):
        start(tmp_path / "0", weighting=[*sizes[:-1], 1], resume=True)
