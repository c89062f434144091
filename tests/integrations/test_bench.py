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
    plain, *ours = (bert.train(load, 2, int, option) for option in ("bare", "sequential", "vmap"))
    for name, p in plain.named_parameters():
        moved = not torch.equal(p, start.get_parameter(name))
        assert moved is p.requires_grad
        for model in ours:
            torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-3, atol=2e-5)
    assert bert.loss_of(load, plain) < bert.loss_of(load, start)


def test_a_device_times_steady_rounds_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.fed import on_gpu

    monkeypatch.setattr(on_gpu, "TEXTS", "bert:64x8")
    for contender in ("bare loop", "sequential", "vmap"):
        (case,) = on_gpu.measure(on_gpu.jobs("cpu")[f"transformers {contender}"](), time.monotonic() + 120)
        (row,) = case["rows"]
        assert (row["executor"], row["ours"], len(row["times"])) == (contender, contender != "bare loop", 10), row
