"""A case of every class of local steps, with arguments for `fed_seam.Constants`, and all algorithms with schedules, so
that every number of their steps changes from round to round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.algorithms.distillation import Taught, divergence
from fastsam.fed.algorithms.fedgf import Pulled
from fastsam.fed.algorithms.fedgsam import SurrogateGap
from fastsam.fed.algorithms.fedscam import Piloted
from fastsam.fed.algorithms.fedsmoo import DualSAM
from fastsam.fed.algorithms.fedsol import Orthogonal
from fastsam.fed.algorithms.fedswa import Falling
from fastsam.fed.algorithms.fedtoga import Remembering
from fastsam.fed.algorithms.fedwmsam import AlongPath
from fastsam.fed.algorithms.mimelite import WithFullGradient
from tests.promises import cases

VectorOf = Callable[[Tensor, fed.ParameterLayout], Tensor]


def w(row: Tensor, layout: fed.ParameterLayout) -> Tensor:
    return row


def near_w(row: Tensor, layout: fed.ParameterLayout) -> Tensor:
    return 0.9 * row


def ones(row: Tensor, layout: fed.ParameterLayout) -> Tensor:
    return layout.flatten({name: torch.ones_like(p) for name, p in layout.template.named_parameters()})


def third(row: Tensor, layout: fed.ParameterLayout) -> Tensor:
    return row.new_full((1, 1), 0.3, dtype=torch.float64)


def term(row: Tensor, layout: fed.ParameterLayout) -> Callable[..., Tensor]:
    return distillation


def distillation(teacher_outputs: Tensor, y: Tensor, outputs: Tensor) -> Tensor:
    return divergence(outputs, teacher_outputs, 2.0)


RHO: dict[str, Any] = {"rho": 0.3}
STEPS: dict[str, tuple[type[fed.Step], dict[str, Any]]] = {
    "plain": (fed.Step, {}),
    "q and a": (fed.Step, {"q": w, "a": 0.7}),
    "prox": (fed.Step, {"prox": 0.2, "q": w}),
    "start": (fed.Step, {"start": near_w}),
    "state": (fed.Step, {"state": {}}),
    "sam": (fed.SAM, RHO),
    "asam": (fed.SAM, {**RHO, "eta": 0.01, "adaptive": True}),
    "two gradients": (fed.SAM, {**RHO, "a": 0.6, "b": 0.4}),
    "shifted": (fed.Shifted, {**RHO, "e": w, "prox": 0.2}),
    "falling": (Falling, {"end": 0.5}),
    "gap": (SurrogateGap, {**RHO, "b": -0.3}),
    "dual": (DualSAM, {**RHO, "dual": ones, "s": w, "penalty": 0.7}),
    "path": (AlongPath, {**RHO, "D": w}),
    "last gradient": (Remembering, {**RHO, "e": w}),
    "pulled": (Pulled, {**RHO, "p": ones, "c": third}),
    "orthogonal": (Orthogonal, {**RHO, "tau": 2.0}),
    "piloted": (Piloted, {**RHO, "u": w, "algorithm": fed.FedSCAM(pilots=1)}),
    "full gradient": (WithFullGradient, {"q": w}),
    "taught": (Taught, {"term": term}),
    "taught by another": (Taught, {"term": term, "teacher": ones}),
}

# --- algorithms ---


def layer_normed(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model that all these algorithms train, also FedBN; its weights depend on no generator."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


_FIRST = {name: key for key, (name, _) in reversed(cases.METHODS.items())}
_FACTORS = {"phi_decay": 0.7}


def scheduled(algorithm: fed.Algorithm) -> fed.Algorithm:
    """Return the algorithm with a schedule for each number that takes one."""
    changes: dict[str, Any] = {}
    for field in fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        if field.type == "Scheduled" and value:
            changes[field.name] = f"{value}/round"
        elif field.name in _FACTORS:
            changes[field.name] = _FACTORS[field.name]
    return replace(algorithm, **changes)  # type: ignore[type-var]


ALGORITHMS: dict[str, fed.Algorithm] = {
    name: scheduled(cases.make_algorithm(_FIRST[cls.__name__]) if cls.__name__ in _FIRST else cls())
    for name, cls in fed.algorithms.registry.items()
} | {
    "fedadamw-sam": scheduled(fed.FedAdamW(rho=0.1)),
    "fedlesam-none": scheduled(cases.make_algorithm("fedlesam-none")),
    "fedsam-asam": scheduled(cases.make_algorithm("fedsam-asam")),
    "fedgsam-schedule": cases.make_algorithm("fedgsam-schedule"),
}
