"""A client that raises is excluded where the run says so: on every executor, with the bits of a run in which it takes
no part."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.clients.population import Augment
from fastsam.fed.data import FederatedData
from tests.helpers import fed_cases as cases
from tests.helpers import oracle
from tests.helpers.fed_runs import FIRST, FLOAT, digest, same_bits

SIZES = (10, 7, 10, 10, 10)  # batches of 5; client 1 ends with one of 2
EXACT = [("sequential", None), ("threads", 3)]
ALL = [*EXACT, ("vmap", 4)]


def loss(scores: Tensor, y: Tensor) -> Tensor:
    """Raise an error for a batch of two, also if only shapes are traced."""
    if len(y) == 2:
        raise ValueError("a batch of two")
    return F.cross_entropy(scores, y)


def train(
    executor: str = "sequential", slots: int | None = None, algorithm: fed.Algorithm | None = None, **options: Any
) -> fed.Result:
    torch.manual_seed(0)
    clients = options.pop("clients", None) or oracle.ragged_clients(FLOAT, SIZES)
    base: dict[str, Any] = {
        "rounds": 3, "participation": 1.0, "batch_size": 5, "local_epochs": 2, "loss": loss,
        "on_client_error": "exclude",
    }  # fmt: skip
    base |= {"executor": executor, "slots": slots} | options
    return fed.run(nn.Linear(6, 3), clients, algorithm or fed.FedSAM(rho=0.05), **base)


def excluded(result: fed.Result) -> list[list[int]]:
    return [[one["client"] for one in record["excluded"]] for record in result.history]


@pytest.mark.parametrize(("executor", "slots"), ALL)
def test_it_is_excluded_and_named_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, executor: str, slots: int | None
) -> None:
    with caplog.at_level(logging.WARNING, logger="fastsam.fed"):
        result = train(executor, slots)
    assert excluded(result) == [[1]] * 3
    reason = "it raised ValueError: a batch of two (local step 1)"
    assert result.history[0]["excluded"][0]["reason"] == reason
    assert f"round 1: client 1 is excluded: {reason}" in caplog.messages
    assert result.history[0]["steps"] == 4 * 2 * 2  # steps of the other clients
    with pytest.raises(fed.ClientError, match="client 1 failed in round 1, local step 1: ValueError: a batch of two"):
        train(executor, slots, on_client_error="raise")


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(cases.ours(method), marks=[] if name == "SCAFFOLD" else pytest.mark.slow)
        for name, method in FIRST.items()
        if not method.startswith(cases.NOT_STACKED)
    ],
    ids=lambda a: type(a).__name__,
)
def test_the_others_train_as_without_it(algorithm: fed.Algorithm) -> None:
    """The sums have no order, so a run whose sampler never takes the client ends in the same bits; but N counts all
    clients in both."""
    here = [train(e, s, algorithm) for e, s in EXACT]
    without = train(algorithm=algorithm, sampler=lambda t, g: [0, 2, 3, 4])
    assert excluded(here[0]) == [[1]] * 3 and excluded(without) == [[]] * 3
    assert digest(here[0]) == digest(here[1])
    assert same_bits(here[0].model, without.model)
    stacked = train("vmap", 4, algorithm)
    assert excluded(stacked) == [[1]] * 3
    assert oracle.difference(stacked.model, without.model) < 1e-5


def test_clients_that_share_a_pass_are_excluded_together() -> None:
    clients = oracle.ragged_clients(FLOAT, (10, 7, 10, 7, 10))
    result = train("vmap", 5, clients=clients)
    assert excluded(result) == [[1, 3]] * 3
    assert all(
        one["reason"] == "it raised ValueError: a batch of two (local step 1, in a pass of 2 clients)"
        for one in result.history[0]["excluded"]
    )
    assert excluded(train(clients=clients)) == [[1, 3]] * 3


@pytest.mark.parametrize("algorithm", [fed.MimeLite(), fed.FedSCAM()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(("executor", "slots"), ALL)
def test_an_error_before_the_first_step(executor: str, slots: int | None, algorithm: fed.Algorithm) -> None:
    """MimeLite's gradient over all samples or FedSCAM's pilots meet a batch of 2 in client 1, in batches of 5."""
    result = train(executor, slots, algorithm)
    assert excluded(result) == [[1]] * 3
    assert "(local step 0)" in result.history[0]["excluded"][0]["reason"]


class Bad:
    """An augmentation that raises for the samples of one client, told by their mean."""

    def __init__(self, mean: float) -> None:
        self.mean = mean

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if abs(float(x.mean()) - self.mean) < 1e-6:
            raise OSError("the file is gone")
        return x + torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("algorithm", [fed.FedSAM(rho=0.05), fed.FedSCAM()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(("executor", "slots"), ALL)
def test_an_error_of_an_augmentation_is_one_clients(executor: str, slots: int | None, algorithm: fed.Algorithm) -> None:
    """Also among stacked clients whose steps have one shape: the others lose no batch."""
    clients = oracle.ragged_clients(FLOAT, (10,) * 5)
    augment: Augment = Bad(float(clients[2][0].mean()))
    data = FederatedData(clients, clients[0], 3, augment=augment)
    plain: dict[str, Any] = {"clients": data, "loss": "cross_entropy", "batch_size": 10, "shuffle": False}
    result = train(executor, slots, algorithm, **plain)
    assert excluded(result) == [[2]] * 3
    without = train(algorithm=algorithm, **plain, sampler=lambda t, g: [0, 1, 3, 4])
    assert oracle.difference(result.model, without.model) < 1e-5


def test_too_many_and_all() -> None:
    clients = oracle.ragged_clients(FLOAT, (10, 7, 7, 10))
    with pytest.raises(
        RuntimeError,
        match="2 of 4 active clients were excluded, more than max_excluded=0.4 allows .client 1: it raised ValueError",
    ):
        train(clients=clients, max_excluded=0.4)
    with pytest.raises(
        RuntimeError, match="all 1 active clients were excluded .client 1: it raised ValueError: a batch of two"
    ):
        train(sampler=lambda t, g: [1])


def test_what_the_algorithm_raises_and_ctrl_c_still_end_the_run() -> None:
    class Broken(fed.FedAvg):
        def finish_client(self, *arguments: Any) -> Any:
            raise ValueError("broken")

    with pytest.raises(fed.AlgorithmError, match="broken"):
        train(algorithm=Broken())

    def interrupted(scores: Tensor, y: Tensor) -> Tensor:
        if len(y) == 2:
            raise KeyboardInterrupt
        return F.cross_entropy(scores, y)

    with pytest.raises(KeyboardInterrupt):
        train(loss=interrupted)


def test_a_model_that_draws_where_it_must_not_is_no_clients_error() -> None:
    """It is an error of the run: with threads, random numbers would depend on the order of clients."""
    drawn = [0]

    def late(scores: Tensor, y: Tensor) -> Tensor:
        drawn[0] += 1
        if drawn[0] > 30:
            torch.rand(1)
        return F.cross_entropy(scores, y)

    with pytest.raises(fed.ClientError, match="draws random numbers"):
        train("threads", 2, loss=late)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("algorithm", [fed.FedSAM(rho=0.05), fed.MimeLite()], ids=lambda a: type(a).__name__)
def test_streams_go_on_with_the_other_clients(algorithm: fed.Algorithm) -> None:
    """In a step, and before the first one (MimeLite's full gradient)."""
    plain, here = train(algorithm=algorithm), train("streams", 2, algorithm)
    assert excluded(here) == [[1]] * 3 and digest(here) == digest(plain)


@pytest.mark.usefixtures("no_cuda")
def test_the_graph_executor_refuses() -> None:
    with pytest.raises(ValueError, match="'graph' cannot serve here: on_client_error='exclude' .*'streams' can"):
        train("graph", 2)
