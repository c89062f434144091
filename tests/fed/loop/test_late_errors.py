"""Errors that appear in a later round, after all checks: the message says where, and why."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.fed.executors import ClientError
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import FLOAT

SIZES = (4, 6, 5)
EXECUTORS = ["sequential", "vmap"]


def start(executor: str = "sequential", augment: Any = None, **options: Any) -> fed.Result:
    clients = oracle.ragged_clients(FLOAT, SIZES)
    data = clients if augment is None else fed.FederatedData(clients, clients[0], 3, augment=augment)
    base: dict[str, Any] = {"rounds": 4, "participation": 1.0, "batch_size": 4, "algorithm": fed.FedAvg()}
    return fed.run(oracle.smooth_model(FLOAT), data, executor=executor, **(base | options))


class Later:
    """Calls `bad` in place of `good` after `num_good` calls."""

    def __init__(self, good: Any, bad: Any, num_good: int) -> None:
        self.good, self.bad, self.num_good = good, bad, num_good

    def __call__(self, *arguments: Any) -> Any:
        self.num_good -= 1
        return (self.good if self.num_good >= 0 else self.bad)(*arguments)


# --- losses and augmentation ---


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_loss_that_is_no_scalar_in_a_later_step(executor: str) -> None:
    def loss(scores, y):
        """Return a loss with a dimension for a single sample, which is the last batch of a client with five."""
        value = F.cross_entropy(scores, y)
        return value[None] if len(y) == 1 else value

    words = r"client 2 failed in round 1, local step 1.*loss\(model\(x\), y\) must be a scalar .*got .*\[1\]"
    with pytest.raises(ClientError, match=words):
        start(executor, loss=loss)


def _noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("bad", "came"),
    [
        (lambda x, g: x[:, :4], r"got torch.float32 \[\d, 4\]"),
        (lambda x, g: x[1:], r"got torch.float32 \[\d, 6\]"),
        (lambda x, g: x.double(), "got torch.float64"),
        (lambda x, g: None, "got NoneType"),
    ],
    ids=["narrow", "short", "double", "nothing"],
)
def test_an_augmentation_of_another_shape_in_a_later_round(executor: str, bad: Any, came: str) -> None:
    with pytest.raises(
        ClientError,
        match=f"client .* in round 2.*augment must return a batch with the shape and dtype of its input, .*{came}",
    ):
        start(executor, augment=Later(_noise, bad, 1 + len(SIZES)))


# --- one's own algorithm ---


@dataclass(frozen=True)
class Raises(fed.Algorithm):
    """Keeps a state, and raises in one of its methods from round `first_bad_round` on."""

    method: str
    error: type[BaseException] = ZeroDivisionError
    first_bad_round: int = 1

    def _look(self, method: str, index: int) -> None:
        if method == self.method and index >= self.first_bad_round:
            raise self.error("oh no")

    def init_server(self, w0):
        self._look("init_server", self.first_bad_round)
        return {"w": w0}

    def init_client(self, server):
        self._look("init_client", self.first_bad_round)
        return {"k": server["w"] * 0}

    def local_step(self, server, client, round):
        self._look("local_step", round.index)
        return fed.Step()

    def finish(self, server, client, results, round):
        self._look("finish", round.index)
        return {"k": client["k"] + 1}, fed.Upload(mean={"delta": results.delta})

    def step_server(self, server, aggregate, round):
        self._look("step_server", round.index)
        return super().step_server(server, aggregate, round)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("init_server", "before round 1"), ("init_client", "before round 1"), ("local_step", "in round 2, client 0"),
        ("finish", "in round 2, client 0"), ("step_server", "in round 2"),
    ],
)  # fmt: skip
def test_what_an_own_algorithm_raises_is_told_with_method_round_and_client(method: str, where: str) -> None:
    with pytest.raises(
        fed.AlgorithmError, match=rf"Raises.{method} failed {where}: ZeroDivisionError: oh no"
    ) as error_info:
        start(algorithm=Raises(method))
    assert isinstance(error_info.value.__cause__, ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt):
        start(algorithm=Raises(method, KeyboardInterrupt))


def test_of_stacked_clients_all_are_named() -> None:
    with pytest.raises(fed.AlgorithmError, match="local_step failed in round 2, clients 2, 1, 0: Zero"):
        start("vmap", algorithm=Raises("local_step"), slots=4)


# --- states ---


@dataclass(frozen=True)
class Spoils(fed.Algorithm):
    """Keeps a number on the server and on each client; `value` takes the place of the server's in round 2."""

    value: float = 0.0
    begin: float = 0.0
    begin_client: float = 0.0

    def init_server(self, w0):
        return {"w": w0, "best": torch.full((), self.begin), "steps": torch.zeros((), dtype=torch.int64)}

    def init_client(self, server):
        return {"k": torch.full((3,), self.begin_client)}

    def step_server(self, server, aggregate, round):
        best = torch.full((), self.value) if round.index == 1 else server["best"]
        return {**super().step_server(server, aggregate, round), "best": best}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_server_whose_new_state_is_not_finite_ends_the_run(value: float, tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match="round 2: 'best' of the server's state holds NaN or infinity"):
        start(algorithm=Spoils(value), run_dir=tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_state_that_begins_at_infinity_may_stay_there() -> None:
    result = start(algorithm=Spoils(math.inf, math.inf, math.inf))
    assert not any(record["excluded"] for record in result.history)


test_refused = refusals(
    (lambda: start(algorithm=Spoils(begin=math.nan)), "init_server returned NaN in 'best'"),
    (lambda: start(algorithm=Spoils(begin_client=math.nan)), "init_client returned NaN in 'k'"),
)
