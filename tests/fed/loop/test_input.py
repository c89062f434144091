"""Bad input: each a clear error before the first round, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_input import X, Y, start


def test_what_is_accepted():
    """Arrays, lists, read-only arrays, other integer types, float64 inputs for a float32 model, and an ignored
    label."""
    x, y = X.double().numpy(), Y.numpy()
    unwritable = x.copy()
    unwritable.flags.writeable = False
    clients = [
        (x, y),
        [unwritable, y.astype(np.uint8)],
        (X.tolist(), Y.tolist()),
        (X[::2], Y[::2].int()),
        (X, torch.tensor([0, 1, -100, 0, 1, 2])),
    ]
    result = start(clients=clients, participation=1.0)
    assert result.history[0]["clients"] == 5 and next(result.model.parameters()).dtype == torch.float32
    with pytest.raises(ValueError, match="client 0: labels"):
        start(clients=[(X, Y + 1)], loss=nn.CrossEntropyLoss())


class Explodes(nn.Module):
    """Infinite where the first feature is large: the inputs are fine, what becomes of them is not."""

    def __init__(self):
        super().__init__()
        self.inner = oracle.smooth_model(torch.float32)

    def forward(self, x):
        return self.inner(x) * torch.where(x[:, :1] > 50, torch.inf, 1.0)


@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.FedSAM(), fed.MoFedSAM(), fed.SCAFFOLD()], ids=repr)
def test_a_bad_client_does_not_poison_the_round(algorithm, caplog):
    """It is left out and named; the others count as if it had not been sampled."""
    clients = oracle.ragged_clients(torch.float32)
    bad = [(x + 100, y) if i in (1, 3) else (x, y) for i, (x, y) in enumerate(clients)]
    options = {"rounds": 2, "weighting": "samples", "lr": 0.2}
    result = start(Explodes(), bad, algorithm, sampler=lambda t, g: range(5), **options)
    without = start(Explodes(), bad, algorithm, sampler=lambda t, g: [0, 2, 4], **options)
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), without.model.parameters()))
    assert [e["client"] for e in result.history[0]["excluded"]] == [1, 3] and result.summary()["excluded"] == 4
    assert "loss is not finite" in result.history[0]["excluded"][0]["reason"]
    assert result.history[1]["train_loss"] == without.history[1]["train_loss"]
    assert result.history[0]["clients"] == 5 and without.history[0]["excluded"] == []
    assert "round 1: client 3 is excluded" in caplog.text


def test_a_displacement_that_overflows_is_excluded_too():
    """Its loss is finite in every step; what it would send is not."""
    clients = [(X, Y), (X * 1e30, Y)]
    result = start(nn.Linear(6, 3), clients, participation=1.0, lr=1e10, loss=lambda out, y: out.mean())
    assert result.history[0]["excluded"][0]["client"] == 1
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


def test_a_round_without_any_good_client_ends_the_run(tmp_path):
    bad = [(X + 100, Y), (X + 100, Y)]
    with pytest.raises(
        RuntimeError, match="round 2: all 2 active clients were excluded .client 1: the loss is not finite.*smaller lr"
    ):
        start(Explodes(), [(X, Y), *bad], sampler=lambda t, g: [[0], [1, 2]][t], rounds=3, run_dir=tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_dir": 5}, "run_dir must be a path, got 5"),
        ({"resume": True}, "resume=True continues what is in run_dir; name the directory"),
        ({"resume": "yes", "run_dir": "new"}, "resume must be one of True, False, got 'yes'"),
        ({"progress": 5}, "progress must be a function of a round's record, True or False .*, got 5"),
        (
            {"loss": "mse_los"},
            r"loss must be the name .* or a function loss\(model\(x\), y\) .*got 'mse_los' .did you mean 'mse_loss'",
        ),
        ({"loss": 5}, r"loss must be a function loss\(model\(x\), y\) .*got 5"),
        ({"batch_size": 10**20}, "batch_size must be an integer >= 1 of 64 bits, got 100000000000000000000"),
        ({"seed": 2**63}, "seed must be an integer of 64 bits"),
        ({"test": (X[:, :4], Y)}, r"not on the test set \(x torch.float32 \[6, 4\], y .*\): RuntimeError"),
    ],
    ids=str,
)
def test_what_would_only_be_found_after_a_round_is_told_before(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        start(**options)
    assert not list(tmp_path.iterdir())
