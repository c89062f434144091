"""Keeps a forward pass out of BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# a layer, whether it tracks, and its own buffers, in place of which it has copies
FrozenLayer = tuple[_NormBase, bool, dict[str, Tensor]]


@contextmanager
def frozen_batchnorm_stats(model: nn.Module) -> Iterator[None]:
    """Leave the running statistics of every BatchNorm and InstanceNorm layer of `model` unchanged in this context.

    Forward passes normalise as they would otherwise (with the statistics of the batch, in training mode). The count of
    batches stays, too. It is for SAM's second pass: running statistics should describe the weights that are kept, and
    not the perturbed ones.

        loss_of(model, batch).backward()
        opt.first_step(zero_grad=True)
        with fastsam.frozen_batchnorm_stats(model):
            loss_of(model, batch).backward()
        opt.second_step(zero_grad=True)

    Layers in evaluation mode are not affected. Raises TypeError if `model` is not a module.
    """
    frozen_layers = freeze(model)
    try:
        yield
    finally:
        thaw(frozen_layers)


def freeze(model: nn.Module) -> list[FrozenLayer]:
    """Begin to freeze the statistics, until `thaw`. Raises TypeError if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"frozen_batchnorm_stats expects a torch.nn.Module, got {type(model).__name__}")
    frozen_layers: list[FrozenLayer] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            frozen_layers.append((module, module.track_running_stats, {}))
            # A BatchNorm in training mode that does not track uses the batch's statistics, and writes none.
            module.track_running_stats = False
        elif isinstance(module, _NormBase):
            # InstanceNorm writes its buffers with any flags, so it gets copies of them.
            originals = {name: b for name in BUFFERS if (b := module._buffers.get(name)) is not None}
            frozen_layers.append((module, module.track_running_stats, originals))
            module._buffers.update({name: buffer.clone() for name, buffer in originals.items()})
    return frozen_layers


def thaw(frozen_layers: list[FrozenLayer]) -> None:
    """End what `freeze` began."""
    for module, tracks, buffers in frozen_layers:
        module.track_running_stats = tracks
        module._buffers.update(buffers)
