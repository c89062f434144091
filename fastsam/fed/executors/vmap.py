"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels
over the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors import epoch_graphs, stacked
from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.batch_gatherer import gather_keys
from fastsam.fed.executors.client_block import (
    ClientBlock,
    Schedules,
    WeightedBatch,
    block_of,
    client_error,
    next_batch,
    places_of_results,
    results_of,
    rows_to_keep,
    runs,
    slots_of,
)
from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.local_rows import KeptRow, LocalRows
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import NoRandomness
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.slow_calls import SlowCalls
from fastsam.fed.executors.stacked_rows import StackedRows
from fastsam.fed.executors.task import Setup, Task, vectors_of
from fastsam.fed.update.local_update import ClientResults
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.pilot import Pilot

_SLOT = attrgetter("slot")


class Vmap(Executor):
    """`slots` rows in lock step. Rows whose batches have one shape run together, a partial batch at its exact shape; a
    finished row is refilled. Agrees with the plain executor to rounding; the same number of slots gives the same bits.

    `_tick` takes the steps. Row programs are the first choice: they take all steps of all blocks in one native call.
    Else a captured graph runs a block's epoch. Else recorded passes take one step of all
    blocks with one shape.

    Raises:
        ValueError: the model cannot be mapped; the message has the reason.
    """

    name = "vmap"
    longest_first = stacks = True

    def __init__(self, setup: Setup) -> None:
        reason = stacked.why_not(setup)
        if reason is not None:
            raise ValueError(f"executor 'vmap' cannot serve here: {reason}. Use executor='auto' or 'sequential'")
        self.setup, self.layout = setup, setup.layout
        self.slots = setup.options.slots or stacked.slots_of(setup)
        self.numbers = f"vmap, {self.slots} slots"
        with name_slots(self.slots):
            self.rows = StackedRows(setup, self.slots)
        self.replica = Replica(setup.model, setup.layout, self.rows.memory.field("z")[0])
        self.passes = stacked.StackedPasses(self.replica, setup.layout, setup, SlowCalls())
        self.row_steps = RowSteps(setup, self.passes.replays, self.rows)
        self.random = NoRandomness(setup.device)
        # A capture that fails is the end of a run.
        self.epochs = None if setup.options.on_client_error == "exclude" else epoch_graphs.epoch_graphs_of(setup)
        self._schedules = Schedules()
        self.replica.module.train()

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[ClientOutcome]:
        """See `Executor.train`."""
        for buffer, new in zip(self.replica.buffers, buffers, strict=True):
            buffer.copy_(new)
        self.start, self.buffers = start, buffers
        active: list[ClientBlock] = []
        source, free = iter(tasks), list(range(self.slots))
        with self.random.preserve_states():
            while True:
                blocks = self._open(source, free) if free else []
                if blocks:
                    active = sorted([*active, *blocks], key=_SLOT)
                    free = free[sum(len(block.tasks) for block in blocks) :]
                if not active:
                    return
                self._tick([block for block in active if not block.is_finished])
                ready = [block for block in active if block.is_finished]
                if ready:
                    active = [block for block in active if not block.is_finished]
                    free = sorted([*free, *slots_of(ready)])
                    yield from {id(block.error): block.error for block in ready if block.error is not None}.values()
                    for block in ready:
                        yield from block.failures.values()
                    yield from self._close([block for block in ready if block.error is None])

    def release(self) -> None:
        """See `Executor.release`."""
        if self.epochs is not None:
            self.epochs.release()

    # --- the beginning and the end of clients ---

    def _open(self, tasks: Iterator[Task], free: Sequence[int]) -> list[ClientBlock]:
        """Put tasks into the free slots, until there are no more tasks or slots."""
        new = list(islice(tasks, len(free)))
        result: list[ClientBlock] = []
        updates = {id(task.update): task.update for task in new}
        sorts = {key: (update.constants.variant, update.pilot) for key, update in updates.items()}
        for part in runs([(free[i] - i, sorts[id(task.update)]) for i, task in enumerate(new)]):
            group, slots, (variant, pilot) = new[part], free[part], sorts[id(new[part.start].update)]
            blocks = [
                block_of(group[members], slots[members.start], variant, self._schedules)
                for members in runs(gather_keys(group))
            ]
            rows = self.rows.begin(blocks, self.start)
            if variant.has_first_gradient:
                self._first_gradients(blocks, rows, pilot)
            if variant.constant and (e := vectors_of(group, "direction_vector")) is not None:
                rows.start_shifted(e)
            result += blocks
        return result

    def _first_gradients(self, blocks: list[ClientBlock], rows: LocalRows, pilot: Pilot | None) -> None:
        """Compute each client's mean gradient at the start, over all its samples or a pilot's batches, in evaluation
        mode. With a pilot set the radii that it computes from them."""
        rows.clear_first()
        self._add_batches(blocks)
        if pilot is not None:
            rows.set_radius(pilot)

    def _add_batches(self, blocks: list[ClientBlock]) -> None:
        """Add the gradients at the start of clients, in groups of batches of one shape."""
        queue = [(block, block.at_start()) for block in blocks]
        self.replica.module.eval()
        try:
            while queue:
                heads = [(block, batches, self._next(block, batches)) for block, batches in queue]
                queue = [(block, batches) for block, batches, batch in heads if batch is not None]
                ready = sorted(((c, b) for c, _, b in heads if b is not None), key=_shapes_of)
                for _, group in groupby(ready, key=_shapes_of):
                    pairs = list(group)
                    try:
                        self._add_gradients(pairs)
                    except ClientError as error:
                        self._leave_out([block for block, _ in pairs], error)
                queue = [pair for pair in queue if pair[0].error is None]
        finally:
            self.replica.module.train()

    def _next(self, block: ClientBlock, batches: Iterator[WeightedBatch]) -> WeightedBatch | None:
        """Return the next batch, or None after the last one, and for a block that is excluded for its error."""
        try:
            return next(batches, None)
        except ClientError as error:
            self._leave_out([block], error)
            return None

    def _add_gradients(self, pairs: list[tuple[ClientBlock, WeightedBatch]]) -> None:
        blocks = [block for block, _ in pairs]
        batch = tuple(map(torch.cat, zip(*(tensors for _, (tensors, _) in pairs), strict=True)))
        _, gradients = self._pass(blocks, self.rows.gather(blocks), batch)
        row = 0
        for block, (_, shares) in pairs:
            block.extra_backward_passes += 1
            rows, end = self.rows.neighbours([block]), row + len(block.tasks)
            if len(set(shares)) == 1:
                rows.add_first(gradients.of_rows(slice(row, end)), shares[0])
            else:
                for i, share in enumerate(shares):
                    rows.add_first(gradients.of_rows(slice(row + i, row + i + 1)), share, slice(i, i + 1))
            row = end

    def _close(self, blocks: list[ClientBlock]) -> Iterator[ClientResults]:
        """Yield the results of finished clients, in groups with the same fields."""
        groups: dict[object, list[ClientBlock]] = {}
        for block in blocks:
            groups.setdefault(block.variant, []).append(block)
        for group in groups.values():
            results = results_of(group, self.rows.gather(group), self.start, self.buffers)
            if good := places_of_results(group):
                yield results if len(good) == len(results.client_ids) else results.take(good)

    # --- steps ---

    def _tick(self, blocks: list[ClientBlock]) -> None:
        """Take one local step of every client, or more if row programs or a graph take them."""
        groups: dict[object, list[ClientBlock]] = {}  # blocks whose next batches have one shape
        for block in self._train_by_rows(blocks):
            groups.setdefault(block.shape_number, []).append(block)
        for group in groups.values():
            try:
                if not self._train_by_graph(group):
                    self._step(group)
            except ClientError as error:
                self._leave_out(group, error)

    def _leave_out(self, blocks: list[ClientBlock], error: ClientError) -> None:
        """Exclude the blocks whose clients have this error. Raises the error if clients are not excluded."""
        if not excludes(self.setup, error):
            raise error
        for block in blocks:
            if not set(error.client_ids).isdisjoint(task.client for task in block.tasks):
                block.error = error

    def _train_by_graph(self, blocks: list[ClientBlock]) -> bool:
        """Take the next epoch of a block by a captured graph. Return False without a graph."""
        if self.epochs is None or len(blocks) > 1 or blocks[0].variant.has_schedule:
            return False
        rows, replays = self.rows.gather(blocks), self.passes.replays
        return self.epochs.train(
            blocks[0], rows, replays, lambda batch, is_last: self._local_step(blocks, rows, batch, is_last)
        )

    def _train_by_rows(self, blocks: list[ClientBlock]) -> list[ClientBlock]:
        """Take the next steps of the blocks that have row programs. Return the other blocks. Raises ClientError."""
        try:
            others = self.row_steps.train(blocks, self.start)
        except Exception as error:
            raise client_error(blocks, error) from error
        for block in blocks:
            for failure in block.failures.values():
                if not excludes(self.setup, failure):
                    raise failure
        return others

    def _step(self, blocks: list[ClientBlock]) -> None:
        """Take one step of clients whose batches have one shape."""
        batch = next_batch(blocks)
        rows, is_last = self.rows.gather(blocks), any(block.k + 1 == block.steps for block in blocks)
        self._local_step(blocks, rows, batch, is_last, rows_to_keep(blocks))
        self.rows.put_back(blocks, rows)
        for block in blocks:
            block.k += 1

    def _local_step(
        self,
        blocks: list[ClientBlock],
        rows: LocalRows,
        batch: Tensors,
        is_last: bool,
        kept: Sequence[KeptRow] = (),
    ) -> None:
        """Take a step of the blocks' rows on the device, and add up the losses.

        Args:
            blocks: the clients.
            rows: their rows.
            batch: tensors of a batch, each `[rows, batch, ...]`.
            is_last: it is the last step of some clients.
            kept: rows that are copied before the step.
        """
        losses = rows.step(lambda batch, _, is_second: self._pass(blocks, rows, batch), batch, None, kept, is_last)
        rows.losses.add_(losses.double() * batch[0].shape[1])

    def _pass(self, blocks: list[ClientBlock], rows: LocalRows, batch: Tensors) -> tuple[Tensor, Gradients]:
        try:
            return self.passes.run(rows, *batch)
        except Exception as error:
            raise client_error(blocks, error) from error


def _shapes_of(pair: tuple[ClientBlock, WeightedBatch]) -> list[tuple[int, ...]]:
    """Return the shapes of a batch without its clients."""
    return [tuple(t.shape[1:]) for t in pair[1][0]]
