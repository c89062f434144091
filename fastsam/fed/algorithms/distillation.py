"""Knowledge distillation: the divergence between the outputs of two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Step


def divergence(
    outputs: Tensor, teacher_outputs: Tensor, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Return `tau^2 * KL(softmax(teacher_outputs/tau) || softmax(outputs/tau))`, the mean over the batch.

    The square keeps the size of gradients (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network",
    2015).

    Args:
        outputs: logits `[n, classes, ...]`.
        teacher_outputs: logits of the same shape.
        temperature: tau.
        mask: bool of the same shape, classes that neither distribution has.
    """
    logits, targets = outputs / temperature, teacher_outputs / temperature
    if mask is None:
        p, q = logits.log_softmax(1), targets.log_softmax(1)
    else:
        p, q = (x.masked_fill(mask, -torch.inf).log_softmax(1).masked_fill(mask, 0.0) for x in (logits, targets))
    share = q.exp() if mask is None else q.exp().masked_fill(mask, 0.0)
    return temperature**2 * (share * (q - p)).sum(1).mean()


@dataclass(frozen=True, eq=False)
class Taught(Step):
    """A step on the loss plus a term of the outputs of a teacher.

    Args:
        term: function of the teacher's outputs, the labels and the outputs that returns the term. It is compared by
            value, so it is a function, or a method of a frozen algorithm.
        teacher: weights of the teacher; None for the start of the round.
    """

    term: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    teacher: Tensor | None = None

    def objective(self, loss: Tensor, outputs: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss plus the term."""
        assert self.term is not None
        return loss + self.term(teacher, y, outputs)

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g = passes(self.objective, passes.outputs_of(rows["start" if self.teacher is None else "teacher"]))
        rows.update(g)
        return losses
