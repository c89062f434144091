"""FedAvg and FedSAM of `fed.run` next to the fifty lines of plain torch in `fastsam.fed.plain`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed import plain
from tests.helpers import oracle
from tests.helpers.fed_runs import vector

OPTIONS: dict[str, Any] = {"rounds": 4, "local_epochs": 2, "batch_size": 5, "lr": 0.1, "seed": 3}


def train_both(rho: float, dtype: torch.dtype, executor: str = "sequential") -> tuple[Tensor, Tensor]:
    """Return the final weights of `fed.run` and of plain torch."""
    model, clients = oracle.smooth_model(dtype), oracle.ragged_clients(dtype)
    algorithm = fed.FedSAM(rho=rho) if rho else fed.FedAvg()
    actual = fed.run(model, clients, algorithm, executor=executor, participation=0.6, **OPTIONS).model
    expected = plain.train(model, clients, rho, cohort=3, **OPTIONS)
    assert oracle.movement(model, expected) > 0.1
    return vector(actual), vector(expected)


@pytest.mark.parametrize("rho", [0.0, 0.2], ids=["FedAvg", "FedSAM"])
def test_float64_agrees_to_rounding(rho: float) -> None:
    actual, expected = train_both(rho, torch.float64)
    assert float((actual - expected).abs().max()) < 1e-15


@pytest.mark.parametrize("rho", [0.0, 0.2], ids=["FedAvg", "FedSAM"])
def test_float32_agrees_bit_for_bit(rho: float) -> None:
    actual, expected = train_both(rho, torch.float32)
    assert float((actual - expected).abs().max()) < 1e-6
    if not torch.equal(actual, expected):
        pytest.skip("torch's matrix products depend on where the weights lie in memory on this processor")
