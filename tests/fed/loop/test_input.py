"""Bad input: each a clear error before the first round, and nothing lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import backends, fed
from tests.helpers import oracle
from tests.helpers.fed_input import NOTHING, X, Y, start


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds must be an integer >= 1, got 0"),
        ({"rounds": 2.5}, "rounds must be an integer >= 1, got 2.5"),
        ({"rounds": True}, "rounds"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"eval_every": 0}, "eval_every"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"lr": -0.1}, "lr must be a finite number > 0, got -0.1"),
        ({"lr": math.nan}, "lr.*nan"),
        ({"lr": "fast"}, "lr = 'fast': 'fast' is not known; names are round"),
        ({"lr_decay": 0.0}, "lr_decay"),
        ({"momentum": -0.9}, "momentum"),
        ({"weight_decay": -1e-3}, "weight_decay"),
        ({"weight_decay": math.inf}, "weight_decay"),
        ({"server_lr": -1}, "server_lr"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_scope": "all"}, "clip_scope must be one of 'full', 'linear', got 'all'"),
        ({"participation": 0.0}, "participation must be a finite number > 0 and <= 1, got 0.0"),
        ({"participation": 1.5}, "participation.*1.5"),
        ({"participation": 1.5, "sampler": lambda t, g: [0]}, "participation"),
        ({"sampler": "uniform"}, "'bernoulli', 'fixed', 'shuffled', 'simulator' or a callable.*'uniform'"),
        ({"weighting": "size"}, "'uniform', 'samples', a list .*, got 'size'"),
        ({"available": [0]}, "available must be a function of the round that returns client ids or a mask .*, got .0."),
        ({"validation": "none"}, "'prior', 'shared', 'iid', got 'none'"),
        ({"buffers": "drop"}, "None, 'average', 'keep', 'local', got 'drop'"),
        ({"executor": "warp"}, "executor must be one of .*'sequential'.*got 'warp'"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"device": "abacus"}, "device must be 'cpu', 'cuda' or 'cuda:N', got 'abacus'"),
        ({"device": "meta"}, "device must be"),
        ({"device": "cuda:99"}, "'cuda:99' is not there"),
        ({"target": 80}, r"target \(.*accuracy in 0..1 .*\) must be a finite number > 0 and <= 1, got 80"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"shuffle": "yes"}, "shuffle"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),  # no addresses: workers compare names
)
def test_keywords(options, words):
    with pytest.raises(ValueError, match=words):
        start(**options)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([], "clients is empty"),
        (X, "sequence of .x, y. pairs.*Tensor"),
        (((X, Y) for _ in range(3)), r"got generator .hand over list\(clients\)"),
        ({"a": (X, Y)}, r"got a dict .hand over list\(clients.values\(\)\)"),
        (5, "got int"),
        ([(X, Y), X], "client 1 must be a pair .*got Tensor"),
        ([(X, Y), (X, Y, Y)], "client 1 must be a pair"),
        ([(X, Y), (X, Y[:4])], "client 1: x has 6 samples and y 4"),
        ([(X, Y), (X[:0], Y[:0])], "client 1 has no samples"),
        ([(X, Y), (X, Y + 1)], r"client 1: labels must lie in 0..2 \(the model has 3 outputs\), got 3"),
        ([(X, Y), (X, Y - 1)], "client 1: labels.*got -1"),
        ([(X, Y), (X / 0, Y)], "client 1: x holds NaN or infinity"),
        (
            [(X, Y), ("pictures", Y)],
            "x of client 1 must be a tensor or an array of numbers|x of client 1 must be a dense",
        ),
        ([(X, torch.tensor(1))], "y of client 0 must be"),
        (
            [(X, Y), (X, NOTHING)],
            "client 1: all labels are -100, which the loss ignores; leave it out or give it labels",
        ),
        ([(X.long(), Y)], "trial step on client 0 .x torch.int64.*: no floating-point inputs, which are not converted"),
        ([(X[:, :4], Y)], r"trial step on client 0 .*\[6, 4\].* failed: RuntimeError: mat1 and mat2"),
        (
            [(X, Y), (X[:5, :4], Y[:5])],
            r"work on client 0, but not on client 1 \(x torch.float32 \[5, 4\], y .*: RuntimeError",
        ),
        (
            [(X, Y), (X[:5].long(), Y[:5])],
            r"work on client 0, but not on client 1 \(x torch.int64 \[5, 6\]: no floating",
        ),
        ([(X, Y), (X[:5], Y[:5].float())], "work on client 0, but not on client 1.*y torch.float32"),
        ([(X, Y.float())], "trial step on client 0.*y torch.float32"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_clients(clients, words):
    with pytest.raises(ValueError, match=words):
        start(clients=clients)


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ((X, Y[:3]), "the test set: x has 6 samples and y 3"),
        ((X[:0], Y[:0]), "the test set has no samples"),
        ((X, Y + 3), "the test set: labels must lie in 0..2"),
        (X, "the test set must be a pair"),
        ((X, torch.where(Y == 1, -100, Y)), "the test set: labels are -100, which the loss ignores"),
        ((X, Y.float()), r"but not on the test set \(.*y torch.float32 \[6\]\): RuntimeError"),
        ((X, Y[:, None]), r"but not on the test set \(.*y torch.int64 \[6, 1\]\): RuntimeError"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_test_sets(test, words):
    with pytest.raises(ValueError, match=words):
        start(test=test)


def half():
    return oracle.smooth_model().half()


def mixed():
    model = oracle.smooth_model()
    model[0].float()
    return model


def frozen():
    return oracle.smooth_model().requires_grad_(False)


def poisoned():
    model = oracle.smooth_model()
    model[2].bias.data[1] = math.nan
    return model


def sparse():
    return nn.Sequential(nn.Embedding(3, 3, sparse=True), nn.Flatten(), nn.Linear(18, 3))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: "resnet", {}, "torch.nn.Module, got str"),
        (half, {}, r"float32 or float64.*float16.*model.float\(\)"),
        (mixed, {}, "torch.float32, torch.float64"),
        (frozen, {}, "no trainable parameters"),
        (lambda: nn.LazyLinear(3), {}, "lazy parameters"),
        (poisoned, {}, "'2.bias' holds NaN"),
        (
            lambda: nn.Linear(6, 3),
            {"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")},
            r"must be a scalar tensor.*\[6\]",
        ),
        (lambda: nn.Linear(6, 3), {"loss": nn.CrossEntropyLoss}, r"got <class .*write CrossEntropyLoss\(\)"),
        (lambda: nn.Linear(6, 3), {"loss": lambda out, y: 0.5}, "must be a scalar tensor.*float"),
        (lambda: nn.Linear(6, 3), {"loss": lambda out, y: torch.tensor(1.0)}, "does not depend on the model"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_models_and_losses(model, options, words):
    with pytest.raises(ValueError, match=words):
        start(model=model(), **options)


def test_sparse_gradients():
    tokens = torch.randint(0, 3, (6, 6))
    with pytest.raises(ValueError, match="sparse gradients"):
        start(model=sparse(), clients=[(tokens, Y)])


def test_what_is_accepted():
    """Arrays, lists, read-only arrays, other integer types, float64 inputs for a float32 model, and an ignored
    label."""
    x, y = X.double().numpy(), Y.numpy()
    frozen = x.copy()
    frozen.flags.writeable = False
    clients = [
        (x, y),
        [frozen, y.astype(np.uint8)],
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


def test_a_model_without_values():
    with pytest.raises(ValueError, match="parameters without values .on the device 'meta'.*to_empty"):
        start(oracle.smooth_model(torch.float32).to("meta"))


def test_no_backend_serves_a_device_without_memory():
    with pytest.raises(RuntimeError, match="cannot serve torch.float32 on meta: no backend serves the device 'meta'"):
        backends.select("auto", torch.device("meta"), torch.float32)
