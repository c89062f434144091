"""One row of the arena: a replica of the model and its buffers, in which one client after the other takes its local
steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.extra_models import SecondModel, Teachers
from fastsam.fed.executors.gradient_passes import Gradients, Objective, Passes
from fastsam.fed.executors.randomness import PassRandomness
from fastsam.fed.executors.row_state import RowSlice, RowState
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.executors.torch_updates import TorchUpdates
from fastsam.fed.update.local_update import ClientResults, Constants, Direction, LocalUpdate, Snapshot
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
    losses: list[Tensor]
    snapshots: dict[int, Snapshot]
    eps: Tensor | None
    gradient: Tensor | None
    norms: Tensor | None
    batches: Iterator[tuple[Any, Any]]

    def __init__(self, setup: Setup, random: PassRandomness | None = None) -> None:
        self.setup, self.rows = setup, RowState(setup, 1)
        # An optimizer of torch makes the updates if the run has one, else the kernels.
        self.updates = None if setup.options.optimizer is None else TorchUpdates(self.rows)
        self.row_slice = RowSlice(self.rows, slice(0, 1)) if self.updates is None else self.updates
        self.z = self.row_slice.z
        self.replica = Replica(setup.model, setup.layout, self.z[0])
        if self.updates is not None:
            self.updates.parameters = self.replica.parameters
        self.passes = Passes(self.replica, setup.layout, setup.loss)
        self.random = PassRandomness(setup.device) if random is None else random
        self.client_errors = ClientErrors(self)
        self.penalty: Objective | None = None  # replaces the loss in the next steps (see `Client.step`)
        self.first_objective: Objective | None = None
        self.teachers = Teachers(setup, self.row_slice)
        self.second_model: SecondModel | None = None
        self._last_numbers: tuple[float, ...] = ()
        self._last_constants: tuple[Constants | None, float] = None, 0.0
        self._kind = self.row_slice.variant
        self._step_of_variant: Callable[[int, Any, Any], Tensor] = self._plain_step  # see `_set_constants`
        self._num_samples: int | None = None
        self.replica.module.train()

    # --- a client's round ---

    def open(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Begin a task from the weights `start` (`[row_size]`; its step may have its own) and the model's `buffers`."""
        update = task.update
        start_vector, buffers = None if update.start is None else task.vector("start"), task.buffers(buffers)
        self.task = task
        self.start, self.buffers = start if start_vector is None else start_vector, buffers
        self._global_weights = start
        self.k, self.extra_backward_passes, self.losses, self.snapshots = 0, 0, [], {}
        self.eps = self.gradient = self.norms = None
        if task.setup.population.clients.is_batched:
            with self.client_errors:
                task.open()
        for buffer, start_value in zip(self.replica.buffers, buffers, strict=True):
            buffer.copy_(start_value)
        self._begin(update)
        self.random.begin(task.pass_seed(0))  # a model may draw in the passes of the first gradient too
        if update.constants.has_first_gradient:
            with self.client_errors:
                self._first_gradient()
            if update.pilot is not None:
                assert self.norms is not None and self.gradient is not None
                self.row_slice.set_radius(update.pilot, self.norms, self.gradient)
        if self.row_slice.variant.constant and (e := task.vector("direction_vector")) is not None:
            self.row_slice.start_shifted(e)
        self._measure(self.task)
        self.batches = task.batches()

    def next_step(self, x: Any, y: Any) -> None:
        """Take the next local step on a batch."""
        if self._kind.has_schedule:
            self.set_schedule()
        self.step(self.k, x, y)
        self.k += 1

    def close(self) -> ClientResults:
        """Return the results of the client in new memory."""
        backward_passes = self.k * self.task.update.backward_passes + self.extra_backward_passes
        return self.results(self.sum_of_losses(self.sizes), self.num_samples, backward_passes)

    def sum_of_losses(self, sizes: Tensor) -> Tensor:
        """Return the sum of the losses, each times its number of samples (float64), float64 `[1]`."""
        return (torch.stack(self.losses) * sizes).sum(0, keepdim=True)

    def results(
        self, losses: Tensor, num_samples: int, backward_passes: int, extra: Mapping[str, Tensor] | None = None
    ) -> ClientResults:
        """Return the results of the client, with these sums and tensors of a loop."""
        update, has_dual, buffers = self.task.update, self.task.update.dual is not None, self.replica.buffers
        return ClientResults(
            client_ids=(self.task.client,),
            delta=self.z - (self.row_slice.field("begin") if update.direction is Direction.CONSTANT else self.start),
            num_steps=(self.k,),
            backward_passes=(backward_passes,),
            losses=losses,
            num_samples=(num_samples,),
            buffers=buffer_displacement(buffers, self.buffers)[None] if buffers else None,
            dual=self.row_slice.field("dual").clone() if has_dual else None,
            eps=self.eps.clone() if has_dual and self.eps is not None else None,
            gradient=self.gradient,
            norms=self.norms,
            snapshots=(self.snapshots,),
            extra=extra or {},
            start=None if self.start is self._global_weights else self.start[None],
        )

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
        self.k, self.losses = 0, []
        for buffer, first in zip(self.replica.buffers, self.buffers, strict=True):
            buffer.copy_(first)
        self._begin(update)

    # --- its beginning ---

    def _begin(self, update: LocalUpdate) -> None:
        """Write the numbers of the step, and let its kernels read its vectors."""
        constants, lr = self._last_constants
        if constants is not update.constants or lr != self.task.lr or self._kind.rewrites:
            self._set_constants(update, self.task.lr)
        self.row_slice.set_variant(self._kind)
        self.row_slice.begin(self.start)
        if update.constants.vectors:
            self._read_vectors(update)

    def _read_vectors(self, update: LocalUpdate) -> None:
        """Put the vectors of the step where its kernels read them; vectors that are only read stay where they are."""
        row_slice = self.row_slice
        q, mu, s = (self.task.vector(name) for name in ("gradient_offset", "dual", "server_perturbation"))
        if q is not None:
            row_slice.q = q[None]
        if mu is not None and s is not None:
            row_slice.field("dual")[0].copy_(mu)
            row_slice.s = s[None]
        if row_slice.variant.vectors:
            row_slice.vectors = {
                name: v[None] for name in row_slice.variant.vectors if (v := self.task.vector(name)) is not None
            }

    def _set_constants(self, update: LocalUpdate, lr: float) -> None:
        """Write the hyperparameters of the constants, and choose the step of their variant."""
        numbers = self.rows.numbers(update, lr)
        if self._last_numbers != numbers:
            self.rows.hparams[0, 0] = to_device(torch.tensor(numbers, dtype=torch.float64), self.z.device)
        self._last_constants, self._kind = (update.constants, lr), update.constants.variant
        if self.updates is not None:
            self.updates.set_constants(update, lr)
        self._last_numbers = () if self._kind.rewrites else numbers
        if self._kind.two_passes:
            self._step_of_variant = self._sharp_step
        else:
            self._step_of_variant = self._path_step if self._kind.uses_path else self._plain_step

    def _measure(self, task: Task) -> None:
        """Compute the number of steps, and of samples in each."""
        if self._num_samples != task.samples:  # the other options are equal for all clients of a run
            self._num_samples, self.batch_sizes = task.samples, task.batch_sizes()
            self.last, self.num_samples = len(self.batch_sizes) - 1, sum(self.batch_sizes)
            self.sizes = to_device(torch.tensor(self.batch_sizes, dtype=torch.float64), self.z.device)

    def _first_gradient(self) -> None:
        """Compute the gradient at the start, over all samples or a pilot's batches."""
        task, pilot = self.task, self.task.update.pilot
        self.gradient = torch.zeros_like(self.z)
        if pilot is None:
            self.extra_backward_passes += self.passes.mean_gradient(task.full_batches(), self.gradient[0])
            return
        self.norms = torch.zeros(1, dtype=torch.float64, device=self.z.device)
        self.extra_backward_passes += self.passes.mean_gradient(task.first(pilot.batches), self.gradient[0], self.norms)

    # --- a step ---

    def set_schedule(self) -> None:
        """Set the learning rate and the radius of the next step, for constants with a schedule."""
        self.row_slice.set_schedule([self.task.lr_and_radius(min(self.k, self.last), self.last + 1)])

    def step(self, k: int, x: Any, y: Any) -> None:
        """Take step k on a batch: copy the row if a stage reads it, and note the loss."""
        if k in self.task.snapshots:
            self.snapshots[k] = self.row_slice.snapshot(0)
        self.losses.append(self._step_of_variant(k, x, y))

    def _plain_step(self, k: int, x: Any, y: Any) -> Tensor:
        loss, gradients = self.run_pass(k, x, y)
        self.row_slice.update(gradients, None)
        return loss

    def _path_step(self, k: int, x: Any, y: Any) -> Tensor:
        self.row_slice.perturb_along_path()
        if k in self.task.snapshots:
            self.snapshots[k] = self.snapshots[k].with_perturbation(self.z[0])
        return self._plain_step(k, x, y)

    def run_pass(self, k: int, x: Any, y: Any, objective: Objective | None = None) -> tuple[Tensor, Gradients]:
        """Run a forward and backward pass of the loss, or of `objective` if it is given."""
        if self.random.draws:
            self.random.seed(self.task.pass_seed(k))
        if self.penalty is None and objective is None:
            return self.passes.run(x, y)
        return self.passes.run_objective(x, y, self.penalty, objective)

    def pass_without_buffers(self, k: int, x: Any, y: Any) -> tuple[Tensor, Gradients]:
        """Run a pass after which the buffers have their values again."""
        if not self.replica.buffers:
            return self.run_pass(k, x, y)
        copies = self.replica.copy_of_buffers()
        result = self.run_pass(k, x, y)
        for buffer, value in zip(self.replica.buffers, copies, strict=True):
            buffer.copy_(value)
        return result

    def _sharp_step(self, k: int, x: Any, y: Any) -> Tensor:
        loss, first = self.run_pass(k, x, y, self.first_objective)
        if self.task.update.dual is not None and (k == self.last or self.task.loop is not None):
            self.eps = self.row_slice.field("eps").zero_()
        self.row_slice.perturb(first, self.eps)
        if k in self.task.snapshots:
            self.snapshots[k] = self.snapshots[k].with_perturbation(self.z[0])
        # BatchNorm statistics are updated only in passes at the unperturbed weights.
        _, second = self.pass_without_buffers(k, x, y)
        self.row_slice.update(second, first)
        return loss
