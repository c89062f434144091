"""The compiled backend: C++ on the CPU and CUDA on GPUs, with one set of op schemas (`csrc/ops.cpp`).

The functions have the names and the meaning of `reference`. The libraries come from the installed package, or, with
FASTSAM_JIT=1, from a cache where they are built at first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .direct_calls import CudaDirectCalls, DirectCalls
from .libraries import OPS as _OPS
from .libraries import build_hint as build_hint
from .libraries import why_not as why_not
from .rule import UpdateOptions, pad_state

_increment_version = torch._C._increment_version
_ops = torch.ops.fastsam


def direct_calls(params: Sequence[Tensor], backup: Tensor | None, table: Tensor, hparams: Tensor) -> Any:
    """Return `direct_calls.DirectCalls`, or on a GPU `direct_calls.CudaDirectCalls`: faster calls of a step on these
    operands.

    Returns None during the capture of a CUDA graph. `backup` is None for weights that are updated in place and
    perturbed in separate tensors.
    """
    if params[0].device.type == "cpu":
        return DirectCalls(params, backup, table, hparams)
    # Memory allocated during a graph's capture belongs to the graph and is filled only in its replay.
    return None if torch.cuda.is_current_stream_capturing() else CudaDirectCalls(params, backup, table, hparams)


def _wrote(params: Sequence[Tensor]) -> None:
    """Tell autograd that the weights changed, so that a graph that saved them raises and gives no wrong gradients."""
    if not torch.compiler.is_compiling():
        _increment_version(params)


def _function(name: str, writes_weights: bool) -> Callable[..., None]:
    """Return the op `name` as a function of `reference`'s arguments."""

    def call(*operands: Any, **options: Any) -> None:
        getattr(_ops, name).default(*operands, **options)
        if writes_weights:
            _wrote(operands[0])

    call.__name__, call.__doc__ = name, f"See `reference.{name}`."
    return call


norm_, perturb_, restore_, dual_norm_, dual_perturb_, inner_, accumulate_ = (
    _function(name, name in ("perturb_", "restore_", "dual_perturb_")) for name in _OPS[:-2]
)


def update_norm_(
    sumsq: Tensor,
    params: Sequence[Tensor],
    backup: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    grad_scale: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """See `reference.update_norm_`."""
    _ops.update_norm_.default(sumsq, params, backup, grads, table, hparams, g1 or (), q, grad_scale, accumulate)


def update_(
    params: Sequence[Tensor],
    backup: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    rule: str,
    state: Sequence[Tensor | None] = (),
    **options: Any,
) -> None:
    """See `reference.update_`."""
    steps, g1, *others = UpdateOptions(**options)
    operands = params, backup, grads, table, hparams, rule, *pad_state(state)
    _ops.update_.default(*operands, steps, g1 or (), *others)
    _wrote(params)


def update_calls(
    params: Sequence[Tensor],
    backup: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    rule: str,
    state: Sequence[Tensor | None],
    **options: Any,
) -> list[partial[Any]]:
    """Return `update_` as a list of calls to make in order.

    The calls execute no line of Python code, so that no signal is handled between them.
    """
    steps, g1, *others = UpdateOptions(**options)
    operands = params, backup, grads, table, hparams, rule, *pad_state(state)
    # The overload is a Python function around `_op`. An interrupt in it could come after the update was made.
    function = partial(_ops.update_.default._op, *operands, steps, g1 or (), *others)
    return [function, partial(_increment_version, params)]
