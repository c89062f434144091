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
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.passes import Objective

Penalty = Callable[[Tensor], Tensor]  # function of a model's outputs that returns a scalar tensor
NEEDS_PAIRS = (
    "a term of the model's outputs needs inputs x of pairs (x, y), but the samples come in batches. Use another "
    "algorithm"
)


def check_scalar(loss: object) -> Tensor:
    """Return the loss. Raises ValueError unless it is a scalar tensor. A loss of shape [1] would have a gradient too,
    and spoil the sums of losses."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    description = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(f"loss(model(x), y) must be a scalar tensor (the mean over the batch), got {description}")


class ModelPasses:
    """Runs the loss and its backward pass on a replica. A parameter without a gradient in a pass is left out of its
    `Gradients`."""

    def __init__(self, replica: Replica, layout: Layout, loss: Loss) -> None:
        self.replica, self.layout, self.loss = replica, layout, loss
        self.of_batch = loss if isinstance(loss, BatchLoss) else None
        self._all_slots = tuple(range(len(replica.parameters)))
        self._one: Tensor | None = None  # the gradient of a loss, and its version
        self._one_version = 0
        self._masks = stacked_masks.masks_of_passes(replica.module, replica.row.device)

    def run(
        self,
        x: Any,
        y: Any,
        objective: Objective | None = None,
        operands: Sequence[Tensor] = (),
        penalty: Penalty | None = None,
    ) -> tuple[Tensor, Gradients]:
        """Return the loss (detached) at the replica's weights on inputs and labels, or on a batch `x` that has both,
        and its gradients. An objective of loss, outputs, labels and operands takes the loss's place in the gradients,
        and a penalty of the outputs is added to it. Operands are `[1, ...]`.

        Raises:
            ValueError: a value is not a scalar; or samples come in batches, whose outputs only the loss reads.
        """
        if objective is None and penalty is None:
            loss = value = self.loss_of(x, y)
        else:
            self.check_pairs()
            operands = [t[0] for t in operands]
            with self._masks:
                outputs = self.replica.module(x)
            loss = check_scalar(self.loss(outputs, y))
            value = loss if objective is None else check_scalar(objective(loss, outputs, y, *operands))
            value = value if penalty is None else value + check_scalar(penalty(outputs))
        if type(value) is Tensor and value.is_cpu and value.is_floating_point():
            self._run_backward(value)
        else:
            value.backward()
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

    def check_pairs(self) -> None:
        """Raise ValueError unless samples are pairs (x, y), whose outputs a term can read."""
        if self.of_batch is not None:
            raise ValueError(NEEDS_PAIRS)

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
        present = [g for p in parameters if (g := p.grad) is not None]
        slots = self._all_slots
        if len(present) < len(parameters):
            slots = tuple(i for i, p in enumerate(parameters) if p.grad is not None)
        for p in parameters:
            p.grad = None
        return Gradients(present, slots, self.layout.subtable(slots))
