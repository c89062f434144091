"""A number of local steps in place of epochs, and epochs without their last part of a batch."""

from __future__ import annotations

import pytest
import torch

from fastsam import fed
from tests.helpers import fed_cases as cases
from tests.helpers.fed_input import start
from tests.helpers.fed_runs import digest, run

STEPS = {"local_steps": 7, "local_epochs": 1}


def batches(samples: int, **options: object) -> list[list[int]]:
    """The batches of one client whose samples are numbered, in stored order."""
    seen = []

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(y.long().tolist())
        return output.sum() * 0

    numbered = torch.arange(float(samples))
    run_options = {"shuffle": False, "batch_size": 3, "loss": loss, "executor": "sequential", **options}
    record = start(clients=[(torch.zeros(samples, 6), numbered)], rounds=1, **run_options).history[0]
    return seen[-record["steps"] :]  # behind what tries the loss


@pytest.mark.parametrize(
    ("samples", "options", "wanted"),
    [
        (7, {"local_steps": 5}, [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2], [3, 4, 5]]),
        (7, {"local_steps": 2}, [[0, 1, 2], [3, 4, 5]]),
        (2, {"local_steps": 3}, [[0, 1]] * 3),
        (7, {"drop_last": True, "local_epochs": 2}, [[0, 1, 2], [3, 4, 5]] * 2),
        (6, {"drop_last": True}, [[0, 1, 2], [3, 4, 5]]),
        (2, {"drop_last": True}, [[0, 1]]),
        (7, {"drop_last": True, "local_steps": 3}, [[0, 1, 2], [3, 4, 5], [0, 1, 2]]),
    ],
)
def test_the_batches_of_a_client(samples, options, wanted):
    assert batches(samples, **options) == wanted


def test_as_many_steps_as_the_epochs_have_are_these_epochs():
    """In every client, so the clients are alike."""
    sizes = (7, 8, 8, 6)
    plain = run(cases.ours("fedsam"), "sequential", sizes=sizes, local_epochs=3, batch_size=4)
    steps = run(cases.ours("fedsam"), "sequential", sizes=sizes, local_epochs=1, local_steps=6, batch_size=4)
    assert digest(plain) == digest(steps)


def test_every_client_takes_them():
    result = run(fed.MoFedSAM(), "sequential", **STEPS, participation=1.0)
    assert [record["steps"] for record in result.history] == [7 * 8] * 3
    assert all(0.5 < record["train_loss"] < 2 for record in result.history)  # a mean over the samples of these steps


def test_a_batch_of_one_is_dropped_for_batch_norm():
    norm = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    options = {"batch_size": 4, "buffers": "keep"}
    with pytest.raises(ValueError, match="the last batch of client 0, .* has 1 of its 5 samples, .*use drop_last=True"):
        start(norm, [(x, y)], **options)
    start(norm, [(x, y)], drop_last=True, **options)
    with pytest.raises(ValueError, match="the last batch of client 1, .* has 1 of its 1 samples"):
        start(norm, [(x, y), (x[:1], y[:1])], drop_last=True, **options)
