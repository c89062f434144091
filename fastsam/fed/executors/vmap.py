"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels
over the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors import epoch_graphs, rowprograms, stacked
from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.batch_gatherer import gather_keys
from fastsam.fed.executors.client_block import (
    ClientBlock,
    Group,
    Schedules,
    WeightedBatch,
    are_neighbours,
    block_of,
    client_error,
    next_batch,
    places_of_results,
    results_of,
    rows_to_keep,
    runs,
    slots_of,
    tasks_of,
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

_JOINT_NUMEL = 2**18  # largest number of elements of all rows in a joint step
_SHORT_ROW = 2**15  # elements of a row from which on torch's norm of one row differs from its norm of several
_SLOT = attrgetter("slot")


class Vmap(Executor):
    """`slots` rows in lock step. Rows whose batches have one shape run together, a partial batch at its exact shape; a
    finished row is refilled. Agrees with the plain executor to rounding; the same number of slots gives the same bits.

    `_tick` takes the steps. Row programs are the first choice: they take all steps of all blocks in one native call.
    Else a captured graph runs a block's epoch. Else blocks with one shape share a recorded pass. Short rows of all
    shapes share the rest of a step, which costs more calls than their passes.

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
        self.numbers = f"vmap, {self.slots} slots" + rowprograms.numbers(setup)
        with name_slots(self.slots):
            self.rows = StackedRows(setup, self.slots)
        self.replica = Replica(setup.model, setup.layout, self.rows.memory.field("z")[0])
        self.passes = stacked.StackedPasses(self.replica, setup.layout, setup, SlowCalls())
        self.row_steps = RowSteps(setup, self.passes.replays, self.rows)
        self.random = NoRandomness(setup.device)
        # A capture that fails is the end of a run.
        self.epochs = None if setup.options.on_client_error == "exclude" else epoch_graphs.epoch_graphs_of(setup)
        self._schedules = Schedules()
        is_cpu, length = setup.device.type == "cpu", setup.layout.row_size
        # Results of short rows come together if their slots get no new clients, because the sums cost a call each.
        self.holds_results = is_cpu and length < _SHORT_ROW and not self.row_steps.exist
        # A joint step cannot be repeated without the clients of one group.
        self.joins = is_cpu and length * self.slots <= _JOINT_NUMEL and setup.options.on_client_error != "exclude"
        self.replica.module.train()

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[ClientOutcome]:
        """See `Executor.train`."""
        for buffer, new in zip(self.replica.buffers, buffers, strict=True):
            buffer.copy_(new)
        self.start, self.buffers = start, buffers
        active: list[ClientBlock] = []
        source, free, has_tasks = iter(tasks), list(range(self.slots)), True
        with self.random.preserve_states():
            while True:
                if free and has_tasks:
                    blocks = self._open(source, free)
                    active = sorted([*active, *blocks], key=_SLOT)
                    free = free[sum(len(block.tasks) for block in blocks) :]
                    has_tasks = not free
                if not active:
                    return
                self._tick([block for block in active if not block.is_finished])
                ready = [block for block in active if block.is_finished]
                if ready and (has_tasks or not self.holds_results or len(ready) == len(active)):
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
                for members in runs(gather_keys([task.work for task in group]))
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
        """Yield the results of finished clients, in groups with the same fields. Raises ClientError if a pass has
        changed the model, which stacked clients share."""
        if blocks and (problem := self.replica.guard.find_problem(has_fixed_buffers=True)):
            raise self._model_error(blocks, problem)
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
        groups: dict[int, list[ClientBlock]] = {}  # by the shape of the next batch
        for block in self._train_by_rows(blocks):
            groups.setdefault(block.shape_number, []).append(block)
        for joint in self._joint_groups(list(groups.values())):
            try:
                if not self._train_by_graph(joint):
                    self._step(joint)
            except ClientError as error:
                self._leave_out([block for group in joint for block in group], error)

    def _joint_groups(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Return the groups that take a step together: their passes are separate, and the rest is done once.

        They are neighbours, and their passes have gradients of the same parameters. Their rows are short: gradients of
        long rows would take longer to move than the calls that are saved.
        """
        result, last_key = list[list[Group]](), None
        for group in groups:
            key = self._joint_key(group) if self.joins and len(groups) > 1 else None
            if key is not None and key == last_key and result[-1][-1][-1].end == group[0].slot:
                result[-1].append(group)
            else:
                result.append([group])
            last_key = key
        return result

    def _joint_key(self, group: Group) -> tuple[object, ...] | None:
        """Return what groups that take a step together have in common, or None for a group by itself."""
        block = group[0]
        if block.gatherer is None or not are_neighbours(group):
            return None
        size = block.sizes[block.k % block.epoch]
        slots = self.passes.replays.slots_of(size, group[-1].end - block.slot, *block.samples)
        return None if slots is None else (block.variant, slots)

    def _leave_out(self, blocks: list[ClientBlock], error: ClientError) -> None:
        """Exclude the blocks whose clients have this error. Raises the error if clients are not excluded."""
        if not excludes(self.setup, error):
            raise error
        for block in blocks:
            if not set(error.client_ids).isdisjoint(task.client for task in block.tasks):
                block.error = error

    def _train_by_graph(self, groups: Sequence[Group]) -> bool:
        """Take the next epoch of a block by a captured graph. Return False without a graph."""
        block = groups[0][0]
        if self.epochs is None or len(groups) > 1 or len(groups[0]) > 1 or block.variant.has_schedule:
            return False
        rows, replays = self.rows.gather([block]), self.passes.replays
        return self.epochs.train(
            block, rows, replays, lambda batch, is_last: self._local_step(groups, rows, [batch], is_last)
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

    def _step(self, groups: Sequence[Group]) -> None:
        """Take one step of the groups."""
        batches, blocks = [next_batch(group) for group in groups], [block for group in groups for block in group]
        rows, is_last = self.rows.gather(blocks), any(block.k + 1 == block.steps for block in blocks)
        self._local_step(groups, rows, batches, is_last, rows_to_keep(blocks))
        self.rows.put_back(blocks, rows)
        for block in blocks:
            block.k += 1

    def _local_step(
        self,
        groups: Sequence[Group],
        rows: LocalRows,
        batches: Sequence[Tensors],
        is_last: bool,
        kept: Sequence[KeptRow] = (),
    ) -> None:
        """Take a step of the groups' rows on the device, and add up the losses.

        Args:
            groups: the clients.
            rows: their rows.
            batches: for each group the tensors of a batch, each `[rows, batch, ...]`.
            is_last: it is the last step of some clients.
            kept: rows that are copied before the step.
        """
        losses = rows.step(
            lambda batches, _, is_second: self._passes(groups, rows, batches), batches, None, kept, is_last
        )
        sizes: int | Tensor = batches[0][0].shape[1]
        if len(batches) > 1:
            sizes = torch.tensor([batch[0].shape[1] for batch in batches for _ in batch[0]], dtype=torch.float64)
        rows.losses.add_(losses.double() * sizes)

    def _passes(self, groups: Sequence[Group], rows: LocalRows, batches: Sequence[Tensors]) -> tuple[Tensor, Gradients]:
        """Run a pass of each group, and return the losses and gradients of all rows."""
        if len(groups) == 1:
            return self._pass(groups[0], rows, batches[0])
        results = [
            self._pass(group, self.rows.neighbours(group), batch) for group, batch in zip(groups, batches, strict=True)
        ]
        losses, gradients = zip(*results, strict=True)
        return torch.cat(losses), Gradients.join(gradients, self.layout)

    def _pass(self, blocks: Group, rows: LocalRows, batch: Tensors) -> tuple[Tensor, Gradients]:
        try:
            return self.passes.run(rows, *batch)
        except Exception as error:
            problem = self.replica.guard.find_problem(has_fixed_buffers=True)
            raise (self._model_error(blocks, problem) if problem else client_error(blocks, error)) from error

    @staticmethod
    def _model_error(blocks: Sequence[ClientBlock], problem: str) -> ClientError:
        tasks = tasks_of(blocks)
        return ClientError.from_model([task.client for task in tasks], tasks[0].round, blocks[0].k, problem)


def _shapes_of(pair: tuple[ClientBlock, WeightedBatch]) -> list[tuple[int, ...]]:
    """Return the shapes of a batch without its clients."""
    return [tuple(t.shape[1:]) for t in pair[1][0]]
