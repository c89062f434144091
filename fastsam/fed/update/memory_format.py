"""The use of memory on the CPU: the order of convolution weights, and freed memory that stays with the process."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fastsam.fed.update.model_copy import copy_model

log = logging.getLogger("fastsam.fed")

FORMATS = ("auto", "preserve", "channels_last")
PRESERVE, CHANNELS_LAST = FORMATS[1:]
_MAX_NUMEL = 2**20  # elements of 4-d weights: with more, autograd's copies of their gradients cost what the order saves
_BLOCK = 32 * 2**20 - 2 * 4096  # bytes: the longest that glibc's threshold follows, less its header and an alignment

_MAX_FREED = 32 * 2**20  # bytes


def reorder(model: nn.Module, format: str, device: torch.device, stacked: bool) -> nn.Module:
    """Return the model to train on `device`: `model` itself, or a copy whose 4-d parameters are stored in a
    different order.

    Values and ties stay. Buffers and tensors of other ranks keep their order.

    Args:
        model: the user's model.
        format: one of `FORMATS`. "auto" is the rule below. It also converts a model in channels_last if torch would
            end the process (`danger`).
        device: device of training.
        stacked: several clients share one call of the model.

    Raises:
        ValueError: the model has such a layer without "auto", or clients are stacked in channels_last. In float64 torch
            gives wrong gradients of grouped convolutions in that order for mapped batches of one sample.
    """
    if stacked and format == CHANNELS_LAST:
        raise ValueError(
            "memory_format='channels_last' is for executors that train one client after the other in a row; stacked "
            "clients (executor='vmap') would gain nothing. Use memory_format='auto', or executor='threads' or "
            "'sequential'"
        )
    weights = [p for p in model.parameters() if p.dim() == 4]
    itself_last = any(p.stride() != _strides(p, torch.contiguous_format) for p in weights)
    risk = danger(model, device)
    if format == "auto":
        format, reason = rule(model, device, stacked)
        log.info("memory format %r: %s", format, reason)
    elif risk and (format == CHANNELS_LAST or itself_last):
        raise ValueError(
            f"memory_format={format!r} would train this model in channels_last, in which {risk}. Use "
            "memory_format='auto'"
        )
    if not weights or (format == PRESERVE and not (risk and itself_last)):
        return model
    result = copy_model(model)
    torch_format = torch.channels_last if format == CHANNELS_LAST else torch.contiguous_format
    for p in result.parameters():
        if p.dim() == 4:
            # Not to(): a weight that both formats could describe would keep its strides, and convolutions go by the
            # strides.
            p.data = torch.empty_like(p, memory_format=torch_format).copy_(p.data)
    return result


def danger(model: nn.Module, device: torch.device) -> str:
    """Return what would end the process in channels_last on the CPU, and the layer, or ""."""
    if device.type != "cpu":
        return ""
    if layer := _overrun_risk(model):
        return f"torch writes past its memory on some processors (docs/torch_conv1x1_channels_last.md) for {layer}"
    if layer := _group_norm_risk(model):
        return f"torch's backward pass ends the process for {layer} (a trained GroupNorm after frozen convolutions)"
    return ""


def _group_norm_risk(model: nn.Module) -> str:
    """Return a trained GroupNorm of a model with frozen convolutions, or "".

    torch 2.13 reads a missing tensor in the backward pass of a GroupNorm, in any dtype, if its input is in
    channels_last and needs no gradient. Only the forward pass knows the input, so all frozen convolutions count.
    """
    if all(p.requires_grad for p in model.parameters() if p.dim() == 4):
        return ""
    norms = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.GroupNorm))
    return next((repr(name) for name, m in norms if any(p.requires_grad for p in m.parameters())), "")


def _overrun_risk(model: nn.Module) -> str:
    """Return the layer for which torch's CPU kernels write past their memory in channels_last, or "".

    It is a 1x1 convolution with a stride and a number of input channels that is not a multiple of 8, in any dtype but
    float64; the gradient of its weight is wrong (docs/torch_conv1x1_channels_last.md). The order of its weight does
    not help, because it follows its input, which other layers put in channels_last. The stride of a 1x1 weight outside
    `nn.Conv2d` cannot be seen, so it counts. All processors are treated alike, so that a run can be resumed on a
    different processor.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.utils.parametrize.ParametrizationList | nn.ConvTranspose2d):
            continue  # the weight is judged by its layer; transposed convolutions were tried and are correct
        if isinstance(module, nn.Conv2d):
            shapes = [(*module.weight.shape, module.weight.dtype)] if max(module.stride) > 1 else []
        else:
            shapes = [(*p.shape, p.dtype) for p in module.parameters(recurse=False) if p.dim() == 4]
        for _, channels, height, width, dtype in shapes:
            if (height, width) == (1, 1) and channels % 8 and dtype != torch.float64:
                kind = "a 1x1 convolution with a stride" if isinstance(module, nn.Conv2d) else "a 1x1 weight"
                return f"{name or 'the model'!r} ({kind} and {channels} input channels)"
    return ""


def rule(model: nn.Module, device: torch.device, stacked: bool) -> tuple[str, str]:
    """Return the best format, and why. The rule never looks at a clock; docs/about_speed.md has the times."""
    weights = [p for p in model.parameters() if p.dim() == 4]
    if device.type != "cpu":
        return PRESERVE, "measured on CPUs alone"
    if not weights or not any(isinstance(m, nn.Conv2d) for m in model.modules()):
        return PRESERVE, "the model has no Conv2d"
    if stacked:
        return PRESERVE, "stacked convolutions are grouped ones, which copy their weights anyway"
    if any(p.dtype != torch.float32 for p in weights):
        return PRESERVE, "it speeds up float32; in float64 some convolutions take twice as long"
    if risk := danger(model, device):
        return PRESERVE, f"in channels_last {risk}"
    if sum(p.numel() for p in weights) > _MAX_NUMEL:
        return PRESERVE, f"more than {_MAX_NUMEL} convolution weights: reordering their gradients costs more"
    return CHANNELS_LAST, "pooling and convolutions of this size are faster on the CPU with the channels last"


def order(model: nn.Module) -> str | dict[str, list[int]]:
    """Return the storage order of the trained parameters, for a run's identity. Flat rows are in this order.

    "preserve" if all are contiguous, "channels_last" if all 4-d parameters are in that order and the others contiguous,
    else a table of the strides of parameters that are not contiguous.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    exceptions = {name: p for name, p in parameters.items() if p.stride() != _strides(p, torch.contiguous_format)}
    if not exceptions:
        return PRESERVE
    images = {name: p for name, p in parameters.items() if p.dim() == 4}
    is_last = all(p.stride() == _strides(p, torch.channels_last) for p in images.values())
    if is_last and exceptions.keys() <= images.keys():
        return CHANNELS_LAST
    return {name: list(p.stride()) for name, p in exceptions.items()}


def _strides(p: Tensor, format: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape in a format. (`is_contiguous` does not distinguish the formats of a
    weight with one input channel.)"""
    return torch.empty(p.shape, memory_format=format, device="meta").stride()


def keep_freed(device: torch.device) -> None:
    """Let glibc keep the memory that a step frees for the next step, in a run on the CPU.

    glibc maps blocks above a threshold anew and returns free memory at the heap's end, in each step of a model with
    large activations: tens of thousands of page faults a round. Freeing a mapped block raises its thresholds to the
    size of the block (twice the size for the heap's end), up to 32 MiB. A run's blocks raise them far enough only by
    chance. Therefore one block of that size is allocated and freed. It is never touched, and a larger model would have
    the same effect. Thresholds that the user has set stay.
    """
    if device.type == "cpu" and sys.platform == "linux":
        block = torch.empty(_BLOCK, dtype=torch.uint8)
        del block


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`; `fordblks` is the number of free bytes in all heaps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


@functools.cache
def _glibc() -> Any:
    """Return the C library if it is a glibc that tells how much of its heaps is free, else None."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _Heap
    return library


def return_freed() -> None:
    """Return the free memory of glibc's heaps to the system if it is more than 32 MiB.

    glibc before 2.38 can seldom use a freed aligned block again (its bug 14581). If the tensors that a round keeps lie
    between freed ones, the free memory grows with every round: by 0.7 MB for FedSMOO with ten clients of 50,000
    parameters.
    """
    glibc = _glibc()
    if glibc is not None and glibc.mallinfo2().fordblks > _MAX_FREED:
        glibc.malloc_trim(0)
