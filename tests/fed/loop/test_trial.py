"""Errors that a trial step on a copy of the model finds before the first round: in models, losses, batches and
augmentations."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.population import Population
from fastsam.fed.loop.trial import try_model
from tests.helpers import oracle
from tests.helpers.fed_input import NOTHING, X, Y, start
from tests.helpers.fed_runs import norm_model


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:The .grad attribute")
def test_a_model_that_no_gradient_reaches():
    """It would run to the end, and be what it was at the start."""
    with pytest.raises(ValueError, match="no trainable parameter of .* gets a gradient .a torch.jit.script model"):
        start(torch.jit.script(oracle.smooth_model(torch.float32)))


@pytest.mark.parametrize("switch_off", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off(switch_off):
    with switch_off(), pytest.raises(ValueError, match="gradients are switched off around the call"):
        start()


def test_bytes_stay_bytes_and_the_message_names_the_functions_for_pixels():
    x, y = torch.randint(0, 256, (6, 4), dtype=torch.uint8), torch.tensor([0, 1, 2, 0, 1, 2])
    options: dict[str, Any] = {"rounds": 1, "participation": 1.0}
    with pytest.raises(
        ValueError, match=r"x torch.uint8 .*; fed.data.as_tensors\(x, y\) makes pixels 0..1, and models"
    ):
        fed.run(nn.Linear(4, 3), [(x, y)], fed.FedAvg(), **options)
    model = nn.Linear(4, 3)
    scaled = [fed.data.as_tensors(x, y)]
    result, expected = (fed.run(model, clients, fed.FedAvg(), **options) for clients in (scaled, [(x / 255, y)]))
    assert torch.equal(result.model.weight, expected.model.weight)


class Scaled(nn.Module):
    def __init__(self, is_trained):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=is_trained)

    def forward(self, scores, y):
        return F.cross_entropy(scores * self.scale, y)


def test_a_loss_with_parameters_of_its_own():
    with pytest.raises(ValueError, match="loss has trainable parameters .scale., which no run trains"):
        start(loss=Scaled(is_trained=True))
    start(loss=Scaled(is_trained=False))


def test_a_loss_that_ignores_another_label():
    options = {"loss": nn.CrossEntropyLoss(ignore_index=255), "participation": 1.0}
    actual = start(clients=[(X, torch.where(Y == 1, 255, Y))], **options)
    expected = start(clients=[(X, torch.where(Y == 1, -100, Y))], participation=1.0)
    assert all(torch.equal(a, b) for a, b in zip(actual.model.parameters(), expected.model.parameters(), strict=True))
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


def test_batchnorm_and_a_batch_of_one_sample(tmp_path):
    """The client that would stop the run in some later round is named at its beginning."""
    norm, clients = norm_model(), [(X, Y), (X[:5], Y[:5])]
    options = {"buffers": "average", "run_dir": tmp_path / "run", "sampler": lambda t, g: [0]}
    words = "the last batch of client 1, with batch_size=4, has 1 of its 5 samples.*use drop_last=True"
    with pytest.raises(ValueError, match=words):
        start(norm, clients, batch_size=4, **options)
    assert not (tmp_path / "run").exists()
    start(norm, clients, batch_size=6, buffers="keep")
    start(norm, clients, batch_size=4, buffers="keep", drop_last=True)
    with pytest.raises(ValueError, match="the last batch of client 1, .* has 1 of its 1 samples"):
        start(norm, [(X, Y), (X[:1], Y[:1])], batch_size=4, buffers="keep", drop_last=True)
    pool = fed.Centralised_SGD()  # all 11 samples, so the last batch has 3
    start(norm, clients, pool, batch_size=4, participation=1.0, buffers="keep")


# --- Frequent mistakes in a call of `fed.run` are errors with words, before the first round.


def test_a_run_without_a_test_set(caplog: pytest.LogCaptureFixture) -> None:
    start()
    assert "there is no test set: the records' test_loss and test_accuracy are None. Pass test=(x, y)" in caplog.text
    caplog.clear()
    start(test=(X, Y))
    assert "there is no test set" not in caplog.text


def test_without_a_test_set_the_summary_has_the_accuracy_on_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    clients = [(X, Y), (X[:3], Y[:3])]
    result = start(clients=clients)
    x, y = torch.cat([X, X[:3]]), torch.cat([Y, Y[:3]])
    right = (result.model(x).argmax(1) == y).double().mean().item()
    assert result.summary()["train_accuracy"] == pytest.approx(right)
    assert f"train accuracy {result.summary()['train_accuracy']}" in repr(result)
    assert "train_accuracy" in caplog.text
    assert start(test=(X, Y)).summary()["train_accuracy"] is None
    regression = [(X, X[:, :1])]
    assert start(nn.Linear(6, 1), regression, loss="mse_loss").summary()["train_accuracy"] is None


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"participation": 0.2}, True),
        ({"participation": 0.2, "sampler": "fixed"}, True),
        ({"participation": 0.5}, False),
        ({"cohort": 1}, False),
        ({"sampler": lambda t, generator: [0]}, False),
    ],
)
def test_participation_of_one_client(options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    start(clients=[(X, Y)] * 4, **options)
    assert ("is about one client in a round. Pass cohort=2" in caplog.text) is warns


def test_an_interrupt_without_a_directory_names_run_dir(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(rounds=3, progress=interrupt)
    assert "interrupted after 2 of 3 rounds" in caplog.text and "run_dir=" in caplog.text
    caplog.clear()
    with pytest.raises(KeyboardInterrupt):
        start(rounds=3, progress=interrupt, run_dir=tmp_path / "run")
    assert "run_dir=" not in caplog.text


# --- One look at a training pass before round 1: what it reads apart from model and batch, and what it changes, is
# refused by name.


class Odd(nn.Linear):
    """A linear model with a side effect, given by name."""

    def __init__(self, mode: str) -> None:
        super().__init__(6, 3)
        self.mode, self.calls = mode, 0
        self.scale = torch.ones(3, requires_grad=True)  # which is not registered
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "counter":
            self.calls += 1
            return super().forward(x) / self.calls
        if self.mode == "python":
            return super().forward(x) * random.random()
        if self.mode == "numpy":
            return super().forward(x) * float(np.random.rand())
        if self.mode == "layer drop":
            return super().forward(x) if random.random() < 2 else x
        if self.mode == "input":
            x.relu_()
        if self.mode == "buffer":
            self.mean = x.mean(0)
        if self.mode == "attention":  # stored, and changes no result
            self.calls, self.records = self.calls + 1, x.detach().sum()
        if self.mode == "leaf inside":
            return super().forward(x + torch.zeros(6, requires_grad=True))
        return super().forward(x) * (self.scale if self.mode == "unregistered" else 1)


@pytest.mark.parametrize("tree", [False, True], ids=["pairs", "trees"])
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("counter", "repeated from the same weights, batch and seed, gives .* changes calls"),
        ("python", "changes Python's random numbers"),
        ("numpy", "changes numpy's random numbers"),
        ("layer drop", "changes Python's random numbers"),
        ("input", "writes into its batch"),
        ("buffer", r"replaces the buffer 'mean' .* Write into it: self.mean.copy_\(new\)"),
        ("unregistered", r"a gradient for a tensor of shape \[3\], which is not a parameter of the model"),
        ("attention", None),
        ("leaf inside", None),
    ],
)
def test_a_training_pass_with_a_side_effect(mode: str, words: str | None, tree: bool) -> None:
    inputs, options = X.clone(), dict[str, Any](buffers="average", executor="sequential")
    clients: Any = [((inputs,), Y)] if tree else [(inputs, Y)]
    if words is None:
        start(Odd(mode), clients, **options)
    else:
        with pytest.raises(ValueError, match=words):
            start(Odd(mode), clients, **options)
    assert torch.equal(inputs, X)


@pytest.mark.parametrize("factors", [(2.0, 1.0, 1.0), (2.0, 1.0, 2.0, 1.0)], ids=["first call", "every other call"])
def test_a_state_outside_of_the_model_is_refused(factors: tuple[float, ...]) -> None:
    """Nothing in the model shows it, and two of its passes may agree by chance."""
    calls = itertools.chain(factors, itertools.repeat(1.0))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) * next(calls)

    with pytest.raises(ValueError, match="repeated from the same weights, batch and seed, gives"):
        start(loss=loss, executor="sequential")


def test_a_loss_that_refers_to_the_users_model() -> None:
    model, head = nn.Linear(6, 3), nn.Linear(3, 3)

    def penalised_loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + 0.05 * sum(p.pow(2).sum() for p in model.parameters())

    with pytest.raises(ValueError, match=r"refers to your model's parameter 'weight'.*fed.BatchLoss"):
        start(model, loss=penalised_loss)
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="a gradient for 'head.(weight|bias)', which is not a parameter of the model"):
        start(model, loss=lambda outputs, y: F.cross_entropy(head(outputs), y))
    head.requires_grad_(False)
    start(model, loss=lambda outputs, y: F.cross_entropy(head(outputs), y))


def test_the_penalty_as_a_loss_of_the_batch() -> None:
    """The remedy that the refusal names."""

    def penalised_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.05 * sum(p.pow(2).sum() for p in model.parameters())

    start(nn.Linear(6, 3), loss=fed.BatchLoss(penalised_loss))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(kind: str) -> None:
    model = nn.Linear(6, 3)
    getattr(model.weight, kind)(lambda g: None)
    with pytest.raises(ValueError, match="the parameter 'weight' has hooks, and clients train on copies without them"):
        start(model)


@pytest.mark.parametrize("executor", ["sequential", "threads", "vmap"])
def test_a_run_inside_an_autocast_region(executor: str) -> None:
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"inside torch.autocast.* the model's forward\(\)"):
        start(executor=executor)


# --- Bad input: each a clear error before the first round, and nothing lost.


def test_what_is_accepted():
    """Arrays, lists, read-only arrays, other integer types, float64 inputs for a float32 model, and an ignored
    label."""
    x, y = X.double().numpy(), Y.numpy()
    unwritable = x.copy()
    unwritable.flags.writeable = False
    clients = [
        (x, y), [unwritable, y.astype(np.uint8)], (X.tolist(), Y.tolist()), (X[::2], Y[::2].int()),
        (X, torch.tensor([0, 1, -100, 0, 1, 2])),
    ]  # fmt: skip
    result = start(clients=clients, participation=1.0)
    assert result.history[0]["clients"] == 5 and next(result.model.parameters()).dtype == torch.float32
    with pytest.raises(ValueError, match="client 0: labels"):
        start(clients=[(X, Y + 1)], loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize("uses_func", [False, True])
def test_the_activations_that_a_pass_keeps_are_counted(uses_func: bool) -> None:
    """The inputs of the layers, the output of tanh, the log-probabilities; no weights, frozen or not."""

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            slope = torch.func.grad(lambda v: (v**2).sum())(x) / 2 if uses_func else x
            result: Tensor = super().forward(slope)
            return result

    model = Model(nn.Linear(6, 64).requires_grad_(False), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))
    clients = PairClients([(X, Y)], None)
    trial = try_model(model, Population(clients, torch.device("cpu")), F.cross_entropy, len(X))
    total_weight = 1  # the mean in the loss keeps it
    assert trial.activations == (0 if uses_func else 4 * (len(X) * (64 + 32 + 3) + total_weight))
