"""What one step on a copy of the model finds before the first round: models, losses, batches and augmentations that
would fail later."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_input import NOTHING, X, Y, start


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:The .grad attribute")
def test_a_model_that_no_gradient_reaches():
    """It would run to the end, and be what it was at the start."""
    with pytest.raises(
        ValueError, match="no trainable parameter of the model gets a gradient .a torch.jit.script model"
    ):
        start(torch.jit.script(oracle.smooth_model(torch.float32)))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off(off):
    with off(), pytest.raises(ValueError, match="gradients are switched off around the call"):
        start()


class Scaled(nn.Module):
    def __init__(self, trained):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=trained)

    def forward(self, scores, y):
        return F.cross_entropy(scores * self.scale, y)


def test_a_loss_with_parameters_of_its_own():
    with pytest.raises(ValueError, match="loss has trainable parameters .scale., which no run trains"):
        start(loss=Scaled(trained=True))
    start(loss=Scaled(trained=False))


def test_a_loss_that_ignores_another_label():
    options = {"loss": nn.CrossEntropyLoss(ignore_index=255), "participation": 1.0}
    ours = start(clients=[(X, torch.where(Y == 1, 255, Y))], **options)
    theirs = start(clients=[(X, torch.where(Y == 1, -100, Y))], participation=1.0)
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="client 1: all labels are 255"):
        start(clients=[(X, Y), (X, NOTHING + 355)], **options)


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_a_batch_of_ignored_labels_is_told_as_such(executor):
    clients = [(X, Y), (X, torch.cat([NOTHING[:3], Y[3:]]))]
    options = {"batch_size": 3, "shuffle": False, "executor": executor}
    result = start(clients=clients, participation=1.0, **options)
    assert result.history[0]["excluded"] == [
        {
            "client": 1,
            "reason": "the loss is not finite (3 of its 6 labels are -100, and a batch of nothing else has no loss)",
        }
    ]
    with pytest.raises(RuntimeError, match="round 1: all 1 .*3 of its 6 labels are -100.* If the run has diverged"):
        start(clients=clients[1:], **options)


def test_few_samples():
    """A client with one sample, or fewer than a batch, trains on what it has: no batch is dropped, none is filled
    up."""
    sizes = [1, 3, 6, 5]
    clients = [(X[:n], Y[:n]) for n in sizes]
    record = start(clients=clients, participation=1.0, batch_size=4, local_epochs=2).history[0]
    assert (record["samples"], record["steps"], record["excluded"]) == (15, 2 * (1 + 1 + 2 + 2), [])


def test_batchnorm_and_a_batch_of_one_sample(tmp_path):
    """The client that would stop the run in some later round is named at its beginning."""
    norm = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    clients = [(X, Y), (X[:5], Y[:5])]
    options = {"buffers": "average", "run_dir": tmp_path / "run", "sampler": lambda t, g: [0]}
    with pytest.raises(ValueError, match="the last batch of client 1, with batch_size=4, has 1 of its 5 samples"):
        start(norm, clients, batch_size=4, **options)
    assert not (tmp_path / "run").exists()
    start(norm, clients, batch_size=6, buffers="keep")
    pool = fed.Centralised_SGD()  # all 11 samples, so the last batch has 3
    start(norm, clients, pool, batch_size=4, participation=1.0, buffers="keep")
