"""A second model that local steps compare their outputs with: a term of the loss made of both models' outputs, for distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastsam.fed.common.checks import number

Term = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Teacher:
    """Local steps descend on `loss(model(x), y) + weight*term(model(x), teacher(x), y)`.

    weights: `[stride]`, of the teacher: a model like the trained one, in evaluation mode, with the buffers of the global model; no gradient goes
    through it. term: of outputs, the teacher's outputs and labels a scalar tensor, the mean over the batch; `divergence` is one.
    Raises ValueError for a weight that is no finite number, and a term that cannot be called.
    """

    weights: Tensor
    term: Term
    weight: float = 1.0

    def __post_init__(self) -> None:
        number("weight", self.weight)
        if not callable(self.term):
            raise ValueError(
                f"Teacher: term must be a function of outputs, the teacher's outputs and labels, got {self.term!r}"
            )


def divergence(outputs: Tensor, told: Tensor, temperature: float = 1.0, left_out: Tensor | None = None) -> Tensor:
    """`temperature^2 * KL(softmax(told/temperature) || softmax(outputs/temperature))`, the mean over the batch.

    outputs, told: `[n, classes, ...]`, logits. left_out: bool of that shape, classes that neither distribution has. (Hinton, Vinyals and Dean,
    "Distilling the Knowledge in a Neural Network", 2015: the square keeps the size of gradients.)
    """
    own, other = outputs / temperature, told / temperature
    if left_out is None:
        p, q = own.log_softmax(1), other.log_softmax(1)
    else:
        p, q = (x.masked_fill(left_out, -torch.inf).log_softmax(1).masked_fill(left_out, 0.0) for x in (own, other))
    share = q.exp() if left_out is None else q.exp().masked_fill(left_out, 0.0)
    return temperature**2 * (share * (q - p)).sum(1).mean()


@torch.no_grad()
def check_term(teacher: Teacher, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Raises ValueError unless the term of this model's outputs, as both, is a finite scalar. x, y: a batch."""
    outputs = model.to(x.device)(x)
    try:
        value = teacher.term(outputs, outputs, y)
    except Exception as error:
        shapes = (
            f"outputs {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"outputs {type(outputs).__name__}"
        )
        raise ValueError(
            f"the teacher's term cannot be made of {shapes} and labels {y.dtype} {list(y.shape)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.dim() or not bool(value.isfinite()):
        got = f"{list(value.shape)} {value}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the teacher's term must be a finite scalar tensor, the mean over the batch, got {got}")
