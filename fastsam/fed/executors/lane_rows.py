"""The rows of all lanes in one memory: the clients of neighbouring lanes begin together and end together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.task import Setup, Task, step_of
from fastsam.fed.update.model_copy import buffer_displacement
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows


class LaneRows:
    """`slots` rows of one memory, with the orders of samples, the counters and the schedules that captured steps read.

    Its methods work on the caller's stream. Trainers in neighbouring rows have steps of one sort.

    Attributes:
        indices: int64 `[slots, samples]`, the samples of the steps of each row in order, as indices of the store; or
            None if clients have no store that captured steps can read.
        counters: int64 `[slots, 2]`, the numbers of samples and of scheduled steps that each row has taken.
        schedule: float64 `[slots, steps, 2]`, learning rate and radius of each step, or None without schedules or if
            clients have unknown sizes.
        range: int64 `[samples]`, 0, 1, ...: the largest number of samples of a graph.
    """

    def __init__(self, setup: Setup, slots: int, samples_at_once: int) -> None:
        self.setup, self.rows = setup, Rows(setup, slots, copies=True)
        # `sequential` reads batches of trees one by one, and a part of a longer gather would begin elsewhere in memory.
        has_pairs = setup.population.augment is None and not setup.population.clients.is_batched
        self.store = setup.population.clients.store if has_pairs else None
        # Without shuffling `sequential` trains on views of the store, whose strides a gathered batch would not have.
        if self.store is not None and not setup.options.shuffle:
            is_contiguous = self.store.x.is_contiguous() and self.store.y.is_contiguous()
            self.store = self.store if is_contiguous else None
        self.counters = torch.zeros(slots, 2, dtype=torch.int64, device=setup.device)
        self.indices: Tensor | None = None
        self.range: Tensor | None = None
        self.schedule: Tensor | None = None
        if self.store is not None:
            longest = max(map(setup.options.samples_of, _sizes(setup)))
            self.indices = torch.zeros(slots, longest, dtype=torch.int64, device=setup.device)
            self.range = torch.arange(samples_at_once, device=setup.device)

    def begin(self, slot: int, trainers: Sequence[ClientTrainer], w: Tensor, passes: Passes) -> None:
        """Begin the tasks of trainers in the rows from `slot` on, from the global model `w`. `passes` are theirs."""
        tasks, end, first = [trainer.task for trainer in trainers], slot + len(trainers), trainers[0]
        if first.replica.buffers:
            pairs = [pair for t in trainers for pair in zip(t.replica.buffers, t.buffers, strict=True)]
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])
            for trainer in trainers:
                trainer.teachers.load_buffers(trainer.buffers)
        self.counters[slot:end].zero_()
        if self.store is not None:
            self._write_indices(slot, tasks)
        key = tasks[0].step.key
        if key.has_rate and self.setup.population.clients.has_all_sizes:
            self._write_schedule(slot, trainers)
        step_of(tasks).begin(self.rows.part(slot, end), w, tasks[0].lr, passes)
        for i in range(slot, end):
            self.rows.part(i, i + 1).select(key)

    def _write_indices(self, slot: int, tasks: Sequence[Task]) -> None:
        """Write the indices of the samples of tasks to the rows from `slot` on, in one copy."""
        assert self.indices is not None and self.store is not None
        counts = [sum(task.work.batch_sizes()) for task in tasks]
        indices = torch.zeros(len(tasks), max(counts), dtype=torch.int64)
        for row, task, count in zip(indices, tasks, counts, strict=True):
            orders = torch.cat([task.work.order(epoch) for epoch in task.work.epochs])
            row[:count] = orders[:count]
        target = self.indices[slot : slot + len(tasks), : max(counts)]
        target.copy_(to_device(indices, target.device))

    def _write_schedule(self, slot: int, trainers: Sequence[ClientTrainer]) -> None:
        """Write the learning rates of all steps to the rows from `slot` on, in one copy."""
        steps = [len(trainer.batch_sizes) for trainer in trainers]
        if self.schedule is None:
            shape = len(self.counters), max(map(self.setup.options.steps_of, _sizes(self.setup)))
            self.schedule = torch.zeros(shape, dtype=torch.float64, device=self.setup.device)
        numbers = torch.zeros(len(trainers), max(steps), dtype=torch.float64)
        for row, trainer, n in zip(numbers, trainers, steps, strict=True):
            row[:n] = torch.tensor([trainer.task.lr_of_step(k, n) for k in range(n)], dtype=torch.float64)
        target = self.schedule[slot : slot + len(trainers), : max(steps)]
        target.copy_(to_device(numbers, target.device))

    def results(self, slot: int, trainers: Sequence[ClientTrainer]) -> ClientResults:
        """Return the results of the clients in the rows from `slot` on."""
        first, rows = trainers[0], self.rows.part(slot, slot + len(trainers))
        rows.select(first.step.key)
        for trainer in trainers:
            trainer.check_model()
        buffers = [buffer_displacement(t.replica.buffers, t.buffers)[None] for t in trainers if t.replica.buffers]
        has_start = first.task.step.start is not None
        return ClientResults(
            client_ids=[t.task.client for t in trainers],
            num_steps=[t.k for t in trainers],
            backward_passes=[t.backward_passes for t in trainers],
            losses=rows.losses.clone(),
            num_samples=[sum(t.batch_sizes) for t in trainers],
            buffers=torch.cat(buffers) if buffers else None,
            snapshots=[t.snapshots for t in trainers],
            start=torch.stack([t.start for t in trainers]) if has_start else None,
            **rows.results(first.step.state is not None),
        )


def _sizes(setup: Setup) -> set[int]:
    """Return the numbers of samples that clients have."""
    return set(setup.population.clients.sizes)
