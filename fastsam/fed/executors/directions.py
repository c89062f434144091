"""Directions of perturbations that torch's operations make of a first gradient and further vectors, for the rows of a
`LocalRows`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastsam.arena import Layout
from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.update.variant import StepVariant

_MIN_NORM = 1e-12  # norm of a drift that is divided by: a weight that has not moved is not perturbed


class Rows(Protocol):
    """The operands of a direction, as `LocalRows` has them."""

    w: Tensor | None
    layout: Layout
    variant: StepVariant
    vectors: dict[str, Tensor]

    def field(self, name: str) -> Tensor:
        """Return a field `[rows, row_size]`."""


def add_drift(rows: Rows, e: Tensor) -> Tensor:
    """Return `e + drift*(w - w^t)`, in the field "direction"."""
    d = rows.field("direction")
    if not rows.variant.drift_weight:
        return d.copy_(e)
    assert rows.w is not None
    torch.sub(rows.w, rows.field("origin"), out=d)
    return d.mul_(rows.variant.drift_weight).add_(e)


def sum_directions(rows: Rows, first: Gradients) -> list[Tensor]:
    """Return the first gradients plus the other parts of the direction, by parameter."""
    d = add_drift(rows, rows.vectors["direction_vector"])
    if rows.variant.uses_last_gradient:
        d.add_(rows.field("last"))
    views = views_like(rows, first, d)
    torch._foreach_add_(views, first.tensors)
    return views


def scale_by_drift(rows: Rows, first: Gradients) -> list[Tensor]:
    """Return the first gradients times `|w - w^t|`, of each parameter over its norms along the first dimension."""
    assert rows.w is not None
    d = torch.sub(rows.w, rows.field("origin"), out=rows.field("direction")).abs_()
    for view in rows.layout.views(d):  # [rows, *shape]
        far = view if view.dim() > 1 else view.unsqueeze(1)
        far.div_(torch.linalg.vector_norm(far, dim=1, keepdim=True).clamp_(min=_MIN_NORM))
    views = views_like(rows, first, d)
    torch._foreach_mul_(views, first.tensors)
    return views


def views_like(rows: Rows, grads: Gradients, field: Tensor) -> list[Tensor]:
    """Return views of a field, one for each of the gradients and shaped like it. A single row's views have no
    dimension for the rows."""
    views = rows.layout.views(field)
    return [views[i].view_as(g) for i, g in zip(grads.slots, grads.tensors, strict=True)]
