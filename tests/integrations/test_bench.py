"""The benchmark's clients with a small BERT: the plain loop and `fed.run` take the same steps, which a device times."""

import time

import pytest
import torch

from bench.fed.workload import Workload
from tests.helpers.libraries import library, with_torchvision

with_torchvision()
library("transformers")
library("peft")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsam"])
def test_the_plain_loop_takes_the_steps_of_a_run(algorithm: str) -> None:
    """A batch holds all samples of a client, so that no order is drawn."""
    from bench.fed import bert

    load = Workload("bert:120x8", algorithm, clients=3, cohort=3, sizes="unequal")
    start = bert.make_model(load)
    plain, *ours = (bert.train(load, 2, int, option) for option in ("bare", "captured", "sequential", "vmap"))
    for name, p in plain.named_parameters():
        moved = not torch.equal(p, start.get_parameter(name))
        assert moved is p.requires_grad
        for model in ours:
            torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-3, atol=2e-5)
    assert bert.loss_of(load, plain) < bert.loss_of(load, start)


def test_a_device_times_steady_rounds_along_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point of two curves is measured once."""
    from bench.fed import on_gpu

    curves = {"width": [(32, 64, 3), (64, 64, 3)], "clients": [(32, 64, 3)], "texts in a batch": [(32, 16, 3)]}
    monkeypatch.setattr(on_gpu, "CURVES", curves)
    for contender in ("bare loop", "captured loop", "sequential", "vmap"):
        cases = list(on_gpu.measure(on_gpu.transformers("cpu", contender), time.monotonic() + 300))
        rows = {case["title"]: row for case in cases for row in case["rows"]}
        assert len(cases) == 8 and {title.rpartition(" by ")[2] for title in rows} == set(curves)
        assert all(len(row["times"]) == 10 and row["ours"] == ("loop" not in contender) for row in rows.values()), rows
        of_width = next(case["rows"][0] for case in cases if case["rows"][0]["at"] == 32)
        assert of_width["times"] == rows["BERT with LoRA, unequal, by clients"]["times"]
