"""Sums over several phases of a client's local steps, and several steps on a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from fastsam.fed.executors.base import Task
from fastsam.fed.executors.kernel_calls import Form
from fastsam.fed.step.local_update import ClientResults, Envelope


def together(before: ClientResults, results: ClientResults) -> ClientResults:
    """Return the results of one model in two phases. Both measure deltas from its first start."""
    return replace(
        results,
        num_steps=(before.num_steps[0] + results.num_steps[0],),
        backward_passes=(before.backward_passes[0] + results.backward_passes[0],),
        losses=before.losses + results.losses,
        num_samples=(before.num_samples[0] + results.num_samples[0],),
        snapshots=before.snapshots,
    )


def repeated(task: Task, envelope: Envelope, form: Form) -> Iterator[tuple[Any, Any]]:
    """Yield every batch of the task several times. After the last time the anchor moves, with the constant half of the
    proximal term."""
    anchor, q = form.field("anchor"), form.q
    assert q is not None  # a step with an envelope has one
    for batch in task.batches():
        yield from repeat(batch, envelope.steps)
        anchor.lerp_(form.z, envelope.rate)
        torch.mul(anchor, -task.step.proximal_coefficient, out=q)
