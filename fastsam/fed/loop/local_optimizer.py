"""The optimizer of the local steps (the option `optimizer` of a run), and its learning rate and momentum."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn

from fastsam.fed.common.checks import nearest, number
from fastsam.fed.loop.rates import Rate
from fastsam.optim import Lion

Optimizer = Callable[..., torch.optim.Optimizer]
DEFAULT_LR = 0.1  # SGD's own default in torch (1e-3) is far below the rates of the papers


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about the local steps of a run that algorithms compute with.

    Attributes:
        momentum, dampening, nesterov: heavy-ball momentum, as in `torch.optim.SGD`.
        problem: reason why rate or momentum cannot be known, or "".
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    problem: str = ""


def optimizer_of(optimizer: str | Optimizer | None) -> Optimizer | None:
    """Return an optimizer class by its name in `torch.optim`, or "Lion", or `optimizer` itself. Raises ValueError
    otherwise."""
    classes = {name: c for name, c in vars(torch.optim).items() if isinstance(c, type)} | {"Lion": Lion}
    if isinstance(optimizer, str) and optimizer in classes:
        return classes[optimizer]
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        close = nearest(optimizer, classes) if isinstance(optimizer, str) else ""
        raise ValueError(
            f"optimizer must be a class of torch.optim or its name, or a partial such as partial(torch.optim.AdamW, "
            f"lr=1e-3); got {optimizer!r}{close}"
        )
    return optimizer


def with_own_optimizer(options: Mapping[str, Any], algorithm: object) -> dict[str, Any]:
    """Return options of a run, with the optimizer of the algorithm if none is named."""
    name = getattr(algorithm, "local_optimizer", None)
    return {**options, "optimizer": name} if options["optimizer"] is None else dict(options)


def split_rate(lr: Rate | None, optimizer: Optimizer | None) -> tuple[Rate | None, Optimizer | None]:
    """Return the learning rate of a run, and its optimizer without a rate.

    A partial's rate is the run's rate. Otherwise it is `lr`, or the optimizer's default. The rate is None if the
    optimizer takes none. Raises ValueError for two different rates, and for a rate that the optimizer does not take.
    """
    if optimizer is None:
        return DEFAULT_LR if lr is None else lr, None
    if not takes_lr(optimizer):
        if lr is not None:
            raise ValueError(
                f"lr={lr!r} needs an optimizer that takes lr, but {_name(optimizer)} does not. Leave out lr, or use a "
                "class of torch.optim"
            )
        return None, optimizer
    if isinstance(optimizer, partial) and "lr" in optimizer.keywords:
        own_lr = number("lr of the optimizer", optimizer.keywords["lr"], greater_than=0)
        if lr is not None and lr != own_lr:
            raise ValueError(
                f"lr={lr!r} needs an optimizer without a rate, but the optimizer has lr={own_lr:g}. Leave out one of "
                "the two"
            )
        keywords = {name: value for name, value in optimizer.keywords.items() if name != "lr"}
        return own_lr, partial(optimizer.func, *optimizer.args, **keywords)
    return _default_lr(optimizer) if lr is None else lr, optimizer


def takes_lr(optimizer: Optimizer) -> bool:
    """Return True if the optimizer, a class or a function that makes one, has an argument `lr`."""
    parameters = _parameters(optimizer)
    return parameters is None or "lr" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _parameters(optimizer: Optimizer) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of the optimizer by name, None for compiled code."""
    try:
        return inspect.signature(optimizer).parameters
    except (TypeError, ValueError):
        return None


def _default_lr(optimizer: Optimizer) -> float:
    """Return the default rate of an optimizer."""
    if getattr(optimizer, "func", optimizer) is torch.optim.SGD:
        return DEFAULT_LR
    parameter = (_parameters(optimizer) or {}).get("lr")
    default = None if parameter is None else parameter.default
    return number("lr of the optimizer", default, greater_than=0) if isinstance(default, Real) else DEFAULT_LR


def facts_of(optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts of an optimizer. They are read from an object that it makes for a single weight."""
    lr, name = 0.125, _name(optimizer)
    if not takes_lr(optimizer):
        return OptimizerFacts(problem=f"{name} takes no lr")
    try:
        made = optimizer([nn.Parameter(torch.zeros(1, 1))], lr=lr)
    except Exception as error:  # the function may need the model's parameters; its own errors come in the trial
        return OptimizerFacts(problem=f"{name} could not be made for a single weight ({error})")
    groups: list[dict[str, Any]] = made.param_groups
    if any(group.get("lr") != lr for group in groups):
        return OptimizerFacts(problem=f"{name} has other rates than the lr that it gets")
    if type(made).__name__ == "Muon":  # its momentum is a mean of gradients, and its steps have one length
        return OptimizerFacts()
    keys = ("momentum", "dampening", "nesterov")
    momenta = {tuple(group.get(key, 0) for key in keys) for group in groups}
    if len(momenta) > 1:
        return OptimizerFacts(problem=f"{name} has several momenta")
    momentum, dampening, nesterov = momenta.pop()
    return OptimizerFacts(float(momentum), float(dampening), bool(nesterov))


def _name(optimizer: Optimizer) -> str:
    function = getattr(optimizer, "func", optimizer)
    return getattr(function, "__qualname__", None) or type(function).__name__
