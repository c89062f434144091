"""Local steps by row programs: one native call for all clients whose passes have a program, whatever their numbers of
samples. The bits equal the bits of single steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam import ops
from fastsam.fed.clients.plan import places_of
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.record import Replays
from fastsam.fed.executors.rowprograms import RowPass
from fastsam.fed.executors.stacked_client import RowEnd, StackedClient
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Key, shift_of

_RULES_ON_CUDA = ("sgd", "adam")  # AdamW has the rule "adam"; the CPU has all rules

Passes = dict[int, RowPass]  # by the number of samples of a batch
Span = tuple[int, int, int]  # a number of next steps, and the numbers of samples before them and in one epoch of them
Group = dict[StackedClient, Span]


class RowSteps:
    """The local steps of stacked clients whose passes have row programs.

    Args:
        setup: facts of the run.
        replays: the recorded passes.
        rows: the rows of the clients.
    """

    def __init__(self, setup: Setup, replays: Replays, rows: Rows) -> None:
        self.setup, self.replays, self.rows = setup, replays, rows
        rule, self.store = setup.rule, setup.population.clients.store
        is_cpu = setup.device.type == "cpu"
        has_programs = replays.make_row_pass is not None
        self._can_serve = has_programs and rule is not None and (is_cpu or rule.name in _RULES_ON_CUDA)
        self._known: dict[tuple[torch.Size, ...], Passes] = {}  # row programs by the shapes of samples

    def train(self, clients: Sequence[StackedClient]) -> list[StackedClient]:
        """Take the next steps of each client for whose batches there are row programs. Return the other clients.

        A client that fails has its error.
        """
        alike: dict[tuple[torch.Size, ...], list[StackedClient]] = {}
        for client in filter(self._is_native, clients) if self._can_serve else ():
            alike.setdefault(client.shapes, []).append(client)
        served = {client for some in alike.values() for client in self._train_alike(some)}
        return [client for client in clients if client not in served]

    def serves(self, client: StackedClient) -> bool:
        """Return True if `train` takes the client's next step."""
        may_serve = self._can_serve and self._is_native(client)
        return may_serve and client.steps_of_sizes(self._passes([client])) > 0

    @staticmethod
    def _is_native(client: StackedClient) -> bool:
        """Return True if a step consists of `norm_`, `perturb_`, `update_norm_` and `update_`, and no row is copied
        before a step."""
        return client.key.is_native and client.batches is None and not client.task.snapshots

    def _train_alike(self, clients: Sequence[StackedClient]) -> list[StackedClient]:
        """Take the next steps of clients with samples of the same shapes, and return the clients that were served."""
        passes, spans = self._passes(clients), dict[tuple[object, ...], Span]()  # equal clients have equal spans
        groups: dict[Key | int, Group] = {}  # equal keys, and samples in one memory
        for client in clients if passes else ():
            sort = client.key, id(client.epoch), client.k, client.steps
            if sort not in spans:
                spans[sort] = _span(client, passes)
            if spans[sort][0]:
                key = client.key if self.store is not None else id(client)
                groups.setdefault(key, {})[client] = spans[sort]
        for group in groups.values():
            self._train(group, passes)
        return [client for group in groups.values() for client in group]

    def _passes(self, clients: Sequence[StackedClient]) -> Passes:
        """Return the row programs for the batches of clients with samples of the same shapes, which are gathered
        natively."""
        samples = clients[0].samples
        if self.replays.reason is not None or not _are_native(*samples):
            return {}
        known = self._known.setdefault(clients[0].shapes, {})
        sizes = {size for epoch in {c.epoch for c in clients} for size in (epoch[0], epoch[-1])}
        for size in sizes - known.keys():
            replay = self.replays.find(len(clients), size, *samples)
            if replay is not None and isinstance(replay.function, RowPass) and replay.function.has_all_gradients:
                known[size] = replay.function
        return {size: known[size] for size in sizes & known.keys()}

    def _train(self, group: Group, passes: Passes) -> None:
        """Take the steps of a group in one call."""
        clients, device = list(group), self.setup.device
        indices, begins = places_of([c.task.work for c in clients], [offset for _, offset, _ in group.values()])
        rows, key, work, (x, y) = self.rows, clients[0].key, _work(group, begins), clients[0].samples
        rows.select(key)
        if key.has_rate:
            rows.set_rates([client.rate for client in clients], to_device(work, device)[:, 0])
        failures = torch.empty(len(group), 3, dtype=torch.int64, device=device)
        results: tuple[Tensor, Tensor, Tensor] | None = None
        if all(client.k + count == client.steps for client, (count, *_) in group.items()):
            squares = torch.empty(len(group), dtype=torch.float64, device=device)
            results = rows["start"].expand_as(rows.z), rows.z.new_empty(len(group), rows.z.shape[1]), squares
        ops.row_steps_(
            [row_pass.program for row_pass in passes.values()], self.setup.options.batch_size, rows.leaves,
            [t for row_pass in passes.values() for t in row_pass.constants], x, y, to_device(indices, device),
            to_device(work, device), rows.z, rows.w, rows.layout.table, rows.hparams, rows.losses, failures,
            rule=rows.rule.name, state=rows.state, counts=rows.counts, q=rows["q"] if "q" in key.given else None,
            shift=shift_of(rows), sumsq=rows.sumsq if key.passes == 2 else None, sumsq_v=rows.sumsq_v,
            adaptive=bool(key.values.get("adaptive", False)), keeps_first=key.uses("b"), results=results,
        )  # fmt: skip
        if results is not None:
            for place, client in enumerate(clients):
                client.end = RowEnd(results[1], results[2], place)
        if device.type == "cpu":  # on CUDA a client that fails has numbers that are not finite, and nothing waits
            _keep_failures(clients, failures)
        passes_of_step = key.passes
        for client, (count, *_) in group.items():
            client.advance(count, passes_of_step)


def _are_native(x: Tensor, *others: Tensor) -> bool:
    """Return True for samples that a native call gathers: x in float32 or int64, and one label."""
    is_labels = [y.dtype == torch.int64 and y.dim() == 1 for y in others]
    return x.dtype in (torch.float32, torch.int64) and is_labels == [True]


def _span(client: StackedClient, passes: Passes) -> Span:
    """Return the span of next steps that one call can take: with one learning rate, and sizes that have passes."""
    count = client.steps_of_sizes(passes)
    count = min(1, count) if client.key.has_rate else count
    samples = client.offset_of(client.k + count) - client.offset
    return count, client.offset, min(samples, client.offset_of(len(client.epoch)))


def _work(group: Group, begins: Sequence[int]) -> Tensor:
    """Return the work of rows (see `ops.row_steps_`), whose next samples begin at `begins` of the indices."""
    words = array("q")
    for (client, (count, _, samples)), begin in zip(group.items(), begins, strict=True):
        words.extend((client.slot, begin, samples, count))
    return torch.frombuffer(words, dtype=torch.int64).view(-1, 4)


def _keep_failures(clients: Sequence[StackedClient], failures: Tensor) -> None:
    """Give the clients that failed their errors."""
    if not any(failures[:, 0].tolist()):  # for a few numbers quicker than `any` of a tensor
        return
    for client, (kind, value, step) in zip(clients, failures.tolist(), strict=True):
        if kind:
            task, text = client.task, f"{ops.FAILURES[kind]} {value} is out of bounds."
            client.error = ClientError.from_error([task.client], task.round, client.k + step, IndexError(text))
