"""The compiled backend: C++ on the CPU, CUDA on GPUs, behind one set of op schemas (`csrc/ops.cpp`).

The functions have the names and the meaning of `reference`. The libraries come from the installed package, or, with
FASTSAM_JIT=1, from a cache where they are built at first use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import build
from .rule import all_fields

_OPS = (
    "norm_",
    "perturb_",
    "restore_",
    "dual_norm_",
    "dual_perturb_",
    "inner_",
    "accumulate_",
    "update_norm_",
    "update_",
)


_increment_version = torch._C._increment_version
_libraries: dict[str, str] = {}


@functools.cache
def _load() -> dict[str, str | None]:
    """Loads what there is; per device type the reason why it cannot serve, None when it can."""
    cuda_reason = None if torch.cuda.is_available() else "torch sees no CUDA device"
    try:
        found = build.installed()
        if not found.paths and os.environ.get("FASTSAM_JIT") == "1":
            found = build.jit()
    except build.BuildError as error:
        return {"cpu": str(error), "cuda": cuda_reason or str(error)}
    if "cpu" not in found.paths:
        return {"cpu": found.message, "cuda": cuda_reason or found.message}
    reasons: dict[str, str | None] = {"cpu": _load_library(str(found.paths["cpu"]))}
    if reasons["cpu"] is not None:
        return {"cpu": reasons["cpu"], "cuda": cuda_reason or reasons["cpu"]}
    _libraries["cpu"] = str(found.paths["cpu"])
    for name in _OPS:
        torch.library.register_fake(f"fastsam::{name}", functools.partial(_infer_nothing, name))
    if cuda_reason is None:
        missing = f"no compiled CUDA library ({found.message}); `{build.COMMAND}` with nvcc compiles it"
        cuda_reason = _load_library(str(found.paths["cuda"])) if "cuda" in found.paths else missing
        _libraries["cuda"] = str(found.paths.get("cuda"))
    reasons["cuda"] = cuda_reason
    return reasons


def _infer_nothing(name: str, *operands: Any) -> None:
    """Every op writes its arguments and returns nothing. A real tensor beside one without memory is an error, and not a
    call that does nothing."""
    schema = getattr(torch.ops.fastsam, name).default._schema
    of = {argument.name: operand for argument, operand in zip(schema.arguments, operands, strict=False)}
    table = of.pop("table", None)
    lists = (operand if isinstance(operand, (list, tuple)) else [operand] for operand in of.values())
    devices = {tensor.device for operand in lists for tensor in operand if isinstance(tensor, Tensor)}
    if len(devices) > 1 or (table is not None and table.device.type != "cpu"):
        found = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"{name}: the table must be on the CPU, and all other tensors on one device, got {found}")


def _load_library(path: str) -> str | None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} cannot be loaded: {error}; `{build.COMMAND}` rebuilds it"
    return None


def why_not(device: str) -> str | None:
    """Why the compiled kernels cannot serve on this device type; None when they can."""
    return _load().get(device, f"there are no compiled kernels for the device {device!r}")


def library(device: str = "cpu") -> str:
    """The file of the kernels that serve on this device type. Raises RuntimeError with the reason when none do."""
    if (reason := why_not(device)) is not None:
        raise RuntimeError(reason)
    return _libraries[device]


def build_hint() -> str:
    """What would give the compiled kernels that are missing: the command, and what has to be installed before it."""
    if why_not("cpu") is None:
        return f"With nvcc on PATH `{build.COMMAND}` builds the kernels for GPUs"
    reason = build.why_not()
    if reason is None:
        return f"A compiler is here: `{build.COMMAND}` builds them (or set FASTSAM_JIT=1 to build them at first use)"
    return f"To get them: {reason}; then run `{build.COMMAND}`"


def raw_calls(z: Sequence[Tensor], origin: Tensor | None, table: Tensor, hyper: Tensor) -> Any:
    """A shorter way to the calls of a step on these operands: `raw_calls.RawCalls` or, on a GPU, `raw_calls.CudaCalls`;
    None where there is none.
    origin: None for weights that are perturbed apart and updated in place."""
    from .raw_calls import CudaCalls, RawCalls

    if z[0].device.type == "cpu":
        return RawCalls(z, origin, table, hyper)
    # What is allocated while a graph is captured is the graph's, and filled when that is replayed.
    return None if torch.cuda.is_current_stream_capturing() else CudaCalls(z, origin, table, hyper)


def _wrote(z: Sequence[Tensor]) -> None:
    """Tells autograd that the weights changed: a graph that saved them then raises instead of giving wrong
    gradients."""
    if not torch.compiler.is_compiling():
        _increment_version(z)


def _function(name: str, writes_weights: bool) -> Callable[..., None]:
    """Return the op `name` as a function of `reference`'s arguments."""

    def call(*operands: Any, **options: Any) -> None:
        getattr(torch.ops.fastsam, name).default(*operands, **options)
        if writes_weights:
            _wrote(operands[0])

    call.__name__, call.__doc__ = name, f"See `reference.{name}`."
    return call


norm_, perturb_, restore_, dual_norm_, dual_perturb_, inner_, accumulate_ = (
    _function(name, name in ("perturb_", "restore_", "dual_perturb_")) for name in _OPS[:-2]
)


def update_norm_(
    sumsq: Tensor,
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    grad_scale: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """See `reference.update_norm_`."""
    torch.ops.fastsam.update_norm_.default(sumsq, z, origin, grads, table, hyper, g1 or (), q, grad_scale, accumulate)


def update_(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    rule: str,
    state: Sequence[Tensor | None] = (),
    *,
    steps: Tensor | None = None,
    g1: Sequence[Tensor] | None = None,
    **options: Any,
) -> None:
    """See `reference.update_`."""
    operands = z, origin, grads, table, hyper, rule, *all_fields(state), steps, g1 or ()
    torch.ops.fastsam.update_.default(*operands, **options)
    _wrote(z)


def update_calls(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    rule: str,
    state: Sequence[Tensor | None],
    *,
    steps: Tensor | None,
    g1: Sequence[Tensor] | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    first: bool,
    keep: bool,
) -> list[partial[Any]]:
    """`update_` as calls to make in order: without a line of Python in them, so that no signal is handled between
    them."""
    operands = z, origin, grads, table, hyper, rule, *all_fields(state), steps, g1 or ()
    options = None, None, grad_scale, found_inf, first, keep, None
    # The overload itself is Python around `_op`, where an interrupt would come after the update was made.
    return [partial(torch.ops.fastsam.update_.default._op, *operands, *options), partial(_increment_version, z)]
