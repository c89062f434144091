"""Parameters that are split among ranks (`fully_shard`, tensor parallelism): the local shard, and sums over all shards.

The kernels see only local tensors. Numbers of the whole model are summed over the shards, along the mesh dimensions in
which a parameter is sharded and not along those in which it is replicated, so each element counts once. This module
does not import torch.distributed; users of such parameters do.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Axis(NamedTuple):
    """Ranks among which parameters are split."""

    group: Any  # torch.distributed.ProcessGroup
    device: str  # where it takes tensors from


Axes = tuple[Axis, ...]


def is_sharded(tensor: Tensor) -> bool:
    """Return True if it is a DTensor, split or replicated."""
    # Looked up among the loaded modules: importing DTensor takes a second, and a tensor that is one has imported it.
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def local(tensor: Tensor) -> Any:
    """Return the local tensor of a DTensor, or any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    here = tensor._local_tensor  # type: ignore[attr-defined]  # `to_local()` of a Parameter is another view each time
    return here.wait() if hasattr(here, "wait") else here  # on its way from other ranks


def axes_of(parameter: Tensor) -> Axes:
    """Along what a parameter is split; none for a parameter that each rank has all of."""
    if not is_sharded(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return tuple(
        Axis(mesh.get_group(i), mesh.device_type)
        for i, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(i) > 1
    )


def why_not(parameter: Tensor) -> str | None:
    """Return the reason why a parameter cannot be optimized, with a remedy, or None."""
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        return (
            "sharded by FullyShardedDataParallel (FSDP1), which flattens parameters: use "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if not is_sharded(parameter):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        return f"a DTensor on {mesh}, which this rank is no part of: build the optimizer on the mesh's ranks alone"
    for placement in placements:
        if not placement.is_replicate() and not (hasattr(placement, "dim") and not placement.is_partial()):
            return (
                f"a DTensor placed as {tuple(placements)}: FusedSAM takes Shard and Replicate; call redistribute() "
                f"first"
            )
    return None


def refuse_options(stochastic_rounding: bool, exclusive: bool) -> None:
    """Raise ValueError for options that are wrong or useless with DTensor parameters."""
    if stochastic_rounding:
        raise ValueError(
            "stochastic_rounding=True with DTensor parameters: its random bits depend on where a rank has a weight, so "
            "that repeated weights would "
            "differ between ranks; leave it out, or shard float32 weights "
            "(MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    if exclusive:
        raise ValueError(
            "assume_no_alias=True cannot be used with DTensor parameters, because their memory is managed elsewhere. "
            "Leave it out"
        )


# --- between ranks ---


def summed(calls: Iterable[Any], like: Tensor, add: Callable[[Any, Any, Any, Tensor], object]) -> Tensor:
    """The sum over all elements of all parameters, in a fixed order. calls: for each bucket, also without gradients,
    what `add(*call, total)` adds to a tensor like `like`."""
    parts: dict[Axes, Tensor] = {}
    for bucket, selection, grads in calls:
        total = parts.setdefault(bucket.axes, torch.zeros_like(like))
        if selection.slots:
            add(bucket, selection, grads, total)
    if any(parts):
        for axis in dict.fromkeys(axis for axes in parts for axis in axes):
            _add_up([total for axes, total in parts.items() if axis in axes], axis)
    return sum(parts.values(), torch.zeros_like(like))


def _add_up(totals: Sequence[Tensor], axis: Axis) -> None:
    """One all-reduce for all of them."""
    together = torch.stack(list(totals)).to(axis.device)
    torch.distributed.all_reduce(together, group=axis.group)
    for total, found in zip(totals, together.to(totals[0].device), strict=True):
        total.copy_(found)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The local part of its gradient, which is brought to the parameter's own placements where it has others."""
    grad = parameter.grad
    if grad is None or not is_sharded(parameter):
        return grad
    if not is_sharded(grad):
        raise RuntimeError(
            f"the gradient of a DTensor parameter of shape {tuple(parameter.shape)} is a {type(grad).__name__} and "
            f"says nothing of its placements"
        )
    if grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local(grad)


# --- state ---


def placed(here: Tensor, parameter: Tensor) -> Tensor:
    """Return a local tensor as a DTensor, placed as the parameter, or as it is for other parameters."""
    if not is_sharded(parameter):
        return here
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    make = sys.modules["torch.distributed.tensor"].DTensor.from_local
    return make(here, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def part_of(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a state's value for the local shard. `value` has the parameter's shape, whole or placed in any
    way."""
    if not is_sharded(parameter):
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if not is_sharded(value):
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        return local(distribute(value.to(local(parameter).device), mesh, placements, src_data_rank=None))
    if value.device_mesh != mesh:  # type: ignore[attr-defined]
        return part_of(value.full_tensor(), parameter)  # type: ignore[attr-defined]
    return local(value.redistribute(placements=placements))  # type: ignore[attr-defined]


# --- gathered copies ---


def gathering(params: Iterable[Tensor]) -> list[weakref.ref[Any]]:
    """The modules by which `fully_shard` gathers some of these parameters."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or "torch.distributed.fsdp" not in sys.modules:
        return []
    ours, kind = set(map(id, params)), sys.modules["torch.distributed.fsdp"].FSDPModule
    return [
        weakref.ref(module)
        for module in list(states._module_state_mapping)  # private to torch, which keeps no other list of them
        if isinstance(module, kind) and any(id(p) in ours for p in _gathered_by(module))
    ]


def _gathered_by(module: Any) -> list[Tensor]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12
    groups = [state._fsdp_param_group] if groups is None else groups
    return [p.sharded_param for group in groups if group is not None for p in group.fsdp_params]


def drop_gathered(modules: Iterable[weakref.ref[Any]]) -> None:
    """Weights were written: gathered copies that a pass left are older, and the next pass must not use them. A root
    module keeps its copy after a forward pass without a backward pass."""
    for ref in modules:
        module = ref()
        if module is not None:
            module.reshard()
