"""The rows of all lanes in one memory: the clients of neighbouring lanes begin together and end together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastsam.fed.clients.plan import places_of
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.task import Setup, step_of
from fastsam.fed.update.model_copy import buffer_displacement
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows


class LaneRows:
    """`slots` rows of one memory, with the orders of samples, the counters and the schedules that captured steps read.

    Its methods work on the caller's stream. Trainers in neighbouring rows have steps of one sort.

    Attributes:
        store: the samples of all clients, or None if captured steps cannot read them.
        indices: int64 `[slots, samples]`, the samples of the steps of each row in order, as indices of the store.
        counters: int64 `[slots, 2]`, the numbers of samples and of scheduled steps that each row has taken.
        schedule: float64 `[slots, steps]`, the learning rate of each step, or None if clients have unknown sizes.
        range: int64 `[samples]`, 0, 1, ...: the largest number of samples of a graph.
    """

    def __init__(self, setup: Setup, slots: int, samples_at_once: int) -> None:
        self.rows, clients, options = Rows(setup, slots, copies=True), setup.population.clients, setup.options
        # `sequential` reads batches of trees one by one, and a part of a longer gather would begin elsewhere in memory.
        has_pairs = setup.population.augment is None and not clients.is_batched
        self.store = clients.store if has_pairs else None
        # Without shuffling `sequential` trains on views of the store, whose strides a gathered batch would not have.
        if self.store is not None and not options.shuffle:
            is_contiguous = self.store.x.is_contiguous() and self.store.y.is_contiguous()
            self.store = self.store if is_contiguous else None
        sizes = set(clients.sizes) if clients.has_all_sizes else {0}
        longest = max(map(options.samples_of, sizes)) if self.store is not None else 0
        self.indices = torch.zeros(slots, longest, dtype=torch.int64, device=setup.device)
        self.range = torch.arange(samples_at_once, device=setup.device)
        self.counters = torch.zeros(slots, 2, dtype=torch.int64, device=setup.device)
        self.schedule: Tensor | None = None
        if clients.has_all_sizes:
            shape = slots, max(map(options.steps_of, sizes))
            self.schedule = torch.zeros(shape, dtype=torch.float64, device=setup.device)

    def begin(self, slot: int, trainers: Sequence[ClientTrainer], w: Tensor, passes: Passes) -> None:
        """Begin the tasks of trainers in the rows from `slot` on, from the global model `w`. `passes` are theirs."""
        tasks, end = [trainer.task for trainer in trainers], slot + len(trainers)
        if trainers[0].replica.buffers:
            pairs = [pair for t in trainers for pair in zip(t.replica.buffers, t.buffers, strict=True)]
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])
            for trainer in trainers:
                trainer.teachers.load_buffers(trainer.buffers)
        self.counters[slot:end].zero_()
        if self.store is not None:
            indices, begins = places_of([task.work for task in tasks], [0] * len(tasks))
            places = zip(begins, [trainer.num_samples for trainer in trainers], strict=True)
            _write(self.indices, slot, [indices[begin : begin + count] for begin, count in places])
        key = tasks[0].step.key
        if key.has_rate and self.schedule is not None:
            steps = [trainer.last + 1 for trainer in trainers]
            rates = [[task.lr_of_step(k, n) for k in range(n)] for task, n in zip(tasks, steps, strict=True)]
            _write(self.schedule, slot, [torch.tensor(row, dtype=torch.float64) for row in rates])
        step_of(tasks).begin(self.rows.part(slot, end), w, tasks[0].lr, passes)
        for i in range(slot, end):
            self.rows.part(i, i + 1).select(key)

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
            num_samples=[t.num_samples for t in trainers],
            buffers=torch.cat(buffers) if buffers else None,
            snapshots=[t.snapshots for t in trainers],
            start=torch.stack([t.start for t in trainers]) if has_start else None,
            **rows.results(first.step.state is not None),
        )


def _write(field: Tensor, slot: int, rows: Sequence[Tensor]) -> None:
    """Write tensors `[.]` of the host to the rows of a field from `slot` on, in one copy. Shorter ones end in zeros."""
    values = pad_sequence(list(rows), batch_first=True)
    field[slot : slot + len(rows), : values.shape[1]].copy_(to_device(values, field.device))
