"""Knowledge distillation: the divergence between the outputs of two models."""

from __future__ import annotations

import torch
from torch import Tensor


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
