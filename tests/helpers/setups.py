"""The facts of a run for executors that tests make themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.packed_samples import pack_samples
from fastsam.fed.clients.plan import plan
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors import LocalOptions, Setup, Task
from fastsam.fed.update.local_update import ClientResults, Direction, LocalUpdate
from fastsam.fed.update.model_copy import trainable
from tests.helpers import oracle


def setup_of(
    model: nn.Module | None = None,
    clients: Sequence[Tensors] = (),
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


def oracle_tasks(
    sizes: Sequence[int] = (12, 3, 7, 9),
    batch: int = 5,
    update: LocalUpdate | None = None,
    loss: Any = nn.functional.cross_entropy,
    model: nn.Module | None = None,
    facts: Mapping[str, Any] = {},
    **options: Any,
) -> tuple[list[Task], Tensor, Setup]:
    """Return a task for each client of the oracle, with a store, the weights at the start, and the facts of the run."""
    clients = oracle.ragged_clients(torch.float32, sizes)
    model = oracle.smooth_model(torch.float32) if model is None else model
    layout = Layout.from_tensors(list(model.parameters()))
    start = torch.zeros(layout.row_size)
    layout.gather([p.detach() for p in model.parameters()], start)
    keywords = {"momentum": 0.5, "local_epochs": 2, "batch_size": batch, "seed": 100, "slots": 3} | options
    pairs, store = pack_samples(clients)
    setup = setup_of(model, pairs, LocalOptions(**keywords), loss=loss, **{"store": store, **facts})
    update = update or LocalUpdate(Direction.GRADIENT, rho=0.05)
    tasks = tasks_of(setup, range(len(clients)), update)
    return tasks, start, setup


def tasks_of(setup: Setup, clients: Sequence[int], update: LocalUpdate) -> list[Task]:
    """Return the tasks of clients in round 0, planned together."""
    works = plan(setup.population, setup.options, 0, clients, len(clients))
    return [Task(i, work, setup, 0, 0.1, update) for i, work in zip(clients, works, strict=True)]


def ends_of(groups: Iterable[ClientResults]) -> list[ClientResults]:
    """Return the results client by client."""
    return [group.take([i]) for group in groups for i in range(len(group.client_ids))]
