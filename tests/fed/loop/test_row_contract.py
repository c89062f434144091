"""An own algorithm whose results depend on who else is in the block, or that changes itself, is found in round 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastsam import fed
from tests.helpers import oracle


class Mixing(fed.Algorithm):
    """FedAvg with one thing that is no client's own, given by name."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, [0]

    def init_client(self, server: Any) -> Any:
        return {"c": torch.zeros_like(server["w"])}

    def local_step(self, server: Any, client: Any, round: Any) -> fed.LocalStep:
        if self.how == "local_step":
            return fed.LocalStep(q=0.1 / len(client["c"]) * torch.ones_like(client["c"]) * (server["w"] != 0))
        return fed.LocalStep()

    def close_client(self, server: Any, client: Any, ends: Any, round: Any) -> Any:
        delta = ends.displacement
        if self.how == "close_client":
            delta = delta / delta.norm()
        if self.how == "noise":
            delta = delta + torch.randn_like(delta) * (delta != 0)
        if self.how == "memory":
            self.calls.append(1)
        if self.how == "rows":
            delta = delta / delta.norm(dim=1, keepdim=True)
        return {"c": delta}, fed.Upload(mean={"delta": delta})


def trained(how: str) -> fed.Result:
    clients = oracle.ragged_clients(torch.float32, (8, 8, 8))
    model = oracle.smooth_model(torch.float32)
    return fed.run(model, clients, Mixing(how), rounds=2, participation=1.0, executor="vmap")


@pytest.mark.parametrize(
    ("how", "method", "n"),
    [("local_step", "local_step", 2), ("close_client", "close_client", 3), ("noise", "close_client", 3)],
)
def test_rows_that_are_mixed(how: str, method: str, n: int) -> None:
    with pytest.raises(fed.AlgorithmError, match=f"Mixing.{method} returns other numbers for {n} clients together"):
        trained(how)


def test_rows_that_are_not_mixed(caplog: pytest.LogCaptureFixture) -> None:
    trained("rows")
    assert "changed attributes" not in caplog.text


def test_attributes_that_change(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and by the run's own calls only."""
    trained("memory")
    assert caplog.text.count("the first round changed attributes of Mixing (calls)") == 1
