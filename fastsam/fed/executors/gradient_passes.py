"""Forward and backward passes of one client on its row: losses, gradients, and which parameters have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fastsam.arena import Layout
from fastsam.fed.clients.batch_loss import BatchLoss
from fastsam.fed.clients.population import Loss
from fastsam.fed.executors import stacked_masks
from fastsam.fed.update.model_copy import Replica

Objective = Callable[[Tensor], Tensor]  # function of a model's outputs that returns a scalar tensor


def check_scalar(loss: object) -> Tensor:
    """Return the loss. Raises ValueError unless it is a scalar tensor. A loss of shape [1] would have a gradient too,
    and spoil the sums of losses."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    description = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(f"loss(model(x), y) must be a scalar tensor (the mean over the batch), got {description}")


class Gradients:
    """The gradients of one backward pass, where autograd left them, and the table of the parameters that have one."""

    def __init__(self, tensors: list[Tensor], slots: tuple[int, ...], table: Tensor) -> None:
        self.tensors, self.slots, self.table = tensors, slots, table

    def norms(self, rows: int) -> Tensor:
        """Return the norms of the gradients of each row, float64 `[rows]`."""
        squares = [g.reshape(rows, -1).double().square().sum(1) for g in self.tensors]
        return torch.stack(squares).sum(0).sqrt()

    def of_rows(self, rows: slice) -> Gradients:
        """Return the gradients `[rows, *shape]` of some rows."""
        return Gradients([g[rows] for g in self.tensors], self.slots, self.table)

    @classmethod
    def join(cls, parts: Sequence[Gradients], layout: Layout) -> Gradients:
        """Return the gradients of several parts of the rows, of the same parameters, next to each other."""
        first, rows, tensors = parts[0], sum(len(part.tensors[0]) for part in parts), []
        for slot, column in zip(first.slots, zip(*(part.tensors for part in parts), strict=True), strict=True):
            segment, g = layout.segments[slot], column[0]
            strides = (segment.length, *segment.stride)
            out = torch.empty_strided((rows, *segment.shape), strides, dtype=g.dtype, device=g.device)
            tensors.append(torch.cat(column, out=out))
        return cls(tensors, first.slots, first.table)

    def like(self, template: Gradients) -> list[Tensor]:
        """Return these gradients for the parameters of `template`, zeros for missing ones."""
        if self.slots == template.slots:
            return self.tensors
        by_slot = dict(zip(self.slots, self.tensors, strict=True))
        return [by_slot.get(i, torch.zeros_like(t)) for i, t in zip(template.slots, template.tensors, strict=True)]


class Passes:
    """Runs the loss and its backward pass on a replica. A parameter without a gradient in a pass is left out of its
    `Gradients`."""

    def __init__(self, replica: Replica, layout: Layout, loss: Loss) -> None:
        self.replica, self.layout, self.loss = replica, layout, loss
        self.of_batch = loss if isinstance(loss, BatchLoss) else None
        self._all_slots = tuple(range(len(replica.parameters)))
        self._one: Tensor | None = None  # the gradient of a loss, and its version
        self._one_version = 0
        self._masks = stacked_masks.masks_of_passes(replica.module, replica.row.device)

    def run(self, x: Any, y: Any) -> tuple[Tensor, Gradients]:
        """Return the loss (detached) and its gradients at the replica's weights, on inputs and labels, or on a batch
        `x` that has both."""
        loss = self.loss_of(x, y)
        if type(loss) is Tensor and loss.is_cpu and loss.is_floating_point():
            self._run_backward(loss)
        else:
            loss.backward()
        return loss.detach(), self._gradients()

    def _run_backward(self, loss: Tensor) -> None:
        """Do what `loss.backward()` does on the CPU, by the function that it calls. The checks before that call take a
        fourth of a small model's backward pass."""
        one = self._one
        if one is None or one.dtype != loss.dtype or one._version != self._one_version:  # a backward pass may write it
            one = self._one = torch.ones_like(loss, requires_grad=False)
            self._one_version = one._version
        Variable._execution_engine.run_backward((loss,), (one,), False, False, (), True, True)

    def loss_of(self, x: Any, y: Any) -> Tensor:
        """Return the loss at the replica's weights, for autograd. Raises ValueError unless it is a scalar."""
        module, of_batch = self.replica.module, self.of_batch
        with self._masks:
            return check_scalar(self.loss(module(x), y) if of_batch is None else of_batch(module, x))

    def run_objective(
        self, x: Any, y: Any, penalty: Objective | None = None, objective: Objective | None = None
    ) -> tuple[Tensor, Gradients]:
        """Run a pass as `run`, with the gradient of another function of the outputs: of the loss plus a penalty, or of
        an objective in its place. Raises ValueError if samples come in batches that only the loss can read."""
        self.check_pairs()
        with self._masks:
            outputs = self.replica.module(x)
        loss = check_scalar(self.loss(outputs, y))
        if objective is not None:
            check_scalar(objective(outputs)).backward()
        elif penalty is not None:
            (loss + check_scalar(penalty(outputs))).backward()
        return loss.detach(), self._gradients()

    def check_pairs(self) -> None:
        """Raise ValueError unless samples are pairs (x, y), whose outputs a term can read."""
        if self.of_batch is not None:
            raise ValueError(
                "a term of the model's outputs needs inputs x of pairs (x, y), but the samples come in batches. Use "
                "another algorithm"
            )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run the passes inside in evaluation mode."""
        training = self.replica.module.training
        self.replica.module.eval()
        try:
            yield
        finally:
            self.replica.module.train(training)

    def _gradients(self) -> Gradients:
        parameters = self.replica.parameters
        present = [p.grad for p in parameters if p.grad is not None]
        slots = self._all_slots
        if len(present) < len(parameters):
            slots = tuple(i for i, p in enumerate(parameters) if p.grad is not None)
        for p in parameters:
            p.grad = None
        return Gradients(present, slots, self.layout.subtable(slots))
