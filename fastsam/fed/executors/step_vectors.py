"""The vectors of LocalUpdates, as executors take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.fed.executors.task import Task
from fastsam.fed.step.local_update import LocalUpdate


def vectors_of(tasks: Sequence[Task], name: str) -> Tensor | None:
    """A vector of the steps of tasks in their order, all of one kind: `[row_size]` where it is one for all, else
    `[tasks, row_size]`."""
    first, last = tasks[0], tasks[-1]
    v: Tensor | None = getattr(first.step, name)
    if v is None or all(task.step is first.step for task in tasks):
        return v if v is None or v.dim() == 1 else v[first.row : last.row + 1]
    return torch.stack([own for task in tasks if (own := task.vector(name)) is not None])


def check_vectors(step: LocalUpdate, start: Tensor) -> None:
    """Raises ValueError for a vector of a LocalUpdate, or several of them, that are not like the weights `start`."""
    for name in step.constants.vectors:
        v = getattr(step, name)
        if v.dim() > 2 or v.shape[-1:] != start.shape or v.dtype != start.dtype or v.device != start.device:
            raise ValueError(
                f"LocalUpdate.{name} must be {start.dtype} [{len(start)}] on {start.device} (like the server's w), "
                f"got {v.dtype} {list(v.shape)} on {v.device}"
            )
