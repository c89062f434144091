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
from fastsam.fed.update.model_copy import trainable
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import SAM, Step
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
    step: Step | None = None,
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
    tasks = tasks_of(setup, range(len(clients)), step or SAM(rho=0.05))
    return tasks, start, setup


def tasks_of(setup: Setup, clients: Sequence[int], step: Step) -> list[Task]:
    """Return the tasks of clients in round 0, planned together."""
    works = plan(setup.population, setup.options, 0, clients, len(clients))
    return [Task(i, work, setup, 0, 0.1, step) for i, work in zip(clients, works, strict=True)]


def ends_of(groups: Iterable[ClientResults]) -> list[ClientResults]:
    """Return the results client by client."""
    return [group.take([i]) for group in groups for i in range(len(group.client_ids))]
