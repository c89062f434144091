"""A trained affine map of a client's inputs, `x -> Lam*x + delta`: the adversary of FedRobust, outside the weight
vector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fastsam.fed.common.checks import choice, integer, number

FORMS = ("full", "channel", "diag")
FULL_UP_TO = 1024  # inputs; above, the default is "channel"


@dataclass(frozen=True)
class InputMap:
    """A map of the inputs, trained by gradient ascent on `loss(model(Lam*x + delta), y) - lam*||Lam - I||^2 -
    lam*||delta||^2`.

    Args:
        lr: learning rate of the ascent.
        steps: ascent steps per local step. The last one shares its backward pass with the weights' gradient.
        lam: weight of the penalty.
        radius: None, or (e1, e2): Lam and delta are projected to ||Lam - I|| <= e1 and ||delta|| <= e2 in place of the
            penalty.
        form: Lam is a "full" matrix `[d, d]` over all d numbers of an input, a "channel" matrix `[c, c]`, or a
            "diag"-onal `[d]`. None: "full" up to 1024 inputs, else "channel". delta is `[d]`, with "channel" `[c]`.
        Lam, delta: None means the identity. Between algorithm and executor they are those of n clients, `[n, ...]`.

    Raises:
        ValueError: the form is unknown, or a number is out of range.
    """

    form: str | None = None
    lam: float = 1.0
    lr: float = 0.1
    steps: int = 1
    radius: tuple[float, float] | None = None
    Lam: Tensor | None = None
    delta: Tensor | None = None

    def __post_init__(self) -> None:
        choice("form", self.form, (*FORMS, None))
        number("lam", self.lam, at_least=0)
        number("lr", self.lr, at_least=0)
        integer("steps", self.steps, at_least=1)
        if self.radius is not None:
            for name, bound in zip(("e1", "e2"), self.radius, strict=True):
                number(f"radius: {name}", bound, at_least=0)

    def of_row(self, i: int) -> InputMap:
        """The map of one of the clients whose maps these are."""
        return replace(
            self, Lam=None if self.Lam is None else self.Lam[i], delta=None if self.delta is None else self.delta[i]
        )

    def as_row(self) -> InputMap:
        """This client's map as the first of one."""
        Lam, delta = self._tensors()
        return replace(self, Lam=Lam[None], delta=delta[None])

    def begin(self, x: Tensor) -> InputMap:
        """Return the map with its tensors, for inputs like `x` `[n, ...]`. Raises ValueError if inputs are not
        floating-point numbers."""
        if not x.is_floating_point():
            works = "FedRobust cannot train on token ids"
            if x.dtype == torch.uint8:
                works = "for images of bytes the model must be a fastsam.fed.models.Pixels(model, mean, std)"
            raise ValueError(f"an input map needs floating-point inputs, got {x.dtype}; {works}")
        inputs, channels = prod(x.shape[1:]), x.shape[1] if x.dim() > 2 else 1
        form = self.form or ("full" if inputs <= FULL_UP_TO else "channel")
        size = channels if form == "channel" else inputs
        Lam, delta = self.Lam, self.delta
        if Lam is None:
            Lam = torch.ones(size) if form == "diag" else torch.eye(size)
        if delta is None:
            delta = torch.zeros(size)
        return replace(self, form=form, Lam=Lam.to(x), delta=delta.to(x))

    def apply(self, x: Tensor) -> Tensor:
        """The mapped inputs, of the shape of `x`; the map must have begun."""
        Lam, delta = self._tensors()
        if self.form == "channel" and x.dim() > 2:
            return torch.einsum("ij,nj...->ni...", Lam, x) + delta.view(-1, *[1] * (x.dim() - 2))
        flat = x.flatten(1) if x.dim() > 1 else x[:, None]
        if self.form == "full":
            flat = flat @ Lam.T
        else:
            flat = flat * (Lam if self.form == "diag" else Lam[0])
        return (flat + delta).view(x.shape)

    def ascend(self, grad_Lam: Tensor, grad_delta: Tensor) -> InputMap:
        """The map after one step of ascent along the loss's gradients."""
        Lam, delta = self._tensors()
        identity = (
            torch.ones_like(Lam) if self.form == "diag" else torch.eye(len(Lam), dtype=Lam.dtype, device=Lam.device)
        )
        if self.radius is None:
            grad_Lam, grad_delta = grad_Lam - 2 * self.lam * (Lam - identity), grad_delta - 2 * self.lam * delta
        Lam, delta = Lam + self.lr * grad_Lam, delta + self.lr * grad_delta
        if self.radius is not None:
            Lam = identity + _project(Lam - identity, self.radius[0])
            delta = _project(delta, self.radius[1])
        return replace(self, Lam=Lam, delta=delta)

    def with_tensors(self, Lam: Tensor, delta: Tensor) -> InputMap:
        """The same map with other tensors."""
        return replace(self, Lam=Lam, delta=delta)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self.Lam is None or self.delta is None:
            raise ValueError("the input map has no tensors yet; call begin(x) first")
        return self.Lam, self.delta


def _project(x: Tensor, radius: float) -> Tensor:
    """`x`, shortened to the length `radius` where it is longer."""
    return x * (radius / x.norm().clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1.0)
