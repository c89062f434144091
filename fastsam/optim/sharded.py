"""Parameters that are split among ranks (`fully_shard`, tensor parallelism): the local shard, and sums over all shards.

The kernels see only local tensors. Numbers of the whole model are summed over the shards, along the mesh dimensions in
which a parameter is sharded. They are not summed along dimensions in which it is replicated, so each element counts
once. This module does not import torch.distributed, because the user of such parameters has imported it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ShardGroup(NamedTuple):
    """Ranks among which parameters are split."""

    group: Any  # torch.distributed.ProcessGroup
    device: str  # where it takes tensors from


ShardGroups = tuple[ShardGroup, ...]


def is_dtensor(tensor: Tensor) -> bool:
    """Return True if it is a DTensor, split or replicated."""
    # Looked up among the loaded modules: importing DTensor takes a second, and a tensor that is one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Any:
    """Return the local tensor of a DTensor, or any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    local = tensor._local_tensor  # type: ignore[attr-defined]  # `to_local()` of a Parameter is another view each time
    return local.wait() if hasattr(local, "wait") else local  # on its way from other ranks


def shard_groups_of(parameter: Tensor) -> ShardGroups:
    """Return the groups of ranks among which a parameter is split; none if each rank has the whole parameter."""
    if not is_dtensor(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return tuple(
        ShardGroup(mesh.get_group(i), mesh.device_type)
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
    if not is_dtensor(parameter):
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


def check_options(stochastic_rounding: bool, exclusive: bool) -> None:
    """Raise ValueError for options that are wrong or useless with DTensor parameters."""
    if stochastic_rounding:
        raise ValueError(
            "stochastic_rounding=True with DTensor parameters: its random bits depend on where a rank has a weight, so "
            "that repeated weights would differ between ranks; leave it out, or shard float32 weights "
            "(MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    if exclusive:
        raise ValueError(
            "assume_no_alias=True cannot be used with DTensor parameters, because their memory is managed elsewhere. "
            "Leave it out"
        )


# --- between ranks ---


def all_reduced(calls: Iterable[Any], like: Tensor, add: Callable[[Any, Any, Any, Tensor], object]) -> Tensor:
    """Return the sum over all elements of all parameters, in a fixed order. `add` adds the part of a call (bucket,
    selection and tensors) to its last argument, a tensor like `like`."""
    parts: dict[ShardGroups, Tensor] = {}
    for bucket, selection, grads in calls:
        total = parts.setdefault(bucket.shard_groups, torch.zeros_like(like))
        if selection.slots:
            add(bucket, selection, grads, total)
    if any(parts):
        for axis in dict.fromkeys(axis for axes in parts for axis in axes):
            _add_up([total for axes, total in parts.items() if axis in axes], axis)
    return sum(parts.values(), torch.zeros_like(like))


def _add_up(totals: Sequence[Tensor], axis: ShardGroup) -> None:
    """Add up all totals in one all-reduce."""
    stacked_totals = torch.stack(list(totals)).to(axis.device)
    torch.distributed.all_reduce(stacked_totals, group=axis.group)
    for total, value in zip(totals, stacked_totals.to(totals[0].device), strict=True):
        total.copy_(value)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the local part of the gradient, which is redistributed if it has other placements than its parameter."""
    grad = parameter.grad
    if grad is None or not is_dtensor(parameter):
        return grad
    if not is_dtensor(grad):
        raise RuntimeError(
            f"the gradient of a DTensor parameter of shape {tuple(parameter.shape)} is a {type(grad).__name__} and "
            f"says nothing of its placements"
        )
    if grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return to_local(grad)


# --- state ---


def as_dtensor_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a local tensor as a DTensor, placed as the parameter, or as it is for other parameters."""
    if not is_dtensor(parameter):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    make = sys.modules["torch.distributed.tensor"].DTensor.from_local
    return make(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def local_part_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a state's value, whole or with any placements, for the local shard of a parameter."""
    if not is_dtensor(parameter):
        return value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if not is_dtensor(value):
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        return to_local(distribute(value.to(to_local(parameter).device), mesh, placements, src_data_rank=None))
    if value.device_mesh != mesh:  # type: ignore[attr-defined]
        return local_part_like(value.full_tensor(), parameter)  # type: ignore[attr-defined]
    return to_local(value.redistribute(placements=placements))  # type: ignore[attr-defined]


# --- gathered copies ---


def fsdp_modules_of(params: Iterable[Tensor]) -> list[weakref.ref[Any]]:
    """Return the modules by which `fully_shard` gathers some of these parameters."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or "torch.distributed.fsdp" not in sys.modules:
        return []
    param_ids, kind = set(map(id, params)), sys.modules["torch.distributed.fsdp"].FSDPModule
    return [
        weakref.ref(module)
        for module in list(states._module_state_mapping)  # private to torch, which keeps no other list of them
        if isinstance(module, kind) and any(id(p) in param_ids for p in _gathered_params(module))
    ]


def _gathered_params(module: Any) -> list[Tensor]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12
    groups = [state._fsdp_param_group] if groups is None else groups
    return [p.sharded_param for group in groups if group is not None for p in group.fsdp_params]


def reshard(modules: Iterable[weakref.ref[Any]]) -> None:
    """Drop gathered copies of weights that were written since, which the next pass must not use. A root module keeps
    its copy after a forward pass without a backward pass."""
    for ref in modules:
        module = ref()
        if module is not None:
            module.reshard()
