"""What a FusedSAM keeps per parameter, in torch's own names and formats, in and out of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._buckets import Bucket

FIELDS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}
ORIGIN = {True: "master", False: "unperturbed"}  # what a bucket's origin is called in a state dict: with and without a master copy


def begin(bucket: Bucket, kind: str, slot: int, state: dict[Parameter, dict[str, Any]]) -> None:
    """The state of a parameter that is updated for the first time: views of zeroed fields, under torch's names."""
    entry = state[bucket.params[slot]]
    for name in FIELDS[kind]:
        field = bucket.field(name)
        view = bucket.layout.views(field[0])[slot]
        entry[name] = view.zero_()
    if kind == "adam":
        entry["step"] = bucket.steps[0, slot].zero_()
    bucket.fresh.discard(slot)


def export(buckets: list[Bucket], perturbed: bool) -> dict[Parameter, dict[str, Tensor]]:
    """What is kept beside torch's state: master copies, and while perturbed the unperturbed weights."""
    out: dict[Parameter, dict[str, Tensor]] = {}
    for bucket in buckets:
        if bucket.master or perturbed:
            views = bucket.views("origin")
            out |= {p: {ORIGIN[bucket.master]: view} for p, view in zip(bucket.params, views, strict=True)}
    return out


def adopt(bucket: Bucket, kind: str | None, saved: Mapping[Parameter, Mapping[str, Any]], state: dict[Parameter, dict[str, Any]]) -> None:
    """Takes over `saved`, per parameter, into the fields of a new or reset bucket and into `state`; values are converted, nothing is aliased."""
    origins = bucket.views("origin")
    names = FIELDS.get(kind or "", ())
    for slot, p in enumerate(bucket.params):
        entry = dict(saved.get(p, {}))
        for key in ORIGIN.values():
            value = entry.pop(key, None)
            if value is not None:
                origins[slot].copy_(value)
        if kind is not None and any(isinstance(entry.get(name), Tensor) for name in names):
            begin(bucket, kind, slot, state)
            for name in (*names, "step") if kind == "adam" else names:
                if entry.get(name) is not None:
                    state[p][name].copy_(torch.as_tensor(entry.pop(name)))
        if kind is None and entry:
            state[p] = entry


def check(state_dict: Mapping[str, Any], param_groups: list[dict[str, Any]]) -> None:
    """Raises ValueError when a state dict is not of these parameters; nothing is changed."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"a state dict must have 'state' and 'param_groups', got {sorted(map(str, state_dict))}")
    ours, theirs = [len(g["params"]) for g in param_groups], [len(g["params"]) for g in state_dict["param_groups"]]
    if ours != theirs:
        raise ValueError(f"the state dict is of another model: its parameter groups have {theirs} parameters, this optimizer's {ours}")
    ids = [i for g in state_dict["param_groups"] for i in g["params"]]
    params = [p for g in param_groups for p in g["params"]]
    for position, (i, p) in enumerate(zip(ids, params, strict=True)):
        for name, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise ValueError(
                    f"the state dict is of another model: {name!r} of parameter {position} has shape {tuple(value.shape)}, the parameter {tuple(p.shape)}"
                )
