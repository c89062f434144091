"""Checks of the tensors that `FusedSAM` can optimize, at construction and after they changed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastsam.arena import is_dense
from fastsam.optim.sharded import to_local, why_not


def parameters_of(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return all parameters of all groups, in order."""
    return [p for group in groups for p in group["params"]]


def check(params: Sequence[Tensor]) -> None:
    """Raise TypeError or ValueError for parameters that cannot be optimized. Messages count them from 0."""
    index_of: dict[int, int] = {}
    for i, p in enumerate(params):
        _check_one(i, p)
        if id(p) in index_of:
            raise ValueError(
                f"duplicate parameters: parameter {i} is parameter {index_of[id(p)]} again; pass every parameter once"
            )
        index_of[id(p)] = i
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on several devices ({', '.join(devices)}), but the norm of SAM is one number over all "
            "of them; move the model to one device, or use one FusedSAM per device (each then has its own norm)"
        )
    _check_overlap(list(map(to_local, params)))


def check_given(params: Any) -> None:
    """Raise TypeError if `params` is not a collection of parameters, in particular for a module."""
    module = isinstance(params, torch.nn.Module)
    if module or not isinstance(params, Iterable):
        hint = "; pass model.parameters()" if module else ""
        raise TypeError(f"params must be parameters or parameter groups, got {type(params).__name__}{hint}")


def check_not_zero_redundancy() -> None:
    """Raise TypeError if a ZeroRedundancyOptimizer makes the caller, which would have the norm of one rank."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        kinds = type(frame.f_locals.get("self")).__mro__ if frame.f_code.co_name == "_init_local_optimizer" else ()
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in kinds):
            raise TypeError(
                "ZeroRedundancyOptimizer(optimizer_class=FusedSAM) would give each rank a FusedSAM of a part of the "
                "parameters, with a separate norm. Put it inside: FusedSAM(model.parameters(), "
                "ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=...)"
            )
        frame = frame.f_back


def check_not_private(params: Sequence[Tensor]) -> None:
    """Raise ValueError for parameters of Opacus, which would sum both passes of a step into one gradient."""
    if any(hasattr(p, "summed_grad") for p in params):  # which its DPOptimizer gives them
        raise ValueError(
            "the parameters belong to a DPOptimizer of Opacus, which would add the gradients of both passes of a step. "
            "SAM under Opacus is not served; a variant of one pass is: FusedSAM(..., variant=fastsam.MSAM(rho=0.3))"
        )


def check_no_duplicates(params: Sequence[Any]) -> None:
    """Raise ValueError if a group has a parameter twice (torch only warns). `params` may be pairs of name and
    parameter."""
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    if len(set(map(id, tensors))) != len(tensors):
        raise ValueError("a parameter group with duplicate parameters: pass every parameter once")


def _check_one(i: int, p: Tensor) -> None:
    reason = why_not(p)
    if reason is not None:
        raise TypeError(f"parameter {i} is {reason}")
    p = to_local(p)
    if is_traceable_wrapper_subclass(p):
        raise TypeError(
            f"parameter {i} is a {type(p).__name__}, which wraps other tensors; FusedSAM needs plain tensors"
        )
    if not p.is_floating_point():
        raise ValueError(
            f"parameter {i} has dtype {p.dtype}; FusedSAM optimizes float32, float64, float16 and bfloat16. Leave it "
            f"out" + (", or optimize torch.view_as_real of it" if p.is_complex() else "")
        )
    if p.layout != torch.strided:
        raise ValueError(f"parameter {i} has layout {p.layout}; FusedSAM needs dense (torch.strided) parameters")
    if not has_memory(p):
        raise ValueError(
            f"parameter {i} of shape {tuple(p.shape)} needs {_end(p)} bytes of its storage, and its storage has "
            f"{p.untyped_storage().nbytes()}: it was freed or cut, as sharding libraries do; make a step while the "
            "parameters are whole"
        )


def _check_overlap(params: Sequence[Tensor]) -> None:
    if any(p.device.type == "meta" for p in params):
        return  # no memory, so nothing to share
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent(p), i) for i, p in enumerate(params) if p.numel())
    cluster: list[tuple[int, int, int]] = []  # spans that run into each other
    end = 0
    for span in spans:
        if cluster and span[0] >= end:
            _check_cluster(params, cluster)
            cluster = []
        cluster.append(span)
        end = max(end, span[1])
    _check_cluster(params, cluster)


def has_memory(p: Tensor) -> bool:
    """Return False if the storage of `p` ends before its last element."""
    return p.numel() == 0 or _end(p) <= p.untyped_storage().nbytes()


def _end(p: Tensor) -> int:
    """Return the bytes from the start of the storage to the end of the last element."""
    return int(p.storage_offset()) * p.element_size() + _extent(p)


def _extent(p: Tensor) -> int:
    """Return the bytes from the first element to the end of the last element."""
    return (sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True)) + 1) * p.element_size()


def _check_cluster(params: Sequence[Tensor], cluster: Sequence[tuple[int, int, int]]) -> None:
    """Raise ValueError if two parameters share an element.

    It marks the bytes of each parameter, because slices of one matrix may interleave and share no element.
    """
    if not cluster or (len(cluster) == 1 and is_dense(params[cluster[0][2]])):
        return
    start, end = cluster[0][0], max(span[1] for span in cluster)
    coverage = torch.zeros(end - start, dtype=torch.uint8, device="cpu")
    total = 0
    for begin, _, i in cluster:
        p, size = params[i], params[i].element_size()
        cells = coverage.as_strided((*p.shape, size), (*(s * size for s in p.stride()), 1), begin - start)
        if cells.any():
            overlaps = [j for _, _, j in cluster if j != i]
            raise ValueError(
                f"parameter {i} shares memory with another parameter (one of {overlaps}), so one update would undo "
                "the other; tie weights by using one Parameter in both places, and pass it once"
            )
        cells.fill_(1)
        total += p.numel() * size
        if int(coverage.sum()) != total:
            raise ValueError(
                f"parameter {i} of shape {tuple(p.shape)} has strides {p.stride()}: several of its elements are one "
                "place in memory (an expanded tensor); pass p.clone()"
            )
