"""One row of the arena: a replica of the model and its buffers, in which one client after the other takes its local
steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.extra_models import SecondModel, Teachers
from fastsam.fed.executors.gradient_passes import Gradients, Objective, Passes
from fastsam.fed.executors.local_rows import LocalRows
from fastsam.fed.executors.randomness import PassRandomness
from fastsam.fed.executors.row_memory import RowMemory
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.executors.torch_updates import TorchRows
from fastsam.fed.update.local_update import ClientResults, LocalUpdate, Snapshot
from fastsam.fed.update.model_copy import Replica, buffer_displacement


class ClientErrors:
    """A context in which an error of the model or the loss becomes a ClientError with its place."""

    def __init__(self, row: ClientTrainer) -> None:
        self._row = row

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ClientError):
            task = self._row.task
            raise ClientError.from_error([task.client], task.round, self._row.k, error) from error


class ClientTrainer:
    """Two buffers: `z`, which the model's parameters view, and `w`, the unperturbed weights, for steps that perturb by
    a gradient.

    Perturbing writes `z = w + eps`, updating writes the new `w` into both: no pass only restores, no `eps` is stored,
    and nothing is rounded twice. Without such a perturbation `z` is the only buffer. A constant perturbation p is a
    shift of the whole round: the row starts at `w^t + p` and takes ordinary steps there. p is taken out of the terms
    that belong to `w`: it is folded into q where clipping allows, else passed as `shift`. Gradients are read where
    autograd left them; a parameter without a gradient in a pass is left out of the calls that use it. Nothing in a step
    waits for the device.

    Use: `open(task, ...)`, `next_step` for each of `batches` in the context `client_errors`, then `close()`. A loop of
    the algorithm uses a row through `fastsam.fed.executors.client.Client`.
    """

    task: Task
    snapshots: dict[int, Snapshot]
    batches: Iterator[tuple[Any, Any]]

    def __init__(self, setup: Setup, random: PassRandomness | None = None, rows: LocalRows | None = None) -> None:
        # An optimizer of torch makes the updates if the kernels do not have its rule.
        kind = TorchRows if setup.rule is None else LocalRows
        self.setup, self.rows = setup, kind(RowMemory(setup, 1), slice(0, 1)) if rows is None else rows
        self.z = self.rows.z
        self.replica = Replica(setup.model, setup.layout, self.z[0])
        if isinstance(self.rows, TorchRows):
            self.rows.parameters = self.replica.parameters
        self.passes = Passes(self.replica, setup.layout, setup.loss)
        self.random = PassRandomness(setup.device) if random is None else random
        self.client_errors = ClientErrors(self)
        self.penalty: Objective | None = None  # replaces the loss in the next steps (see `Client.step`)
        self.first_objective: Objective | None = None
        self.teachers = Teachers(setup, self.rows)
        self.second_model: SecondModel | None = None
        self._num_samples: int | None = None
        self.replica.module.train()

    # --- a client's round ---

    def open(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Begin a task from the weights `start` (`[row_size]`; its step may have its own) and the model's `buffers`."""
        self.set_task(task, start, buffers)
        for buffer, start_value in zip(self.replica.buffers, self.buffers, strict=True):
            buffer.copy_(start_value)
        self.rows.begin([task], self.start)
        self.begin_steps()

    def set_task(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Set the task, and compute its numbers on the host. See `open`."""
        start_vector = None if task.update.start is None else task.vector("start")
        self.task, self.start, self.buffers = (
            task,
            start if start_vector is None else start_vector,
            task.buffers(buffers),
        )
        self._global_weights = start
        if self.setup.writes_parameters and not task.update.constants.variant.serves_writes:
            raise ValueError(
                "a forward pass writes trained parameters in place, which this round's local update would lose. It has "
                "passes at perturbed weights, or before the first step. Compute the value in forward()"
            )
        self.k, self.extra_backward_passes, self.snapshots = 0, 0, {}
        if task.setup.population.clients.is_batched:
            with self.client_errors:
                task.work.open()
        self._measure(task)

    def begin_steps(self) -> None:
        """Compute what the first step needs, when weights, vectors and buffers are in place."""
        task = self.task
        self.random.begin(task)  # a model may draw in the passes of the first gradient too
        if self.rows.variant.has_first_gradient:
            self._first_gradient()
        if self.rows.variant.constant and (e := task.vector("direction_vector")) is not None:
            self.rows.start_shifted(e)
        self.batches = task.work.batches()

    def next_step(self, x: Any, y: Any, size: int) -> Tensor:
        """Take the next local step on a batch of `size` samples, and return the loss."""
        if self.rows.variant.has_schedule:
            self.set_schedule()
        loss = self.step(x, y)
        self.add_loss(loss, size)
        self.k += 1
        return loss

    def add_loss(self, loss: Tensor, size: int) -> None:
        """Add the loss of a batch of `size` samples to the client's sum, in float64 and in the order of the steps."""
        self.rows.losses.add_(loss, alpha=size)

    def close(self) -> ClientResults:
        """Return the results of the client in new memory."""
        return self.results(self.num_samples, self.backward_passes)

    @property
    def backward_passes(self) -> int:
        """Number of backward passes of the client, without passes that a loop of the algorithm makes."""
        return self.k * self.task.update.backward_passes + self.extra_backward_passes

    def results(
        self, num_samples: int, backward_passes: int, extra: Mapping[str, Tensor] | None = None
    ) -> ClientResults:
        """Return the results of the client, with these counts and the tensors of a loop."""
        self.check_model()
        buffers = self.replica.buffers
        return ClientResults(
            client_ids=(self.task.client,),
            num_steps=(self.k,),
            backward_passes=(backward_passes,),
            losses=self.rows.losses.clone(),
            num_samples=(num_samples,),
            buffers=buffer_displacement(buffers, self.buffers)[None] if buffers else None,
            snapshots=(self.snapshots,),
            start=None if self.start is self._global_weights else self.start[None],
            extra=extra or {},
            **self.rows.results(self.start),
        )

    def check_model(self) -> None:
        """Raise ClientError if a pass of the client has left the model in a state that the next client would see."""
        problem = self.replica.guard.find_problem(self.setup.options.buffers is None)
        if problem is not None:
            raise ClientError.from_model([self.task.client], self.task.round, self.k, problem)

    def begin_again(self, update: LocalUpdate, start: Tensor) -> None:
        """Begin with another model of the same client, from the weights `start` and the client's first buffers.

        Raises:
            ValueError: a vector of the step is not like the weights.
        """
        for name in update.constants.vectors:
            v = getattr(update, name)
            if v.dim() > 2 or v.shape[-1:] != start.shape or v.dtype != start.dtype or v.device != start.device:
                raise ValueError(
                    f"LocalUpdate.{name} must be {start.dtype} [{len(start)}] on {start.device} (like the server's w), "
                    f"got {v.dtype} {list(v.shape)} on {v.device}"
                )
        self.task, self.start = replace(self.task, update=update, snapshots=frozenset()), start
        self.k = 0
        for buffer, first in zip(self.replica.buffers, self.buffers, strict=True):
            buffer.copy_(first)
        self.rows.begin([self.task], start)

    # --- its beginning ---

    def _measure(self, task: Task) -> None:
        """Compute the number of steps, and of samples in each."""
        samples = task.work.samples
        if self._num_samples != samples:  # the other options are equal for all clients of a run
            self._num_samples, self.batch_sizes = samples, task.work.batch_sizes()
            self.last, self.num_samples = len(self.batch_sizes) - 1, sum(self.batch_sizes)

    def _first_gradient(self) -> None:
        """Compute the gradient at the start, over all samples or a pilot's batches, and set a pilot's radius."""
        task, pilot = self.task, self.task.update.pilot
        self.rows.clear_first()
        with self.client_errors, self.passes.evaluation():
            for x, y, share in task.batches_at_start():
                self.rows.add_first(self.passes.run(x, y)[1], share)
                self.extra_backward_passes += 1
        if pilot is not None:
            self.rows.set_radius(pilot)

    # --- a step ---

    def set_schedule(self) -> None:
        """Set the learning rate of the next step, for constants with a schedule."""
        self.rows.set_schedule([self.task.lr_of_step(min(self.k, self.last), self.last + 1)])

    def step(self, x: Any, y: Any) -> Tensor:
        """Take step `k` on a batch, and return the loss. Copy the row if a stage reads it."""
        kept = [(0, self.snapshots, self.k)] if self.k in self.task.snapshots else ()
        # A captured step must do the same in every replay, and a loop may end after any step.
        writes_eps = self.k == self.last or self.rows.copies or self.task.loop is not None
        return self.rows.step(self._pass, x, y, kept, writes_eps)

    def _pass(self, x: Any, y: Any, is_second: bool) -> tuple[Tensor, Gradients]:
        """Run a pass of a step. Only the pass at the unperturbed weights changes the model: BatchNorm statistics, and
        weights that a forward pass writes in place. A write at perturbed weights is restored with the weights."""
        result = self.pass_without_buffers(x, y) if is_second else self.run_pass(x, y, self.first_objective)
        if self.setup.writes_parameters and self.rows.w is not None:
            source, target = (self.rows.w, self.z) if is_second else (self.z, self.rows.w)
            target.copy_(source)
        return result

    def run_pass(self, x: Any, y: Any, objective: Objective | None = None) -> tuple[Tensor, Gradients]:
        """Run a forward and backward pass of step `k`: of the loss, or of `objective` if it is given."""
        if self.random.draws:
            self.random.seed_pass(self.task, self.k)
        if self.penalty is None and objective is None:
            return self.passes.run(x, y)
        return self.passes.run_objective(x, y, self.penalty, objective)

    def pass_without_buffers(self, x: Any, y: Any) -> tuple[Tensor, Gradients]:
        """Run a pass after which the buffers have their values again."""
        if not self.replica.buffers:
            return self.run_pass(x, y)
        copies = self.replica.copy_of_buffers()
        result = self.run_pass(x, y)
        for buffer, value in zip(self.replica.buffers, copies, strict=True):
            buffer.copy_(value)
        return result
