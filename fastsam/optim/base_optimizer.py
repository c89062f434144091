"""The base optimizer: made over the groups that it shares with FusedSAM, and stepped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.chained import ChainedOptimizer
from fastsam.optim.hparams import NUMBERS, OWN_OPTIONS, check_number
from fastsam.optim.parameters import parameters_of
from fastsam.optim.suggestions import suggestion
from fastsam_kernels.rules import RULES

CONSTRUCTOR_OPTIONS = (
    "base_optimizer",
    "base_kwargs",
    *OWN_OPTIONS,
    "backend",
    "max_grad_norm",
    "skip_nonfinite",
    "stochastic_rounding",
    "assume_no_alias",
    "optimizer_in_backward",
    "variant",
)


def make_base(factory: Callable[..., Any], groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    """Return the base optimizer, over the same dicts as `groups`. A list of optimizers becomes one.

    Raises:
        ValueError: it cannot be a base optimizer.
        TypeError: it is not an optimizer, lacks an option, or an option is not a number.
    """
    if any(factory in rule.optimizer_types for rule in RULES.values()):
        # these optimizers compare before they check the type; others may take other types
        for number, group in enumerate(groups):
            for name in NUMBERS:
                if name in group:
                    check_number(group, name, number)
    _check_known(factory, options)
    for name, value in options.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name} is a tensor on the meta device, which holds no number; give a number")
    base = factory(groups, **options)
    members = base if isinstance(base, (list, tuple)) else [base]
    for member in members:
        _check_member(member, factory)
    return ChainedOptimizer(groups, members) if members is base else base


def _check_member(base: object, factory: Callable[..., Any]) -> None:
    """Raise as `make_base` does for an optimizer that cannot be the base, or one of several."""
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base_optimizer must make a torch.optim.Optimizer or a list of them, {factory!r} made a "
            f"{type(base).__name__}"
        )
    _check_no_wrapper(base)
    reserved_names = sorted(set(OWN_OPTIONS) & set(base.defaults))
    if reserved_names:
        raise ValueError(
            f"{type(base).__name__} has its own options called {', '.join(reserved_names)}, which are SAM's here; "
            f"it cannot be the base"
        )
    closure = inspect.signature(unhooked_step(base)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(base).__name__} calls a closure several times per step, so it cannot be the base of a step with "
            f"two passes"
        )


def _check_no_wrapper(base: Optimizer) -> None:
    """Raise ValueError for an optimizer that takes its groups from another one, because FusedSAM could not share
    them."""
    if not isinstance(getattr(type(base), "param_groups", None), property):
        return
    name = type(base).__name__
    inner = next((type(v).__name__ for v in vars(base).values() if isinstance(v, Optimizer)), "")
    if "DPOptimizer" in [kind.__name__ for kind in type(base).__mro__]:
        remedy = (
            "it makes gradients private in its own step, which the gradient of the first pass would never see. SAM "
            "under Opacus is not served"
        )
    else:
        remedy = (
            f"an optimizer that hands closures on goes around: {name}(FusedSAM(params, {inner or 'torch.optim.SGD'}, "
            f"...)), and step(closure)"
        )
    raise ValueError(
        f"{name} wraps another optimizer{f' ({inner})' if inner else ''}, so it cannot be the base; {remedy}"
    )


def options_of_base(keywords: dict[str, Any], in_a_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of the base optimizer: keywords and `base_kwargs`. Raises TypeError if one is given twice, or
    for an option of SAM in the dict."""
    if in_a_dict is None:
        return keywords
    if not isinstance(in_a_dict, Mapping):
        raise TypeError(
            f"base_kwargs must be a dict of the base optimizer's options such as {{'momentum': 0.9}}, got {in_a_dict!r}"
        )
    for name in in_a_dict:
        if name in keywords:
            raise TypeError(f"{name} is given twice, as a keyword and in base_kwargs; leave out one of them")
        if name in CONSTRUCTOR_OPTIONS:
            raise TypeError(f"{name} in base_kwargs is an option of FusedSAM: give it as a keyword")
    return {**keywords, **in_a_dict}


def _check_known(factory: Callable[..., Optimizer], options: dict[str, Any]) -> None:
    """Raise TypeError for an option that neither SAM nor the base optimizer has.

    A base optimizer that takes any option is not checked.
    """
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            names = [*list(parameters)[1:], *CONSTRUCTOR_OPTIONS]  # the first are the parameters
            base = getattr(factory, "__name__", "the base optimizer")
            raise TypeError(
                f"unexpected keyword {name!r}: neither FusedSAM nor {base} has such an option (there are "
                f"{', '.join(names)}){suggestion(name, names)}"
            )


def unhooked_step(base: Optimizer) -> Callable[..., Any]:
    """Return the base optimizer's step without torch's hooks, because FusedSAM's step calls them."""
    step = type(base).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


@torch.no_grad()
def unscale_(base: Optimizer, grad_scale: Tensor) -> None:
    """Divide the gradients of all parameters by the scale."""
    for p in parameters_of(base.param_groups):
        if p.grad is not None:
            p.grad.div_(grad_scale)
