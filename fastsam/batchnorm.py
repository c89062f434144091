"""Normalisation layers keep running statistics; SAM's perturbed pass must not enter them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def frozen_batchnorm_stats(model: nn.Module) -> Iterator[None]:
    """Inside, forward passes leave the running statistics of batch and instance normalisation alone.

    A layer in training mode still normalises by the batch, so the gradient is the one of training; only the update of `running_mean`,
    `running_var` and `num_batches_tracked` is held back. Wrap the second forward pass::

        loss_fn(model(x), y).backward()
        opt.first_step(zero_grad=True)
        with frozen_batchnorm_stats(model):
            loss_fn(model(x), y).backward()
        opt.second_step(zero_grad=True)
    """
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    kept = [(m, m.running_mean, m.running_var, m.num_batches_tracked) for m in layers]
    try:
        for m, mean, var, count in kept:
            m.running_mean = mean if mean is None else mean.clone()
            m.running_var = var if var is None else var.clone()
            m.num_batches_tracked = count if count is None else count.clone()
        yield
    finally:
        for m, mean, var, count in kept:
            m.running_mean, m.running_var, m.num_batches_tracked = mean, var, count
