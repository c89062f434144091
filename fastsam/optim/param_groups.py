"""Parameter groups, which `FusedSAM` shares with its base optimizer: one more group, checks, a description."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fastsam import ops
from fastsam.backends import select
from fastsam.optim import parameters
from fastsam.optim.hparams import OWN_OPTIONS, check_group
from fastsam.optim.one_pass import check_base
from fastsam.optim.parameters import parameters_of
from fastsam.optim.sharded import check_options, is_dtensor


def share_groups(optimizer: Any) -> None:
    """Give the base optimizer the groups, state and hooks of `optimizer`, also after they were replaced."""
    base = optimizer.base_optimizer
    if (
        base.param_groups is optimizer.param_groups
        and base.state is optimizer.state
        and base._optimizer_step_pre_hooks is optimizer._optimizer_step_pre_hooks
        and base._optimizer_step_post_hooks is optimizer._optimizer_step_post_hooks
    ):
        return  # torch.compile cannot write them with torch 2.11
    base.param_groups, base.state = optimizer.param_groups, optimizer.state
    # A hook on either optimizer fires once per step.
    base._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    base._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks


def add_param_group(optimizer: Any, param_group: dict[str, Any]) -> None:
    """Add a group to both optimizers, or raise and add nothing."""
    if isinstance(param_group, dict):
        for name in OWN_OPTIONS:
            param_group.setdefault(name, optimizer.defaults[name])
    share_groups(optimizer)
    optimizer.base_optimizer.add_param_group(param_group)
    try:
        check_group(param_group, len(optimizer.param_groups) - 1)
        check_base(optimizer._engine.variant, optimizer.base_optimizer, optimizer.param_groups)
        check_parameters(optimizer)
    except BaseException:
        optimizer.param_groups.pop()
        raise


def check_parameters(optimizer: Any) -> None:
    """Raise if `optimizer` cannot optimize its parameters."""
    params, engine = parameters_of(optimizer.param_groups), optimizer._engine
    parameters.check(params)
    if any(map(is_dtensor, params)):
        if engine.variant.norm_degree != 2:
            raise ValueError(
                f"{type(engine.variant).__name__} with DTensor parameters is not supported, because its norm is not "
                f"reduced between ranks. Take a variant with an L2 norm"
            )
        check_options(engine.stochastic_rounding, engine.exclusive)
    for dtype in {p.dtype for p in params}:
        ops.bind(optimizer._engine.backend, params[0].device, dtype)


def describe(optimizer: Any) -> str:
    """Return a line for each of the base optimizer, the variant and the backend."""
    variant, backend = optimizer._engine.variant, optimizer._engine.backend
    options = [f"{f.name}={getattr(variant, f.name)!r}" for f in fields(variant) if f.name not in OWN_OPTIONS]
    names = {select(backend, p.device, p.dtype).name for p in parameters_of(optimizer.param_groups)}
    head = {
        "base optimizer": type(optimizer.base_optimizer).__name__,
        "variant": f"{type(variant).__name__}({', '.join(options)})",
        "backend": ", ".join(sorted(names)),
    }
    return "".join(f"\n{name}: {value}" for name, value in head.items())
