"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels
over the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    JointBatch,
    Schedules,
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
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import NoRandomness
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.slow_calls import SlowCalls
from fastsam.fed.executors.stacked_steps import StackedBeginning, StackedStep
from fastsam.fed.executors.task import Setup, Task, WeightedBatch, sort_of, step_of
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.passes import Objective
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.scratch_rows import ScratchRows
from fastsam.fed.update.steps import Key
from fastsam.fed.update.watched import KeptRow, take_step

NUMBERS = 2  # number of the changes of its bits: a run that began with other bits is not resumed
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
        self.numbers = f"vmap {NUMBERS}, {self.slots} slots" + rowprograms.numbers(setup)
        with name_slots(self.slots):
            self.rows = Rows(setup, self.slots, copies=True)
        self.scratch: ScratchRows | None = None
        self.seen: dict[Key, tuple[int, bool]] = {}  # numbers of passes of steps, and whether all are the loss's own
        self.replica = Replica(setup.model, setup.layout, self.rows.z[0])
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
        sorts = {id(step): sort_of(step) for step in {id(task.step): task.step for task in new}.values()}
        for part in runs([(free[i] - i, sorts[id(task.step)]) for i, task in enumerate(new)]):
            group, slots = new[part], free[part]
            blocks = [
                block_of(group[members], slots[members.start], self._schedules)
                for members in runs(gather_keys([task.work for task in group]))
            ]
            rows, passes = self._neighbours(blocks, selects=False), StackedBeginning(self, blocks)
            step_of(group).begin(rows, self.start, group[0].lr, passes)
            result += blocks
        return result

    def _neighbours(self, blocks: Sequence[ClientBlock], selects: bool = True) -> Rows:
        """Return neighbouring rows, ready for steps of the blocks' key."""
        rows = self.rows.part(blocks[0].slot, blocks[-1].end)
        if selects:
            rows.select(blocks[0].key)
        return rows

    def _gather(self, blocks: Sequence[ClientBlock]) -> Rows:
        """Return the blocks' rows next to each other, ready for a step: the rows themselves, or copies, which
        `_put_back` copies back."""
        if are_neighbours(blocks):
            return self._neighbours(blocks)
        if self.scratch is None:
            self.scratch = ScratchRows(self.rows, self.setup)
        return self.scratch.gather(slots_of(blocks), blocks[0].key)

    def _put_back(self, blocks: Sequence[ClientBlock], rows: Rows) -> None:
        """Copy the results of a step from copied rows to the rows."""
        if self.scratch is not None and rows.memory is not self.rows.memory:
            self.scratch.put_back(slots_of(blocks), rows)

    def mean_gradients(
        self,
        blocks: Sequence[ClientBlock],
        batches_of: Callable[[Task], Iterator[WeightedBatch]],
        norms: Tensor | None = None,
    ) -> Tensor:
        """Return each client's mean gradient over batches before its first step, `[clients, row_size]`, in evaluation
        mode, and add the norms of its gradients to `norms`. Batches of one shape share a pass."""
        rows = self.rows.part(blocks[0].slot, blocks[-1].end)
        total = torch.zeros_like(rows.z)
        queue = [(block, block.at_start(batches_of)) for block in blocks]
        self.replica.module.eval()
        try:
            while queue:
                heads = [(block, batches, self._next(block, batches)) for block, batches in queue]
                queue = [(block, batches) for block, batches, batch in heads if batch is not None]
                ready = sorted(((c, b) for c, _, b in heads if b is not None), key=_shapes_of)
                for _, group in groupby(ready, key=_shapes_of):
                    pairs = list(group)
                    try:
                        self._add_gradients(pairs, total, norms, blocks[0].slot)
                    except ClientError as error:
                        self._leave_out([block for block, _ in pairs], error)
                queue = [pair for pair in queue if pair[0].error is None]
        finally:
            self.replica.module.train()
        return total

    def _next(self, block: ClientBlock, batches: Iterator[JointBatch]) -> JointBatch | None:
        """Return the next batch, or None after the last one, and for a block that is excluded for its error."""
        try:
            return next(batches, None)
        except ClientError as error:
            self._leave_out([block], error)
            return None

    def _add_gradients(
        self, pairs: list[tuple[ClientBlock, JointBatch]], total: Tensor, norms: Tensor | None, slot: int
    ) -> None:
        """Add the gradients of a batch of some blocks to their rows of `total`, which begins at `slot`."""
        blocks = [block for block, _ in pairs]
        batch = tuple(map(torch.cat, zip(*(tensors for _, (tensors, _) in pairs), strict=True)))
        _, gradients = self._pass(blocks, self._gather(blocks), batch)
        row = 0
        for block, (_, shares) in pairs:
            block.backward_passes += 1
            for part, share in _parts(shares):
                place = slice(block.slot - slot + part.start, block.slot - slot + part.stop)
                if share:  # a batch without a label has no gradient
                    own = gradients.of_rows(slice(row + part.start, row + part.stop))
                    own.add_to(total[place], self.layout, share)
                    if norms is not None:
                        norms[place].add_(own.norms(part.stop - part.start)[:, None], alpha=share)
            row += len(shares)

    def _close(self, blocks: list[ClientBlock]) -> Iterator[ClientResults]:
        """Yield the results of finished clients, in groups with the same fields. Raises ClientError if a pass has
        changed the model, which stacked clients share."""
        if blocks and (problem := self.replica.guard.find_problem(has_fixed_buffers=True)):
            raise self._model_error(blocks, problem)
        groups: dict[object, list[ClientBlock]] = {}
        for block in blocks:
            groups.setdefault(sort_of(block.step), []).append(block)
        for group in groups.values():
            results = results_of(group, self._gather(group), self.buffers)
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
        # The outputs of a teacher on batches of several sizes are not one tensor.
        _, is_plain = self.seen.get(block.key, (0, False))
        if block.gatherer is None or not are_neighbours(group) or not is_plain:
            return None
        size = block.sizes[block.k % block.epoch]
        slots = self.passes.replays.slots_of(size, group[-1].end - block.slot, *block.samples)
        return None if slots is None else (block.key, slots)

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
        if self.epochs is None or len(groups) > 1 or len(groups[0]) > 1 or block.key.has_rate:
            return False
        passes, is_plain = self.seen.get(block.key, (0, True))  # a capture comes after steps that are seen
        if not is_plain:  # an objective runs through Python, which a capture might freeze
            return False
        rows, replays = self._neighbours([block]), self.passes.replays
        if not self.epochs.train(block, rows, replays, lambda batch: self._local_step(groups, rows, [batch])):
            return False
        block.backward_passes += block.epoch * passes
        return True

    def _train_by_rows(self, blocks: list[ClientBlock]) -> list[ClientBlock]:
        """Take the next steps of the blocks that have row programs. Return the other blocks. Raises ClientError."""
        try:
            others = self.row_steps.train(blocks)
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
        rows = self._gather(blocks)
        if blocks[0].key.has_rate:
            rows.set_rates([rate for block in blocks for rate in block.rates])
        rows.may_end = any(block.k + 1 == block.steps for block in blocks)
        passes = self._local_step(groups, rows, batches, rows_to_keep(blocks))
        rows.may_end = True
        self._put_back(blocks, rows)
        for block in blocks:
            block.k += 1
            block.backward_passes += passes

    def _local_step(
        self, groups: Sequence[Group], rows: Rows, batches: Sequence[Tensors], kept: Sequence[KeptRow] = ()
    ) -> int:
        """Take a step of the groups' rows on the device, and add up the losses.

        Args:
            groups: the clients.
            rows: their rows.
            batches: for each group the tensors of a batch, each `[rows, batch, ...]`.
            kept: rows that are copied before the step.

        Returns:
            the number of backward passes.
        """
        passes, step = StackedStep(self, groups, rows, batches), groups[0][0].step
        losses = take_step(step, rows, passes, kept) if kept else step(rows, passes)
        self.seen[step.key] = passes.count, passes.is_plain
        sizes: int | Tensor = batches[0][0].shape[1]
        if len(batches) > 1:
            sizes = torch.tensor([batch[0].shape[1] for batch in batches for _ in batch[0]], dtype=torch.float64)
        rows.losses.add_(losses.double() * sizes)
        return passes.count

    def run(
        self,
        groups: Sequence[Group],
        rows: Rows,
        batches: Sequence[Tensors],
        objective: Objective | None,
        *operands: Tensor,
    ) -> tuple[Tensor, Gradients]:
        """Run a pass of each group, and return the losses and gradients of all rows."""
        if len(groups) == 1:
            return self._pass(groups[0], rows, batches[0], objective, *operands)
        results, row = [], 0
        for group, batch in zip(groups, batches, strict=True):
            end = row + len(batch[0])
            parts = [t[row:end] for t in operands]
            results.append(self._pass(group, self._neighbours(group), batch, objective, *parts))
            row = end
        losses, gradients = zip(*results, strict=True)
        return torch.cat(losses), Gradients.join(gradients, self.layout)

    def _pass(
        self, blocks: Group, rows: Rows, batch: Tensors, objective: Objective | None = None, *operands: Tensor
    ) -> tuple[Tensor, Gradients]:
        try:
            if objective is not None:
                return self.passes.run_objective(rows, batch, objective, operands)
            return self.passes.run(rows, *batch)
        except Exception as error:
            problem = self.replica.guard.find_problem(has_fixed_buffers=True)
            raise (self._model_error(blocks, problem) if problem else client_error(blocks, error)) from error

    @staticmethod
    def _model_error(blocks: Sequence[ClientBlock], problem: str) -> ClientError:
        tasks = tasks_of(blocks)
        return ClientError.from_model([task.client for task in tasks], tasks[0].round, blocks[0].k, problem)


def _parts(shares: Sequence[float]) -> list[tuple[slice, float]]:
    """Return the parts of a block's clients with one share: all of them, or each client."""
    if len(set(shares)) == 1:
        return [(slice(0, len(shares)), shares[0])]
    return [(slice(i, i + 1), share) for i, share in enumerate(shares)]


def _shapes_of(pair: tuple[ClientBlock, JointBatch]) -> list[tuple[int, ...]]:
    """Return the shapes of a batch without its clients."""
    return [tuple(t.shape[1:]) for t in pair[1][0]]
