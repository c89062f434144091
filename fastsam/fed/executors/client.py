"""The client as `Algorithm.train_client` sees it: its data, its model in one row, and its local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.extra_models import TEACHER_NEEDS, SecondModel
from fastsam.fed.executors.gradient_passes import Penalty, check_scalar
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Shifted, Step
from fastsam_kernels.hparams import HParam

Batch = TypeVar("Batch", bound=tuple[Any, ...])


class StopClient(BaseException):
    """The executor has asked a client to end its local work, because the run ends."""


class Client:
    """One client in one round, for `Algorithm.train_client`.

    All vectors are rows `[row_size]` in the dtype of the weights. Tensors that are attributes are only read, except
    `gradient_offset`; `w` can be assigned. A loop does not write to the algorithm, because it may run twice.

    Attributes:
        id: id of the client.
        num_samples: number of its samples.
        model: module whose parameters view `w`, in training mode.
        start: weights at the start. `delta` is measured from there.
        backward_passes: number of backward passes so far. A loop that calls autograd itself adds its own.
    """

    def __init__(self, row: ClientTrainer, stop_requested: Callable[[], bool] | None = None) -> None:
        task = row.task
        if isinstance(task.step, Shifted):
            raise ValueError(
                "train_client does not serve fed.Shifted, whose perturbation lasts the whole round. Use a "
                "user-defined step, or client.w"
            )
        self._row, self._task, self._stop_requested = row, task, stop_requested
        self.id, self.num_samples, self.model = task.client, task.work.samples, row.replica.module
        self.has_phases = False  # the local work is more than one path of steps over the run's batches
        self._epochs = 0  # number of epochs begun
        self._batch_size, self._is_new_batch = 0, False
        self._first: Gradients | None = None  # gradients by which the weights are perturbed
        self._gradient_loss: tuple[Tensor, int] | None = None  # loss at the unperturbed weights, and samples
        self._results: ClientResults | None = None  # results of the first model, if `begin` was called

    @property
    def backward_passes(self) -> int:
        return self._row.backward_passes

    @backward_passes.setter
    def backward_passes(self, count: int) -> None:
        self._row.backward_passes = count

    # --- weights ---

    @property
    def start(self) -> Tensor:
        return self._row.start

    @property
    def w(self) -> Tensor:
        """The unperturbed weights, a view that changes with the steps."""
        w = self._row.rows.w
        return self._row.z[0] if w is None else w[0]

    @w.setter
    def w(self, weights: Tensor) -> None:
        self._row.z[0].copy_(weights)
        if self._row.rows.w is not None:
            self._row.rows.w[0].copy_(weights)

    @property
    def delta(self) -> Tensor:
        """Return `w - start` in new memory."""
        return self.w - self.start

    @property
    def gradient_offset(self) -> Tensor:
        """The client's own copy of `Step.q`. A loop may write into it.

        Raises:
            ValueError: `local_step` gave none.
        """
        if self._row.step.q is None:
            raise ValueError("there is no gradient_offset to change; return fed.Step(q=...) from local_step")
        return self._row.rows.own("q")[0]

    # --- data ---

    def batches(self, epochs: int | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield the batches (x, y) of the run's local work, or of a number of epochs.

        The epochs continue from call to call, each in a new order. Samples that are not pairs of tensors come
        as (batch, None).
        """
        work = self._task.work.more(self._epochs, epochs)
        self.has_phases |= self._epochs > 0 or epochs is not None
        self._epochs += len(work.epochs)
        for batch, size in zip(self._read(work.batches()), work.batch_sizes(), strict=False):
            self._batch_size, self._is_new_batch = size, True
            yield batch

    def full_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield all samples once in batches (x, y), in stored order."""
        work = self._task.work
        yield from self._read((x, y) for x, y, _ in work.full_batches(work.options.batch_size))

    def _read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches until the executor stops the loop. An error in reading is an error of the client."""
        with self._row.client_errors:
            for batch in islice(batches, self._row.limit):
                if self._stop_requested is not None and self._stop_requested():
                    raise StopClient
                yield batch

    # --- passes and steps ---

    def loss(self, x: Any, y: Any) -> Tensor:
        """Return the loss of the model as it is, for autograd."""
        row = self._row
        if row.random.draws:
            row.random.seed_pass(row.task, row.k)
        with row.client_errors:
            return row.passes.loss_of(x, y)

    def step(self, x: Any, y: Any, penalty: Penalty | None = None) -> Tensor:
        """Take one local step on a batch, and return the loss of the data.

        Args:
            x: inputs of the batch.
            y: labels of the batch.
            penalty: function of the model's outputs that is added to the loss in every pass.
        """
        row = self._row
        row.penalty = penalty
        if not self._is_new_batch:
            self.has_phases = True
        self._is_new_batch = False
        size = self._size_of(y)
        with row.client_errors:
            losses = row.run_step(x, y)
        row.note_loss(losses, size)
        self._gradient_loss = None
        return losses[0]

    def _size_of(self, y: Any) -> int:
        """Return the number of samples of a batch."""
        return len(y) if isinstance(y, Tensor) else self._batch_size

    def gradient(self, x: Any, y: Any, penalty: Penalty | None = None) -> Gradients:
        """Return the gradients at the present weights, where autograd left them.

        The model's buffers keep their values. The next `update` records the loss at the unperturbed weights.
        """
        row = self._row
        self.has_phases = True
        row.penalty = penalty
        with row.client_errors:
            loss, gradients = row.keep_buffers(x, y)
        if self._first is None:
            self._gradient_loss = loss.view(1), self._size_of(y)
        return gradients

    def vector(self, gradients: Gradients) -> Tensor:
        """Return gradients as a row in new memory, 0 for parameters without a gradient."""
        row = torch.zeros_like(self._row.z[0])
        for view, g in self._pairs(row, gradients):
            view.copy_(g)
        return row

    def dot(self, gradients: Gradients, vector: Tensor) -> Tensor:
        """Return the inner product of gradients and a row, a float64 scalar."""
        return torch.stack([(view.double() * g.double()).sum() for view, g in self._pairs(vector, gradients)]).sum()

    def _pairs(self, row: Tensor, gradients: Gradients) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each gradient with the view of its parameter in a row."""
        return zip(self._row.rows.views_like(gradients, row), gradients.tensors, strict=True)

    def perturb(self, gradients: Gradients, rho: float | None = None) -> None:
        """Move the weights to `w + eps` along the gradients. The next update starts from the unperturbed weights.

        Args:
            gradients: gradients at `w`.
            rho: radius, None for the step's.

        Raises:
            ValueError: `local_step` gave no step with two buffers.
        """
        rows, adaptive = self._row.rows, bool(getattr(self._row.step, "adaptive", False))
        if rows.w is None:
            raise ValueError("perturb() needs local_step to return fed.SAM(rho=...)")
        if rho is None:
            rows.perturb(gradients, adaptive)
        else:
            radius = rows.column(HParam.RHO)
            usual = radius.clone()
            radius.fill_(rho)
            rows.perturb(gradients, adaptive)
            radius.copy_(usual)  # other steps, and the row's next clients, have the step's radius
        self._first = gradients

    def restore(self) -> None:
        """Return to the unperturbed weights without an update."""
        self._row.rows.restore()
        self._first = None

    def update(self, gradients: Gradients | Tensor) -> None:
        """Update the unperturbed weights by gradients or a row, with the run's clipping, momentum, weight decay and
        learning rate, and the q, prox and weights of `local_step`'s step."""
        row = self._row
        if isinstance(gradients, Tensor):
            layout = row.setup.layout
            gradients = Gradients(layout.views(gradients), tuple(range(len(layout.segments))), layout.table)
        if row.step.key.has_rate:
            row.set_rate()
        row.rows.update(gradients, self._first if row.step.key.uses("b") else None)
        self._first = None
        row.k += 1
        if self._gradient_loss is not None:
            row.note_loss(*self._gradient_loss)
            self._gradient_loss = None

    def backward(self, x: Any, y: Any) -> Tensor:
        """Fill the gradients of `model`'s parameters, for an optimizer of torch, and return the loss of the data."""
        loss = check_scalar(self.loss(x, y))
        with self._row.client_errors:
            loss.backward()
        self.backward_passes += 1
        self._row.k += 1
        self._row.note_loss(loss.detach().view(1), self._size_of(y))
        self._gradient_loss = None
        return loss.detach()

    # --- phases and further models ---

    @contextmanager
    def trainable(self, indices: Sequence[int]) -> Iterator[None]:
        """Train only these parameters inside (see `ParameterLayout.indices`); the others keep their values."""
        self.has_phases = True
        parameters = self._row.replica.parameters
        try:
            for i, parameter in enumerate(parameters):
                parameter.requires_grad_(i in indices)
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_()

    def next_phase(self) -> None:
        """Begin a phase: the momentum is zero again, while weights, epochs and random numbers continue."""
        row = self._row
        self.has_phases = True
        row.rows.restart(row.z[0].clone())

    def begin(self, start: Tensor, step: Step | None = None) -> None:
        """Begin with another model of this client, from the weights `start` and the client's first buffers.

        The run records the first model. The loop returns what it needs of the new one. Epochs, steps and random numbers
        begin anew.

        Args:
            start: weights at the start.
            step: its local step; None for the step of `local_step`.

        Raises:
            ValueError: a tensor of the step is not like the weights.
        """
        row, step = self._row, self._task.own_step if step is None else step
        if self._results is None:
            self._results = self._close(None)
        step.check(start, 1)
        self.has_phases, self._epochs = True, 0
        row.start, row.task = start, replace(row.task, snapshots=frozenset())  # measures see the first model
        row.begin(step, start)

    def start_from(self, start: Tensor) -> None:
        """Begin at the weights `start` and measure `delta` from there, for methods with several global models."""
        row = self._row
        row.start = start
        row.rows.put("start", start)
        row.rows.restart(start)

    def second_model(self, start: Tensor) -> SecondModel:
        """Return a second model that is trained in lock step, from the weights `start`. It has the learning rate that
        the client has now."""
        self.has_phases = True
        row = self._row
        if row.second_model is None:
            row.second_model = SecondModel(row.setup)
        row.second_model.begin(start, row.rows.hparams[0, 0, HParam.LR])
        return row.second_model

    def teacher(self, weights: Tensor, index: int = 0) -> nn.Module:
        """Return a model with these weights and the client's first buffers, in evaluation mode.

        Args:
            weights: the teacher's weights.
            index: number of the teacher. Each number has a separate model.

        Raises:
            ValueError: parameters stay with the clients, so that the teacher would have the initial values of them; or
                the samples are not pairs (x, y).
        """
        self._row.passes.check_pairs()
        if self._task.step.start is not None:
            raise ValueError(TEACHER_NEEDS)
        return self._row.teachers.get(index, weights, self._row.buffers)

    # --- results ---

    def _close(self, extra: Mapping[str, Tensor] | None) -> ClientResults:
        """Return the results of the model that was trained so far. Raises ValueError at perturbed weights."""
        if self._first is not None:
            raise ValueError("the loop ended at perturbed weights. Call update() or restore() after perturb()")
        return self._row.results(extra)

    def results(self, extra: Mapping[str, Tensor] | None) -> ClientResults:
        """Return the results of the client, with the tensors that the loop returned."""
        rows = None if extra is None else {name: x[None] for name, x in extra.items()}
        if self._results is None:
            return self._close(rows)
        return replace(self._results, backward_passes=(self.backward_passes,), extra=rows or {})
