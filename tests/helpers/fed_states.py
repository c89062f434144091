"""A small run and a stand-in for a GPU, for the tests of client states."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed.executors import streams
from fastsam.fed.loop import client_state, host_pool
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fed_ranks import SIZES

CPU = torch.device("cpu")


def train(algorithm: Any, **options: Any) -> fed.Result:
    keywords: dict[str, Any] = {
        "rounds": 6, "batch_size": 5, "participation": 0.5, "weighting": "samples", "executor": "sequential",
    } | options  # fmt: skip
    clients = oracle.ragged_clients(torch.float32, keywords.pop("sizes", SIZES))
    torch.manual_seed(0)
    return fed.run(oracle.smooth_model(torch.float32), clients, algorithm, test=clients[0], **keywords)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Present a device with separate memory of 1 MB to the store of client states and to the executors."""
    monkeypatch.setattr(client_state, "Cuda", FakeCuda)
    monkeypatch.setattr(client_state, "has_separate_memory", lambda device: True)
    monkeypatch.setattr(client_state, "total_memory", lambda device: 10**6)
    monkeypatch.setattr(host_pool, "make_pinned", ordinary)
    monkeypatch.setattr(streams, "Cuda", FakeCuda)
    monkeypatch.setattr(streams, "why_not", lambda setup: None)


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return ordinary memory in place of pinned memory, filled with an arbitrary number."""
    return torch.full(tuple(shape), 77, dtype=dtype)
