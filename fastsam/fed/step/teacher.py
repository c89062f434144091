"""A second model that local steps compare their outputs with: a term of the loss made of both models' outputs, for
distillation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastsam.fed.common.checks import nearest, number

Term = Callable[[Tensor, Any, Tensor], Tensor]


@dataclass(frozen=True)
class Teacher:
    """A second model whose outputs enter the loss: `loss(model(x), y) + weight*term(model(x), teacher(x), y)`.

    Args:
        weights: weights of the teacher, `[row_size]`, or `[n, row_size]`, a row for each client. The teacher is like
            the trained model, in evaluation mode, with the client's first buffers; no gradient goes through it. A
            sequence of these is several teachers, and the term gets a tuple of their outputs.
        term: function of outputs, the teacher's outputs and labels that returns a scalar tensor, the mean over the
            batch. `divergence` is one.
        weight: factor of the term.
        features: name of a module of the model. Its output, or with `received` its input, takes the place of the
            outputs.
        received: see `features`.
        perturbs: the first gradient of a step, which finds the perturbation, is that of the term, and the second
            gradient is that of the loss. For steps with two gradients.

    Raises:
        ValueError: the weight is not a finite number, or the term is not callable.
    """

    weights: Tensor | Sequence[Tensor]
    term: Term
    weight: float = 1.0
    features: str | None = None
    received: bool = False
    perturbs: bool = False

    def __post_init__(self) -> None:
        number("weight", self.weight)
        if not callable(self.term):
            raise ValueError(
                f"Teacher: term must be a function of outputs, the teacher's outputs and labels, got {self.term!r}"
            )

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The weights of each teacher."""
        return (self.weights,) if isinstance(self.weights, Tensor) else tuple(self.weights)

    def compare(self, own: Tensor, told: Sequence[Tensor], y: Tensor) -> Tensor:
        """Return the term of the model's outputs, the outputs of each teacher, and the labels."""
        return self.term(own, told[0] if isinstance(self.weights, Tensor) else tuple(told), y)


def divergence(outputs: Tensor, told: Tensor, temperature: float = 1.0, left_out: Tensor | None = None) -> Tensor:
    """`temperature^2 * KL(softmax(told/temperature) || softmax(outputs/temperature))`, the mean over the batch.

    outputs, told: `[n, classes, ...]`, logits. left_out: bool of that shape, classes that neither distribution has.
    (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015: the square keeps the size of
    gradients.)
    """
    own, other = outputs / temperature, told / temperature
    if left_out is None:
        p, q = own.log_softmax(1), other.log_softmax(1)
    else:
        p, q = (x.masked_fill(left_out, -torch.inf).log_softmax(1).masked_fill(left_out, 0.0) for x in (own, other))
    share = q.exp() if left_out is None else q.exp().masked_fill(left_out, 0.0)
    return temperature**2 * (share * (q - p)).sum(1).mean()


class Heard:
    """A model, and the tensor of a pass that the term compares: its outputs, or the output or input of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._what: tuple[str | None, bool] = None, False
        self._hook: RemovableHandle | None = None
        self._found: object = None

    def attend_(self, teacher: Teacher) -> None:
        """Compare what this teacher compares."""
        what = teacher.features, teacher.received
        if what == self._what:
            return
        if self._hook is not None:
            self._hook.remove()
        self._what, self._hook = what, None
        if teacher.features is not None:
            inner = self.module.get_submodule(teacher.features)
            listen = inner.register_forward_pre_hook if teacher.received else inner.register_forward_hook
            self._hook = listen(self._take)

    def _take(self, module: nn.Module, inputs: tuple[object, ...], output: object = None) -> None:
        self._found = inputs[0] if self._what[1] else output

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the tensor to compare. Raises ValueError if the pass does not use the module, or if it
        is
        not a tensor."""
        outputs = self.module(x)
        if self._hook is None:
            return outputs, outputs
        found, self._found = self._found, None
        if not isinstance(found, Tensor):
            did = (
                f"{'receives' if self._what[1] else 'returns'} {type(found).__name__}"
                if found is not None
                else "is not called"
            )
            raise ValueError(
                f"features={self._what[0]!r} must be a module that works on one tensor; in a pass of the model it {did}"
            )
        return outputs, found


@torch.no_grad()
def check_term(teacher: Teacher, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Raises ValueError unless the term of this model's outputs, as both, is a finite scalar. x, y: a batch."""
    heard = Heard(model.to(x.device))
    modules = [name for name, _ in model.named_modules() if name]
    if teacher.features is not None and teacher.features not in modules:
        raise ValueError(
            f"features={teacher.features!r} is not a module of the model{nearest(teacher.features, modules)}; its "
            f"modules are {', '.join(modules)}"
        )
    heard.attend_(teacher)
    _, own = heard(x)
    try:
        value = teacher.compare(own, [own] * len(teacher.rows), y)
    except Exception as error:
        what = "outputs" if teacher.features is None else "features"
        shapes = f"{what} {list(own.shape)}" if isinstance(own, Tensor) else f"{what} {type(own).__name__}"
        raise ValueError(
            f"the teacher's term cannot be made of {shapes} and labels {y.dtype} {list(y.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.dim() or not bool(value.isfinite()):
        got = f"{list(value.shape)} {value}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the teacher's term must be a finite scalar tensor, the mean over the batch, got {got}")
