"""State dicts and pickles of `FusedSAM`, at any moment of a step. Each function gets the `FusedSAM`.

`state_dict_format` has the format.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from fastsam.optim.amp import GradScalerTracker
from fastsam.optim.base_optimizer import unhooked_step
from fastsam.optim.grad_checks import AccumulationCheck, ClipCheck, SecondPassCheck
from fastsam.optim.one_pass import make_engine
from fastsam.optim.param_groups import share_groups
from fastsam.optim.param_tracking import WeightState
from fastsam.optim.parameters import parameters_of
from fastsam.optim.running_stats import RunningStatsFreezer
from fastsam.optim.state_dict_format import COPIED_ALONE, CheckedState, pack
from fastsam.optim.variants.sam import VariantState

NOT_THERE = (
    "torch.distributed.checkpoint saves the state of an optimizer whose weights are perturbed: what it loads into has "
    "no place for the unperturbed ones, so they would be lost; call {}() first"
)


def called_by_checkpoint(function: str) -> bool:
    """Return True if this function of torch.distributed.checkpoint.state_dict called the caller's caller, perhaps by
    way of a scheduler's wrappers of `step`."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(5):
        if frame is None or frame.f_code.co_name == function:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == function


def make_state_dict(optimizer: Any) -> dict[str, Any]:
    """Return the state dict of an optimizer."""
    engine = optimizer._engine
    share_groups(optimizer)
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    params = parameters_of(optimizer.param_groups)
    is_perturbed = engine.weight_state is not WeightState.ORIGINAL
    if is_perturbed and called_by_checkpoint("_get_optim_state_dict"):
        raise RuntimeError(NOT_THERE.format("eval" if engine.one_pass else "restore"))
    facts = engine.facts()
    if engine.variant.state is VariantState.DIRECTION and optimizer._scaler_tracker.scale is not None:
        facts["scale"] = float(optimizer._scaler_tracker.scale)
    state_dict = pack(optimizer.base_optimizer.state_dict(), params, engine.copy_weights(), facts)
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        result = post_hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    return state_dict


def load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Take over a state dict."""
    engine = optimizer._engine
    optimizer._require(
        WeightState.ORIGINAL,
        "load_state_dict() while the weights are perturbed",
        f"call {'eval' if engine.one_pass else 'restore'}() first, then load model and optimizer",
    )
    share_groups(optimizer)
    if isinstance(state_dict, dict):
        state_dict = state_dict.copy()  # which a hook may change
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = pre_hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    rule = engine.rule
    new_state = CheckedState(state_dict, optimizer.param_groups, rule, engine.variant)
    if rule is None:
        optimizer.base_optimizer.load_state_dict(new_state.for_base())
        optimizer.param_groups, optimizer.state = optimizer.base_optimizer.param_groups, optimizer.base_optimizer.state
    else:
        state = new_state.for_fused(rule)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, new in zip(optimizer.param_groups, new_state.groups, strict=True):
            group.update(new)
    engine.load_checked(new_state)
    if new_state.is_perturbed and not engine.one_pass:
        optimizer._running_stats.freeze(optimizer.param_groups)
    optimizer._accumulation_check.reset()
    optimizer._scaler_tracker.saved_scale = new_state.scale
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    if new_state.missing_state:
        warnings.warn(COPIED_ALONE.format(new_state.missing_state), UserWarning, stacklevel=3)


def make_pickle(optimizer: Any) -> dict[str, Any]:
    """Return the state of a copy or a pickle of an optimizer."""
    share_groups(optimizer)
    scale, running_stats = optimizer._scaler_tracker.scale, optimizer._running_stats
    return {
        **Optimizer.__getstate__(optimizer),
        **optimizer._engine.pickle(),
        "base_optimizer": optimizer.base_optimizer,
        "skip_nonfinite": optimizer.skip_nonfinite,
        "scale": None if scale is None else scale.clone(),
        "model": running_stats.modules,
        "frozen": running_stats.frozen,
    }


def load_pickle(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore an optimizer from the result of `make_pickle`."""
    of_torch = ("state", "param_groups", "defaults", "base_optimizer")
    Optimizer.__setstate__(optimizer, {name: state[name] for name in of_torch})
    optimizer.skip_nonfinite = state["skip_nonfinite"]
    share_groups(optimizer)
    optimizer._engine = make_engine(
        optimizer.base_optimizer, state["backend"], state["stochastic_rounding"], state["exclusive"], state["variant"]
    )
    optimizer._engine.unpickle(state)
    optimizer._running_stats = RunningStatsFreezer(state["model"], state["frozen"])
    optimizer._scaler_tracker = GradScalerTracker(state["scale"])
    optimizer._accumulation_check, optimizer._clip_check = AccumulationCheck(), ClipCheck()
    optimizer._accumulation_check.reset()
    optimizer._second_pass_check = SecondPassCheck()
    optimizer._follow_modules()


def make_initial_state(optimizer: Any) -> None:
    """Make the state that torch.distributed.checkpoint, which calls `step` for it, then fills with a saved one."""
    share_groups(optimizer)
    optimizer._engine.make_state()
    if optimizer._engine.rule is None:
        unhooked_step(optimizer.base_optimizer)(optimizer.base_optimizer)
