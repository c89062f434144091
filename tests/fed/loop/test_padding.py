"""Noise of a user's algorithm in rows: an error if it reaches the padding, and accepted otherwise."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastsam import fed
from tests.helpers import oracle


@dataclass(frozen=True)
class Noisy(fed.Algorithm):
    """FedAvg with noise in one of three places, as it should be drawn (by parameter) or as it should not."""

    place: str = "upload"
    by_parameter: bool = False

    def noise(self, like, round):
        if not self.by_parameter:
            return torch.ones_like(like)
        row = torch.zeros_like(like)
        for view in round.layout.unflatten(row).values():
            view.fill_(1.0)
        return row

    def local_step(self, server, client, round):
        return fed.Step(q=self.noise(server["w"], round)) if self.place == "step" else fed.Step()

    def finish(self, server, client, results, round):
        delta, n = results.delta, len(results.client_ids)
        if self.place == "upload":
            delta = delta + self.noise(delta, round)
        counts = torch.ones(n, 7)  # a length that differs from a row's
        return client, fed.Upload(mean={"delta": delta, "counts": counts})

    def step_server(self, server, aggregate, round):
        new_state = super().step_server(server, aggregate, round)
        return {"w": new_state["w"] + self.noise(new_state["w"], round)} if self.place == "server" else new_state


def run(algorithm, **options):
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(), algorithm, **{"rounds": 2, **options})


@pytest.mark.parametrize(
    ("place", "executor", "words"),
    [
        ("step", "sequential", "the Step of local_step has numbers in the padding of 'q'"),
        ("upload", "vmap", "the Upload of finish has numbers in the padding of 'delta'"),
        ("server", "sequential", "the state that step_server returns has numbers in the padding of 'w'"),
    ],
)
def test_noise_in_the_padding_is_refused(place, executor, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(Noisy(place), executor=executor, run_dir=tmp_path / "run")
    assert (tmp_path / "run").exists() == (place != "step")  # constants are checked before files are written
    assert len(run(Noisy(place, by_parameter=True), executor=executor).history) == 2


# --- An own algorithm whose results depend on who else is in the block is found in round 1.


class Mixing(fed.Algorithm):
    """FedAvg with one thing that is not a client's own, given by name."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def init_client(self, server: Any) -> Any:
        return {"c": torch.zeros_like(server["w"])}

    def local_step(self, server: Any, client: Any, round: Any) -> fed.Step:
        if self.mode == "local_step":
            noise = 0.1 / len(client["c"]) * torch.ones_like(client["c"])
            return fed.Step(q=noise * (server["w"] != 0))
        if self.mode == "number":
            return fed.SAM(rho=torch.full((len(client["c"]), 1), 0.1 / len(client["c"])))
        return fed.Step()

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        delta = results.delta
        if self.mode == "finish":
            delta = delta / delta.norm()
        if self.mode == "noise":
            delta = delta + torch.randn_like(delta) * (delta != 0)
        if self.mode == "rows":
            delta = delta / delta.norm(dim=1, keepdim=True)
        return {"c": delta}, fed.Upload(mean={"delta": delta})


def train_model(mode: str, **attributes: Any) -> fed.Result:
    clients = oracle.ragged_clients(torch.float32, (8, 8, 8))
    model, algorithm = oracle.smooth_model(torch.float32), Mixing(mode)
    vars(algorithm).update(attributes)
    return fed.run(model, clients, algorithm, rounds=2, participation=1.0, executor="vmap")


@pytest.mark.parametrize(
    ("mode", "method", "n"),
    [("local_step", "local_step", 2), ("number", "local_step", 2), ("finish", "finish", 3), ("noise", "finish", 3)],
)
def test_rows_that_are_mixed(mode: str, method: str, n: int) -> None:
    with pytest.raises(fed.AlgorithmError, match=f"Mixing.{method} returns different numbers for {n} clients together"):
        train_model(mode)


def test_rows_that_are_not_mixed() -> None:
    assert len(train_model("rows").history) == 2


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_weights_of_each_client_are_not_mixed(kind: Any) -> None:
    class Weighted(fed.FedAvg):
        sends_weights = True

        def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
            weight = kind([float(i + 1) for i in results.client_ids])
            return client, fed.Upload(mean={"delta": results.delta}, weight=weight)

    clients = oracle.ragged_clients(torch.float32, (8, 8, 8))
    model = oracle.smooth_model(torch.float32)
    assert len(fed.run(model, clients, Weighted(), rounds=2, participation=1.0, executor="vmap").history) == 2


def test_an_algorithm_that_cannot_be_copied_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fastsam.fed"):
        train_model("finish", lock=threading.Lock())
    for method in ("local_step", "finish"):
        assert f"Mixing cannot be copied: rows of its {method} are not compared (cannot pickle" in caplog.text
