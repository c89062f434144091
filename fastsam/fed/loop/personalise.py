"""Fine-tuning at the end of a run: every client trains the global model on, alone, and is evaluated before and
after."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastsam.fed.executors import ClientError, Task, Work
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.step.local_step import LocalStep
from fastsam.fed.step.model_copy import move_buffers

if TYPE_CHECKING:
    from fastsam.fed.loop.loop import Loop

Clients = Sequence[Mapping[str, Any]]


def check_personalise(epochs: int | None, algorithm: object, classifies: bool) -> None:
    """Raises ValueError where nobody's accuracy could be told."""
    if epochs is None:
        return
    if getattr(algorithm, "pools_data", False):
        raise ValueError(f"personalise={epochs} is for clients, and {type(algorithm).__name__} has none")
    if not classifies:
        raise ValueError(
            f"personalise={epochs} tells each client's accuracy before and after: it needs a test set, and a model "
            f"with one output per class"
        )


def personalise(loop: Loop, state: RunState, epochs: int) -> list[dict[str, Any]]:
    """What each client has of it, by client: `client`, its `samples`, its accuracy `before` and `after` on its own
    validation samples (None: it has none, or could not be trained). Collective: each rank trains a part of the clients.

    A client takes `epochs` of plain steps at the learning rate of the last round, with the run's momentum, weight decay
    and clipping. Its random numbers are those of the round that would come next. The global model stays as it is.
    """
    settings, population, evaluator, view, ranks = loop.settings, loop.population, loop.evaluator, loop.view, loop.ranks
    w, buffers, mine = state.server["w"], state.buffers, range(ranks.rank, len(population.sizes), ranks.size)
    lr = settings.lr_of(max(state.round - 1, 0))
    work = Work(
        state.round, lr, epochs, settings.batch_size, settings.shuffle, settings.seed, population.clients,
        population.sizes,
        population.augment, population.store, drop_last=settings.drop_last, samples=population.samples,
    )  # fmt: skip
    plain, personal = LocalStep(), loop.personal

    def begin(client: int) -> Tensor:
        return w if personal is None else personal.row(state.server, state.clients.get(client))

    def begin_buffers(client: int) -> list[Tensor]:
        return buffers if personal is None else personal.buffers(buffers, state.clients.get(client))

    def step(client: int) -> LocalStep:
        if personal is None:
            return plain
        return LocalStep(start=begin(client), buffers=[b[None] for b in begin_buffers(client)])

    found: dict[int, dict[str, float | None]] = {}
    for i in mine:
        view.load_(begin(i), begin_buffers(i))
        found[i] = {"before": evaluator.of_client(view.module, i), "after": None}
    tasks = (Task(i, work, step(i)) for i in mine)
    for ends in loop.chosen.executor.train(w, buffers, tasks):
        if isinstance(ends, ClientError):
            continue
        for place, client in enumerate(ends.clients):
            own = begin_buffers(client)
            if settings.buffers in ("average", "local") and ends.buffers is not None:
                own = move_buffers(own, ends.buffers[place])
            if ends.displacement[place].isfinite().all():
                view.load_(begin(client) + ends.displacement[place], own)
                found[client]["after"] = evaluator.of_client(view.module, client)
    everybody = {i: one for part in ranks.gather(found) for i, one in part.items()}
    return [{"client": i, "samples": population.sizes[i], **one} for i, one in sorted(everybody.items())]


def spread(clients: Clients) -> dict[str, float]:
    """Mean, standard deviation (the population's), smallest and largest of the accuracies before and after, over the
    clients that have both."""
    both = [one for one in clients if one["before"] is not None and one["after"] is not None]
    kinds: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean, "std": statistics.pstdev, "min": min, "max": max
    }  # fmt: skip
    return {
        f"{when}_{name}": float(kind([one[when] for one in both]))
        for when in ("before", "after")
        for name, kind in kinds.items()
        if both
    }
