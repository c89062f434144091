"""Local steps by row programs: one native call for all clients whose passes have a program, whatever their numbers of
samples. The bits equal the bits of single steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam import ops
from fastsam.fed.clients.plan import Work, indices_of
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.client_block import ClientBlock, RowEnds
from fastsam.fed.executors.replay import Replays
from fastsam.fed.executors.rowprograms.row_pass import RowPass
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import shift_of

_RULES_ON_CUDA = ("sgd", "adam")  # AdamW has the rule "adam"; the CPU has all rules

Passes = dict[int, RowPass]  # by the number of samples of a batch
Span = tuple[ClientBlock, int]  # a block and its number of next steps


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
        self.exist = replays.make_row_pass is not None
        self.can_serve = self.exist and rule is not None and (is_cpu or rule.name in _RULES_ON_CUDA)
        self._is_native = None if self.store is None else _are_native(*self.store.tensors)
        self._known: Passes = {}  # row programs for samples of the store, which are all alike

    def train(self, blocks: Sequence[ClientBlock]) -> list[ClientBlock]:
        """Take the next steps of each block for whose batches there are row programs. Return the other blocks.

        The error of a client that fails is kept in its block.
        """
        passes = self._passes(blocks) if self.can_serve else {}
        if not passes:
            return list(blocks)
        groups: dict[object, list[Span]] = {}  # equal keys, samples in one memory, all at an epoch's start or none
        others: list[ClientBlock] = []
        for block in blocks:
            count = self._count(block, passes)
            if count:
                key = (block.key, block.k % block.epoch == 0) if self.store is not None else id(block)
                groups.setdefault(key, []).append((block, count))
            else:
                others.append(block)
        for group in groups.values():
            self._train(group, passes)
        return others

    def _passes(self, blocks: Sequence[ClientBlock]) -> Passes:
        """Return the row programs for the batches of some blocks."""
        sizes = {size for block in blocks for size in (block.sizes[0], block.sizes[-1])}
        known = self._known if self.store is not None and self.replays.reason is None else {}
        for size in sizes - known.keys():
            row_pass = self.replays.row_pass(size, *blocks[0].samples)
            if row_pass is not None:
                known[size] = row_pass
        return {size: known[size] for size in sizes & known.keys()}

    def _count(self, block: ClientBlock, passes: Passes) -> int:
        """Return how many of the block's next steps can be taken natively.

        They consist of `norm_`, `perturb_`, `update_norm_` and `update_`, on samples that can be gathered natively, and
        no row is copied before a step.
        """
        is_native = _are_native(*block.samples) if self._is_native is None else self._is_native
        if not is_native or block.gatherer is None or not block.key.is_native:
            return 0
        if any(task.snapshots for task in block.tasks):
            return 0
        count = block.steps_of_sizes(passes)
        return count if self.store is not None else min(count, block.epoch - block.k % block.epoch)

    def _train(self, group: Sequence[Span], passes: Passes) -> None:
        """Take the steps of a group in one call."""
        blocks, device, key = [block for block, _ in group], self.setup.device, group[0][0].key
        x, y, indices, work = self._samples(group)
        rows, perturbs = self.rows, key.passes == 2
        rows.select(key)
        if key.has_rate:
            for block in blocks:
                rows.part(block.slot, block.end).set_rates(block.rates)
        failures = torch.empty(len(work), 3, dtype=torch.int64, device=device)
        results: tuple[Tensor, Tensor, Tensor] | None = None
        if all(block.k + count == block.steps for block, count in group):
            squares = torch.empty(len(work), dtype=torch.float64, device=device)
            results = rows["start"].expand_as(rows.z), rows.z.new_empty(len(work), rows.z.shape[1]), squares
        ops.row_steps_(
            [row_pass.program for row_pass in passes.values()], self.setup.options.batch_size, rows.leaves,
            [t for row_pass in passes.values() for t in row_pass.constants], x, y, to_device(indices, device),
            to_device(work, device), rows.z, rows.w, rows.layout.table, rows.hparams, rows.losses, failures,
            rule=rows.rule.name, state=rows.state, counts=rows.counts, q=rows["q"] if "q" in key.given else None,
            shift=shift_of(rows), sumsq=rows.sumsq if perturbs else None, sumsq_v=rows.sumsq_v,
            adaptive=bool(key.values.get("adaptive", False)), keeps_first=key.uses("b"), results=results,
        )  # fmt: skip
        if results is not None:
            _keep_ends(blocks, *results[1:])
        if device.type == "cpu":  # on CUDA a client that fails has numbers that are not finite, and nothing waits
            _keep_failures(blocks, failures)
        for block, count in group:
            block.k += count
            block.backward_passes += count * key.passes

    # --- the samples of the steps ---

    def _samples(self, group: Sequence[Span]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the memory of the samples of the blocks' next steps, their indices in it, and the work of the rows
        (see `ops.row_steps_`)."""
        x, y = group[0][0].samples
        if self.store is None:
            block, count = group[0]
            assert block.gatherer is not None
            (x, y), places = block.gatherer.sample_indices(block.k, count)
            return x, y, places.view(-1), _work([(block, count, places.shape[1])])
        first, _ = group[0]
        if first.k % first.epoch == 0 and not first.key.has_rate:
            return x, y, *self._whole_epochs(group)
        orders = [block.gatherer.orders(block.k, count) for block, count in group if block.gatherer is not None]
        parts = [(*span, order.shape[1]) for span, order in zip(group, orders, strict=True)]
        return x, y, torch.cat([order.reshape(-1) for order in orders]), _work(parts)

    def _whole_epochs(self, group: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Return the indices and the work of steps that begin with an epoch, all orders of an epoch drawn at once."""
        works, epochs, parts = list[Work](), list[range](), []
        for block, count in group:
            begun = range(block.k // block.epoch, -(-(block.k + count) // block.epoch))
            works += [task.work for task in block.tasks]
            epochs += [begun] * len(block.tasks)
            parts.append((block, count, sum(block.sizes) * len(begun)))
        return indices_of(works, epochs), _work(parts)


def _are_native(x: Tensor, *others: Tensor) -> bool:
    """Return True for samples that a native call gathers: x in float32, and one label."""
    is_labels = [y.dtype == torch.int64 and y.dim() == 1 for y in others]
    return x.dtype == torch.float32 and is_labels == [True]


def _work(parts: Sequence[tuple[ClientBlock, int, int]]) -> Tensor:
    """Return the work of rows: of each block, its number of steps and the number of a row's indices."""
    words, begin = array("q"), 0
    for block, count, length in parts:
        samples = min(length, sum(block.sizes))
        for place, slot in enumerate(range(block.slot, block.end)):
            words.extend((slot, begin, samples, 0 if place in block.failures else count))
            begin += length
    return torch.frombuffer(words, dtype=torch.int64).view(-1, 4)


def _keep_ends(blocks: Sequence[ClientBlock], deltas: Tensor, squares: Tensor) -> None:
    """Keep the deltas and squared norms of a call's rows in their blocks."""
    place = 0
    for block in blocks:
        block.ends = RowEnds(deltas, squares, place)
        place += len(block.tasks)


def _keep_failures(blocks: Sequence[ClientBlock], failures: Tensor) -> None:
    """Keep the errors of clients that failed in their blocks."""
    if not any(failures[:, 0].tolist()):  # for a few numbers quicker than `any` of a tensor
        return
    places = [(block, place) for block in blocks for place in range(len(block.tasks))]
    for (block, place), (kind, value, step) in zip(places, failures.tolist(), strict=True):
        if kind:
            task, text = block.tasks[place], f"{ops.FAILURES[kind]} {value} is out of bounds."
            error = ClientError.from_error([task.client], task.round, block.k + step, IndexError(text))
            block.failures[place] = error
