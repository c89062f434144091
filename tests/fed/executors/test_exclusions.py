"""A client that fails is excluded: on every executor, with the bits of a run in which it takes no part.

It fails if it raises an error, or if its loss or upload is not finite.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastsam import fed
from fastsam.fed.data import FederatedData
from fastsam.fed.executors.vmap import Vmap
from tests.helpers import oracle
from tests.helpers.fed_runs import FIRST, FLOAT, digest, excluded_clients, fixed_linear, overflow, same_bits
from tests.promises import cases

MOST_STEPS = 1000  # limit for the stacked clients of a test, which take less than a hundred steps
SIZES = (10, 7, 10, 10, 10)  # batches of 5; client 1, which fails, ends with one of 2
OTHERS = [0, 2, 3, 4]
EXACT = [("sequential", None), ("threads", 3)]
ALL = [*EXACT, ("vmap", 4)]


@pytest.fixture(autouse=True)
def bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a test that would train a client forever, because the client failed and was not excluded."""
    take_step, count = Vmap._tick, itertools.count(1)

    def take_bounded_step(executor: Vmap, blocks: Any) -> None:
        if next(count) > MOST_STEPS:
            pytest.fail(f"stacked clients took more than {MOST_STEPS} steps")
        take_step(executor, blocks)

    monkeypatch.setattr(Vmap, "_tick", take_bounded_step)


def loss(scores: Tensor, y: Tensor) -> Tensor:
    """Raise an error for a batch of two, also if only shapes are traced."""
    if len(y) == 2:
        raise ValueError("a batch of two")
    return F.cross_entropy(scores, y)


def two_classes(scores: Tensor, y: Tensor) -> Tensor:
    """Raise an error for the label 2."""
    return F.cross_entropy(scores[:, :2], y)


def train(
    executor: str = "sequential", slots: int | None = None, algorithm: fed.Algorithm | None = None, **options: Any
) -> fed.Result:
    clients = options.pop("clients", None) or oracle.ragged_clients(FLOAT, SIZES)
    base: dict[str, Any] = {
        "rounds": 3, "participation": 1.0, "batch_size": 5, "local_epochs": 2, "loss": loss,
        "on_client_error": "exclude",
    }  # fmt: skip
    base |= {"executor": executor, "slots": slots} | options
    return fed.run(fixed_linear(), clients, algorithm or fed.FedSAM(rho=0.05), **base)


# --- the contract


class Bad:
    """An augmentation that raises for the samples of one client, which it knows by their mean."""

    def __init__(self, mean: float) -> None:
        self.mean = mean

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if abs(float(x.mean()) - self.mean) < 1e-6:
            raise OSError("the file is gone")
        return x + torch.rand(x.shape, generator=generator)


class Spoiled(fed.FedAvg):
    """FedAvg with a number of client 1 that is not finite in round 2, in a place given by name."""

    def __init__(self, place: str, value: float) -> None:
        self.place, self.value = place, value
        self.sends_weights = place == "weight"

    def init_client(self, server: fed.State) -> fed.State:
        return {"k": torch.zeros(3)}

    def finish(self, server: Any, client: Any, results: Any, round: fed.Round) -> Any:
        is_bad = torch.tensor([i == 1 and round.index == 1 for i in results.client_ids])[:, None]
        delta = torch.where(is_bad & (self.place == "delta"), self.value, results.delta)
        k = torch.where(is_bad & (self.place == "state"), self.value, client["k"] + 1)
        weight = torch.where(is_bad[:, 0], self.value, 1.0).tolist() if self.sends_weights else None
        return {"k": k}, fed.Upload(mean={"delta": delta}, weight=weight)


def augmentation() -> dict[str, Any]:
    """Return options under which all clients have one batch of one shape, and the augmentation fails for client 1."""
    clients = oracle.ragged_clients(FLOAT, (10,) * 5)
    augment: Any = Bad(float(clients[1][0].mean()))
    data = FederatedData(clients, clients[0], 3, augment=augment)
    return {"clients": data, "loss": "cross_entropy", "batch_size": 10, "shuffle": False}


def samples(change: Callable[[Tensor], Tensor], **options: Any) -> dict[str, Any]:
    """Return options of a run in which the samples of client 1 are changed."""
    clients = oracle.ragged_clients(FLOAT, SIZES)
    clients[1] = (change(clients[1][0]), clients[1][1])
    return {"clients": clients, "loss": "cross_entropy", "on_client_error": "raise", **options}


PLAIN = {"loss": "cross_entropy"}
TWO = "it raised ValueError: a batch of two (local step 1)"
START = "it raised ValueError: a batch of two (local step 0)"
GONE = "it raised OSError: the file is gone"
STEEP = {"lr": 1e8, "batch_size": 10, "local_epochs": 1, "loss": lambda out, y: (out - out.detach()).mean()}
LARGE = {"lr": 1e-20, "loss": lambda out, y: out.mean()}
# name: the algorithm, options, and the beginning of the reason
CASES: dict[str, tuple[fed.Algorithm, dict[str, Any], str]] = {
    **{f"loss of {name}": (cases.make_algorithm(method), {}, START if name == "FedSCAM" else TWO)
       for name, method in FIRST.items() if not method.startswith(cases.NOT_STACKED)},
    "a loop": (fed.FedNTD(), {}, "it raised ValueError: a batch of two"),
    "augmentation": (fed.FedSAM(rho=0.05), augmentation(), GONE),
    "augmentation before the first step": (fed.FedSCAM(), augmentation(), GONE),
    "inputs that overflow": (fed.SCAFFOLD(), samples(overflow), "the loss is not finite"),
    "delta that overflows": (fed.FedAvg(), samples(lambda x: x * 1e32, **STEEP), "its 'delta' is not finite"),
    "loss that cannot be summed": (fed.FedAvg(), samples(lambda x: x * 1e20, **LARGE), "the loss is out of range"),
    "delta of NaN": (Spoiled("delta", math.nan), PLAIN, "its 'delta' is not finite"),
    "state of NaN": (Spoiled("state", math.nan), PLAIN, "its state 'k' is not finite"),
    "state of -inf": (Spoiled("state", -math.inf), PLAIN, "its state 'k' is not finite"),
    "weight of NaN": (Spoiled("weight", math.nan), PLAIN, "its 'weight of the client' is not finite"),
}  # fmt: skip
USUAL = [name for name in CASES if not name.startswith("loss of")] + [
    f"loss of {name}" for name in ("FedSAM", "SCAFFOLD", "MimeLite", "FedSCAM")
]


def excluded_by(name: str) -> list[list[int]]:
    """Return the clients that a case excludes in each round."""
    return [[], [1], []] if isinstance(CASES[name][0], Spoiled) else [[1]] * 3


@functools.cache
def without_client_1(name: str) -> fed.Result:
    algorithm, options, _ = CASES[name]
    rounds = excluded_by(name)
    return train(algorithm=algorithm, **options, sampler=lambda t, generator: OTHERS if rounds[t] else range(5))


@functools.cache
def sequential(name: str) -> fed.Result:
    algorithm, options, _ = CASES[name]
    return train(algorithm=algorithm, **options)


@pytest.mark.parametrize(
    ("name", "executor", "slots"),
    [
        pytest.param(name, executor, slots, marks=[] if name in USUAL else pytest.mark.slow, id=f"{name}-{executor}")
        for name in CASES
        for executor, slots in (EXACT if name == "a loop" else ALL)
    ],
)
def test_the_others_train_as_without_it(
    name: str, executor: str, slots: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The sums have no order, so a run whose sampler never takes the client ends in the same bits."""
    algorithm, options, reason = CASES[name]
    with caplog.at_level(logging.WARNING, logger="fastsam.fed"):
        result = train(executor, slots, algorithm, **options)
    run_without, rounds = without_client_1(name), excluded_by(name)
    assert excluded_clients(result) == rounds and excluded_clients(run_without) == [[]] * 3
    assert result.summary()["excluded"] == sum(map(len, rounds)) and result.history[0]["clients"] == 5
    first = rounds.index([1])
    full_reason = result.history[first]["excluded"][0]["reason"]
    assert (
        full_reason.startswith(reason) and f"round {first + 1}: client 1 is excluded: {full_reason}" in caplog.messages
    )
    if executor == "vmap":
        assert oracle.difference(result.model, run_without.model) < 1e-5
        return
    assert same_bits(result.model, run_without.model) and digest(result) == digest(sequential(name))
    keys = ("train_loss", "steps") if full_reason.startswith("it raised") else ("train_loss",)
    assert [[r[key] for key in keys] for r in result.history] == [[r[key] for key in keys] for r in run_without.history]


# --- what ends a run


@pytest.mark.parametrize(("executor", "slots"), ALL)
def test_an_error_ends_the_run_unless_it_excludes(executor: str, slots: int | None) -> None:
    with pytest.raises(fed.ClientError, match="client 1 failed in round 1, local step 1: ValueError: a batch of two"):
        train(executor, slots, on_client_error="raise")


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_of_clients_that_share_a_pass_those_are_excluded_that_fail_alone(
    slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All batches have one size. The loss knows two of the three classes, which the pass of all of them shows. The
    passes of the others are replayed."""
    clients = oracle.ragged_clients(FLOAT, (10,) * 5)
    clients = [(x, torch.full_like(y, 2) if i in (1, 3) else y.clamp(max=1)) for i, (x, y) in enumerate(clients)]
    result = train("vmap", slots, clients=clients, loss=two_classes, backend="reference")
    assert excluded_clients(result) == [[1, 3]] * 3
    reasons = {entry["reason"] for entry in result.history[0]["excluded"]}
    assert reasons == {"it raised RuntimeError: index 2 is out of bounds for dimension 2 with size 2 (local step 0)"}
    assert "not replayed" not in caplog.text


def test_a_run_ends_though_samples_of_an_excluded_client_raise(caplog: pytest.LogCaptureFixture) -> None:
    """There is no test set, so the training samples of all clients are evaluated at the end."""
    clients = [(torch.randint(5, (10, 6)), torch.randint(3, (10,))) for _ in range(3)]
    clients[1][0][7, 2] = 99
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(24, 3))
    for executor in ("sequential", "vmap"):
        result = fed.run(
            model, clients, fed.FedAvg(), rounds=2, batch_size=5, participation=1.0, on_client_error="exclude",
            executor=executor,
        )  # fmt: skip
        assert excluded_clients(result) == [[1], [1]] and result.summary()["train_accuracy"] is None
        assert "train_accuracy is None: the model raised IndexError" in caplog.text


def test_too_many_and_all(tmp_path: Any) -> None:
    clients = oracle.ragged_clients(FLOAT, (10, 7, 7, 10))
    assert len(train(clients=clients, max_excluded=0.5).history) == 3
    words = "2 of 4 active clients were excluded, more than max_excluded=0.4 allows .client 1: it raised ValueError"
    with pytest.raises(RuntimeError, match=words):
        train(clients=clients, max_excluded=0.4)
    words = "round 2: all 1 active clients were excluded .client 1: the loss is not finite.*smaller lr"
    with pytest.raises(RuntimeError, match=words):
        train(**samples(overflow), sampler=lambda t, generator: [t], run_dir=tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_log_names_a_few_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    clients = [(overflow(x) if i else x, y) for i, (x, y) in enumerate(oracle.ragged_clients(FLOAT, (9,) * 6))]
    with caplog.at_level(logging.WARNING, logger="fastsam.fed"):
        train(clients=clients, rounds=1, loss="cross_entropy")
    names = [message for message in caplog.messages if "is excluded" in message]
    assert len(names) == 3 and "round 1: 5 of 6 clients are excluded" in caplog.messages


def test_what_the_algorithm_raises_and_ctrl_c_still_end_the_run() -> None:
    class Broken(fed.FedAvg):
        def finish(self, *arguments: Any) -> Any:
            raise ValueError("broken")

    with pytest.raises(fed.AlgorithmError, match="broken"):
        train(algorithm=Broken())

    def raise_interrupt(scores: Tensor, y: Tensor) -> Tensor:
        if len(y) == 2:
            raise KeyboardInterrupt
        return F.cross_entropy(scores, y)

    with pytest.raises(KeyboardInterrupt):
        train(loss=raise_interrupt)


def test_a_model_that_draws_where_it_must_not_is_no_clients_error() -> None:
    """It is an error of the run: with threads, random numbers would depend on the order of clients."""
    draws = [0]

    def draw_late(scores: Tensor, y: Tensor) -> Tensor:
        draws[0] += 1
        if draws[0] > 30:
            torch.rand(1)
        return F.cross_entropy(scores, y)

    with pytest.raises(fed.ClientError, match="draws random numbers"):
        train("threads", 2, loss=draw_late)


# --- executors for GPUs


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", ["loss of FedSAM", "loss of FedSCAM"])
def test_streams_go_on_with_the_other_clients(name: str) -> None:
    """In a step, and before the first one (FedSCAM's pilot)."""
    result = train("streams", 2, CASES[name][0])
    assert excluded_clients(result) == [[1]] * 3 and digest(result) == digest(sequential(name))
