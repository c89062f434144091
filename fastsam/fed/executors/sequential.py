"""One client after the other in one row: the plain executor, and the meaning of all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fastsam_kernels.columns import WIDTH, Column

from ... import ops
from ...arena import Arena, Layout
from ..localstep import Direction, LocalStep, RowEnd
from ..replica import Replica, buffer_displacement
from .base import ClientError, LocalOptions, Loss, Task
from .randomness import PassRandomness

NU = 1e-7  # added to the norm of the direction; the papers add nothing, their simulators this


class Sequential:
    """Two buffers: `z`, which the model's parameters view, and `w`, the unperturbed weights, for steps that perturb.

    Perturbing writes `z = w + eps`, updating writes the new `w` into both: no pass only restores, no `eps` is stored, and nothing is
    rounded twice. Without a perturbation `z` is the only buffer. Gradients are read where autograd left them; a parameter without a
    gradient in a pass is left out of the calls that use it. Nothing in a step waits for the device.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, loss: Loss, options: LocalOptions, device: torch.device, backend: str
    ) -> None:
        dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
        self.layout, self.loss, self.options = layout, loss, options
        self.kernels = ops.bind(backend, device, dtype)
        self.arena, self.dtype = Arena(layout, rows=1, device=device), dtype
        self.z = self.arena.field("z", dtype)
        self.replica = Replica(model, layout, self.z[0])
        self.momentum = self.arena.field("momentum", dtype) if options.momentum else None
        self.hyper = torch.zeros(1, 1, WIDTH, dtype=torch.float64, device=device)
        self.sumsq = torch.zeros(1, dtype=torch.float64, device=device)
        self.sumsq_v = torch.zeros_like(self.sumsq) if options.clip_norm is not None else None
        self.random = PassRandomness(device)
        self._filled: tuple[float, ...] = ()
        self._subtables: dict[tuple[int, ...], Tensor] = {}

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[RowEnd]:
        """See `Executor.train`; the ends come in the order of the tasks."""
        self.replica.module.train()
        with self.random.guarded():
            for task in tasks:
                self._check(task)
                self._fill_hyper(task)
                losses = self._attempt(task, start, buffers)
                if self.random.found():
                    losses = self._attempt(task, start, buffers)
                yield self._end(task, losses, start, buffers)

    def _check(self, task: Task) -> None:
        q = task.step.q
        if q is not None and (q.shape != (self.layout.stride,) or q.dtype != self.dtype or q.device != self.z.device):
            raise ValueError(
                f"LocalStep.q must be {self.dtype} [{self.layout.stride}] on {self.z.device} (like the server's w), "
                f"got {q.dtype} {list(q.shape)} on {q.device}"
            )

    def _fill_hyper(self, task: Task) -> None:
        step, options = task.step, self.options
        columns = {
            Column.RHO: step.rho,
            Column.NU: NU,
            Column.ADAPTIVE: float(step.direction is Direction.ADAPTIVE_GRADIENT),
            Column.ETA: step.eta,
            Column.LR: task.lr,
            Column.DECAY: options.weight_decay,
            Column.PHI: step.phi,
            Column.A: step.a,
            Column.CLIP: options.clip_norm or 0.0,
            Column.CLIP_FULL: float(options.clip_scope == "full"),
            Column.MOMENTUM: options.momentum,
        }
        values = [0.0] * WIDTH
        for column, value in columns.items():
            values[column] = value
        if self._filled != (filled := tuple(values)):
            self.hyper[0, 0] = torch.tensor(values, dtype=torch.float64)
            self._filled = filled

    def _attempt(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> list[Tensor]:
        """All local steps of a task; the loss of each."""
        self.replica.load_(start, buffers)
        if task.step.perturbs:
            self.arena.field("w", self.dtype)[0].copy_(start)
        if self.momentum is not None:
            self.momentum.zero_()
        self.random.begin(task.pass_seed(0))
        take = self._sharp_step if task.step.perturbs else self._plain_step
        losses = []
        for k, (x, y) in enumerate(task.batches()):
            try:
                losses.append(take(task, k, x, y))
            except Exception as error:
                raise ClientError(
                    f"client {task.client} failed in round {task.round}, local step {k}: {type(error).__name__}: {error}"
                ) from error
        return losses

    def _plain_step(self, task: Task, k: int, x: Tensor, y: Tensor) -> Tensor:
        loss, table, grads = self._gradients(task, k, x, y)
        self._update(task.step, None, table, grads)
        return loss

    def _sharp_step(self, task: Task, k: int, x: Tensor, y: Tensor) -> Tensor:
        w = self.arena.field("w", self.dtype)
        loss, first, grads = self._gradients(task, k, x, y)
        weights = [w] if task.step.direction is Direction.ADAPTIVE_GRADIENT else []
        self.kernels.norm_(self.sumsq, grads, weights, first, self.hyper)
        self.kernels.perturb_([self.z], w, grads, first, self.hyper, self.sumsq, False)
        # The statistics that a model keeps (BatchNorm) are those of its weights, not those of the perturbed ones.
        kept = self.replica.copy_of_buffers()
        _, second, grads = self._gradients(task, k, x, y)
        for buffer, value in zip(self.replica.buffers, kept, strict=True):
            buffer.copy_(value)
        if second is not first:
            self.kernels.restore_([self.z], w, first)
        self._update(task.step, w, second, grads)
        return loss

    def _gradients(self, task: Task, k: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """One forward and backward pass: its loss, the gradients that there are, and the table of their parameters."""
        if self.random.draws:
            self.random.seed(task.pass_seed(k))
        loss = self.loss(self.replica.module(x), y)
        loss.backward()
        parameters = self.replica.parameters
        present = [p.grad for p in parameters if p.grad is not None]
        table = self.layout.table if len(present) == len(parameters) else self._subtable()
        for p in parameters:
            p.grad = None
        return loss.detach(), table, present

    def _subtable(self) -> Tensor:
        slots = tuple(i for i, p in enumerate(self.replica.parameters) if p.grad is not None)
        if slots not in self._subtables:
            self._subtables[slots] = self.layout.subtable(slots)
        return self._subtables[slots]

    def _update(self, step: LocalStep, w: Tensor | None, table: Tensor, grads: list[Tensor]) -> None:
        q = None if step.q is None else step.q[None]
        if self.sumsq_v is not None:
            self.kernels.update_norm_(self.sumsq_v, [self.z], w, grads, table, self.hyper, q=q)
        self.kernels.update_sgd_(
            [self.z], w, grads, table, self.hyper, momentum=self.momentum, q=q, sumsq_v=self.sumsq_v, keep=w is not None
        )

    def _end(self, task: Task, losses: list[Tensor], start: Tensor, buffers: Sequence[Tensor]) -> RowEnd:
        sizes = torch.tensor(task.batch_sizes(), dtype=torch.float64).to(self.z.device)
        return RowEnd(
            client=task.client,
            displacement=self.z[0] - start,
            steps=len(losses),
            backprops=len(losses) * (2 if task.step.perturbs else 1),
            loss=(torch.stack(losses).double() * sizes).sum(),
            seen=len(task.y) * task.epochs,
            buffers=buffer_displacement(self.replica.buffers, buffers) if self.replica.buffers else None,
        )
