"""The facts of a run for executors that tests make themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastsam.arena import Layout
from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.population import Population
from fastsam.fed.executors import LocalOptions, Setup
from fastsam.fed.update.model_copy import trainable


def setup_of(
    model: nn.Module | None = None,
    clients: Sequence[Pair] = (),
    options: LocalOptions | None = None,
    *,
    device: str = "cpu",
    store: Any = None,
    loss: Any = nn.functional.cross_entropy,
    **facts: Any,
) -> Setup:
    """Return the facts of a run of `model` on `clients`."""
    model = nn.Linear(1, 1) if model is None else model
    population = Population(PairClients(clients, store), torch.device(device))
    facts = {"backend": "reference", **facts}
    return Setup(model, Layout.from_tensors(trainable(model)), loss, options or LocalOptions(), population, **facts)
