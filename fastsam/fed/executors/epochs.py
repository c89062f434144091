"""Local epochs of stacked clients in one native call, where the recorded pass is a row program and the step is made of `norm_`, `perturb_`,
`update_norm_` and `update_sgd_`: the bits of the same steps one by one."""

from __future__ import annotations

from torch import Tensor

from ..localstep import Direction
from .client import Client
from .form import Form
from .rowwise import RowPass
from .traced import Traced


def reach(clients: list[Client]) -> tuple[int, int]:
    """How many of the next steps of clients that share a feed have one shape and are of one epoch, and the samples of each."""
    task, k = clients[0].task, clients[0].k
    whole, rest = divmod(task.samples, task.batch_size)
    at = k % (whole + (rest > 0))
    return (whole - at, task.batch_size) if at < whole else (1, rest)


def row_pass(traced: Traced, clients: list[Client], batch: int) -> RowPass | None:
    """That of the steps of clients that share a feed, where they can be taken natively."""
    first = clients[0]
    kind, task = first.kind, first.task
    if kind.surrogate or kind.direction is Direction.GRADIENT_MINUS_DUAL or any(c.task.snapshots for c in clients):
        return None
    x, y = (task.x, task.y) if task.work.store is None else (task.work.store.x, task.work.store.y)
    return traced.row_pass(len(clients), batch, x, y) if y.dim() == 1 else None


def take_(clients: list[Client], form: Form, known: RowPass, count: int, batch: int, losses: Tensor) -> None:
    """The next `count` steps of clients that share a feed. form: of their rows, arranged. losses: float64 `[rows]`, added to."""
    first = clients[0]
    assert first.feed is not None
    x, y, wanted = first.feed.span(first.k, count, len(clients))
    two_passes = form.kind.two_passes
    known.program.steps_(
        form.leaves, known.others, x, y, wanted, batch, form.z, form.w, form.layout.table, form.hyper, losses,
        momentum=form.momentum, q=form.q, shift=form.shift, sumsq=form.sumsq if two_passes else None, sumsq_v=form.sumsq_v,
        adaptive=form.kind.direction is Direction.ADAPTIVE_GRADIENT, keeps_first=two_passes and form.kind.keeps_first,
    )  # fmt: skip
    for client in clients:
        client.k += count
