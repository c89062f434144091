"""One row of the arena: a replica of the model and its buffers, in which one client after the other takes its local
steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.extra_models import TEACHER_NEEDS, SecondModel, Teachers
from fastsam.fed.executors.gradient_passes import ModelPasses, Penalty
from fastsam.fed.executors.randomness import PassRandomness
from fastsam.fed.executors.task import Setup, Task, WeightedBatch
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica, buffer_displacement
from fastsam.fed.update.passes import ONLY_IN_BEGIN, ONLY_IN_STEP, Objective
from fastsam.fed.update.results import ClientResults, Snapshot
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Step
from fastsam.fed.update.torch_rows import TorchRows
from fastsam.fed.update.watched import take_step


class ClientErrors:
    """A context in which an error of the model or the loss becomes a ClientError with its place."""

    def __init__(self, row: ClientTrainer) -> None:
        self._row = row

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ClientError):
            task = self._row.task
            raise ClientError.from_error([task.client], task.round, self._row.k, error) from error


_WRITES = (
    "a forward pass writes trained parameters in place, and the step has passes at perturbed weights first, or before "
    "the first step, which would lose what is written. Compute the value in forward(), as "
    "torch.nn.utils.parametrizations do, or use FedAvg or FedSAM, say"
)


class ClientTrainer:
    """One client at a time in one row: the rows, the model whose parameters view them, and the passes of its steps
    (`Passes`). A step is `step(rows, trainer)`.

    Perturbing writes `z = w + eps`, updating writes the new `w` into both buffers: no pass only restores, no `eps` is
    stored, and nothing is rounded twice. A step that does not perturb has one buffer. Gradients are read where autograd
    left them; a parameter without a gradient in a pass is left out of the calls that use it. Nothing in a step waits
    for the device.

    Use: `open(task, ...)`, `run_step` and `note_loss` for each batch in the context `client_errors`, then `results()`.
    A loop of the algorithm uses a row through `fastsam.fed.executors.client.Client`.

    Attributes:
        batch_sizes: number of samples of each step of the task.
        k: number of steps taken.
        backward_passes: number of backward passes of the client.
        limit: largest number of batches in a pass over the data, before the first step or in a loop, None for all; for
            trials.
    """

    task: Task
    step: Step
    snapshots: dict[int, Snapshot]
    batches: Iterator[tuple[Any, Any]]

    def __init__(
        self,
        setup: Setup,
        random: PassRandomness | None = None,
        rows: Rows | None = None,
        limit: int | None = None,
    ) -> None:
        if rows is None:  # an optimizer of torch makes the updates if the kernels do not have its rule
            rows = TorchRows(setup) if setup.rule is None else Rows(setup)
        self.setup, self.rows, self.z = setup, rows, rows.z
        self.replica = Replica(setup.model, setup.layout, self.z[0])
        self.passes = ModelPasses(self.replica, setup.layout, setup.loss)
        self.random = PassRandomness(setup.device) if random is None else random
        self.client_errors = ClientErrors(self)
        self.penalty: Penalty | None = None  # is added to the loss in the next steps (see `Client.step`)
        self.teachers = Teachers(setup)
        self.second_model: SecondModel | None = None
        self.limit, self.backward_passes = limit, 0
        self._noted_losses: list[tuple[Tensor, int, int]] = []  # with their versions and numbers of samples
        self._batch: tuple[Any, Any] | None = None  # the batch of a step, None before and after it
        self._is_first_pass = True
        self.replica.module.train()

    # --- a client's round ---

    def open(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Begin a task from the weights `start` (`[row_size]`; its step may have its own) and the model's `buffers`."""
        self.set_task(task, start, buffers)
        self.random.begin(task)  # a model may draw in the passes before the first step too
        self.begin(task.own_step, start)
        self.batches = task.work.batches()

    def set_task(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Set the task, and compute its numbers on the host. See `open`."""
        self.task, self.start, self.buffers = task, task.start(start), task.buffers(buffers)
        self.step, self._global_weights = task.step, start
        self.k, self.backward_passes, self.snapshots, self._batch, self._noted_losses = 0, 0, {}, None, []
        self.teachers.clear()
        if task.setup.population.clients.is_batched:
            with self.client_errors:
                task.work.open()
        self.batch_sizes = task.work.batch_sizes()

    def begin(self, step: Step, w: Tensor) -> None:
        """Begin with a step at the weights `w`, which it may replace, and with the client's first buffers."""
        for buffer, first in zip(self.replica.buffers, self.buffers, strict=True):
            buffer.copy_(first)
        self.step, self.k, self._batch = step, 0, None
        step.begin(self.rows, w, self.task.lr, self)

    def run_step(self, x: Any, y: Any) -> Tensor:
        """Take the next local step on a batch, and return the losses `[1]`."""
        rows, step, k = self.rows, self.step, self.k
        if step.key.has_rate:
            self.set_rate()
        self._batch, self._is_first_pass = (x, y), True
        # A captured step must do the same in every replay, and a loop may end after any step.
        rows.may_end = k + 1 == len(self.batch_sizes) or rows.copies or self.task.loop is not None
        kept = [(0, self.snapshots, k)] if k in self.task.snapshots else []
        losses = take_step(step, rows, self, kept) if kept else step(rows, self)
        self.k, self._batch = k + 1, None  # the memory of the batch can be used again
        return losses

    def note_loss(self, losses: Tensor, size: int) -> None:
        """Note the loss of a batch of `size` samples. The results add up the losses in float64 and in the order of the
        steps: between two steps an addition takes three times as long."""
        self._noted_losses.append((losses, losses._version, size))

    def set_rate(self) -> None:
        """Set the learning rate of the next step, for steps that have their own."""
        steps = len(self.batch_sizes)
        self.rows.set_rates([self.task.lr * self.step.rate(min(self.k, steps - 1), steps)])

    def results(self, extra: Mapping[str, Tensor] | None = None) -> ClientResults:
        """Return the results of the client in new memory, with the tensors of a loop.

        Raises:
            ClientError: a pass has changed the model.
            ValueError: noted losses were written over.
        """
        self.check_model()
        for losses, version, size in self._noted_losses:
            if losses._version != version:
                raise ValueError(
                    f"{type(self.step).__name__} must return losses in new memory, and these were written over before "
                    "the client's last step; return losses.clone()"
                )
            self.rows.losses.add_(losses, alpha=size)
        buffers = self.replica.buffers
        return ClientResults(
            client_ids=(self.task.client,),
            num_steps=(self.k,),
            backward_passes=(self.backward_passes,),
            losses=self.rows.losses.clone(),
            num_samples=(sum(size for _, _, size in self._noted_losses),),
            buffers=buffer_displacement(buffers, self.buffers)[None] if buffers else None,
            snapshots=(self.snapshots,),
            start=None if self.start is self._global_weights else self.start[None],
            extra=extra or {},
            **self.rows.results(self.step.state is not None),
        )

    @property
    def vectors(self) -> int:
        """The number of vectors of the size of the weights in the client's training, one gradient included."""
        second = 0 if self.second_model is None else self.second_model.vectors
        return self.rows.vectors + 1 + len(self.teachers) + second

    def check_model(self) -> None:
        """Raise ClientError if a pass of the client has left the model in a state that the next client would see."""
        problem = self.replica.guard.find_problem(self.setup.options.buffers is None)
        if problem is not None:
            raise ClientError.from_model([self.task.client], self.task.round, self.k, problem)

    # --- passes (see `fastsam.fed.update.passes.Passes`) ---

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        """Run a pass of the present step. Only the first one changes the model: BatchNorm statistics, and weights that
        a forward pass writes in place. A write at perturbed weights is restored with the weights."""
        if self._batch is None:
            raise ValueError(ONLY_IN_STEP)
        is_first, writes = self._is_first_pass, self.setup.writes_parameters
        if writes and is_first and self.rows.is_moved:
            raise ValueError(_WRITES)
        self._is_first_pass = False
        run = self.run_pass if is_first else self.keep_buffers
        x, y = self._batch
        loss, gradients = run(x, y, objective, operands)
        if writes and self.rows.w is not None:
            source, target = (self.z, self.rows.w) if is_first else (self.rows.w, self.z)
            target.copy_(source)
        return loss[None], gradients

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """See `Passes.first`."""
        norms = torch.zeros(1, 1, dtype=torch.float64, device=self.z.device)
        return self._mean(self.task.first_batches(batches), norms), norms

    def all(self) -> Tensor:
        """See `Passes.all`."""
        return self._mean(self.task.all_batches())

    def _mean(self, batches: Iterable[WeightedBatch], norms: Tensor | None = None) -> Tensor:
        """Return the mean gradient `[1, row_size]` over batches, and add their norms to `norms`."""
        if self._batch is not None:
            raise ValueError(ONLY_IN_BEGIN)
        if self.setup.writes_parameters:
            raise ValueError(_WRITES)
        total = torch.zeros_like(self.z)
        with self.client_errors, self.passes.evaluation():
            for x, y, share in islice(batches, self.limit):
                _, gradients = self.passes.run(x, y)
                self.backward_passes += 1
                if share:  # a batch without a label has no gradient
                    gradients.add_to(total, self.rows.layout, share)
                    if norms is not None:
                        norms.add_(gradients.norms(1)[:, None], alpha=share)
        return total

    def outputs_of(self, w: Tensor) -> Tensor:
        """See `Passes.outputs_of`.

        Raises:
            ValueError: samples come in batches; or parameters stay with the clients, and `w` is not the client's start.
        """
        if self._batch is None:
            raise ValueError(ONLY_IN_STEP)
        self.passes.check_pairs()
        if self.random.draws:  # a teacher may draw in evaluation mode too
            self.random.seed_pass(self.task, self.k)
        if self.step.start is not None and w.data_ptr() != self.rows["start"].data_ptr():
            raise ValueError(TEACHER_NEEDS)
        get = self.teachers.over if self.rows.copies else partial(self.teachers.get, 0)
        with torch.no_grad():
            outputs: Tensor = get(w[0], self.buffers)(self._batch[0])
        return outputs[None]

    def run_pass(
        self,
        x: Any,
        y: Any,
        objective: Objective | None = None,
        operands: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Gradients]:
        """Run a forward and backward pass of step `k`: of the loss, or of `objective` if it is given."""
        self.backward_passes += 1
        if self.random.draws:
            self.random.seed_pass(self.task, self.k)
        return self.passes.run(x, y, objective, operands, self.penalty)

    def keep_buffers(
        self, x: Any, y: Any, objective: Objective | None = None, operands: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Gradients]:
        """Run a pass after which the buffers have their values again."""
        if not self.replica.buffers:
            return self.run_pass(x, y, objective, operands)
        copies = self.replica.copy_of_buffers()
        result = self.run_pass(x, y, objective, operands)
        for buffer, value in zip(self.replica.buffers, copies, strict=True):
            buffer.copy_(value)
        return result
