"""State dicts and pickles of `FusedSAM`, at any moment of a step. `state_dict_format` has the format.
Each function gets the `FusedSAM`."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from fastsam.optim.amp import Scaling
from fastsam.optim.base import unhooked_step
from fastsam.optim.clip_check import ClipCheck
from fastsam.optim.early import Early
from fastsam.optim.engine import PLAIN, Phase
from fastsam.optim.leftover import Leftover
from fastsam.optim.one_pass import engine_of
from fastsam.optim.param_groups import share_groups
from fastsam.optim.parameters import parameters_of
from fastsam.optim.state_dict_format import COPIED_ALONE, Loaded, pack
from fastsam.optim.statistics import Statistics
from fastsam.optim.variants.sam import Memory

NOT_THERE = (
    "torch.distributed.checkpoint saves the state of an optimizer whose weights are perturbed: what it loads into has "
    "no place for the unperturbed "
    "ones, so they would be lost; call {}() first"
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
    perturbed = engine.phase is not Phase.IDLE
    if perturbed and called_by_checkpoint("_get_optim_state_dict"):
        raise RuntimeError(NOT_THERE.format("eval" if engine.one_pass else "restore"))
    own = {"perturbed": perturbed, "variant": type(engine.variant).__name__, **engine.numbers()}
    if engine.one_pass:
        own["training"] = engine.training
    if (left_out := engine.numbers_left_out()) is not None:
        own["left_out"] = left_out
    if engine.variant.memory is Memory.DIRECTION and optimizer._scaling.scale is not None:
        own["scale"] = float(optimizer._scaling.scale)
    state_dict = pack(optimizer.base_optimizer.state_dict(), params, engine.saved(), own)
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        result = post_hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    return state_dict


def load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Take over a state dict."""
    engine = optimizer._engine
    optimizer._require(
        Phase.IDLE,
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
    loaded = Loaded(state_dict, optimizer.param_groups, rule, engine.variant)
    if rule is None:
        optimizer.base_optimizer.load_state_dict(loaded.for_base())
        optimizer.param_groups, optimizer.state = optimizer.base_optimizer.param_groups, optimizer.base_optimizer.state
    else:
        state = loaded.for_fused(rule)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, new in zip(optimizer.param_groups, loaded.groups, strict=True):
            group.update(new)
    engine.load(loaded.weights, loaded.perturbed, loaded.left_out)
    if engine.one_pass:
        engine.training = loaded.training
    elif loaded.perturbed:
        optimizer._statistics.freeze()
    optimizer._leftover.forget()
    engine.perturbations.fill_(loaded.perturbations)
    engine.steps, engine.mixing.unit = loaded.steps, loaded.unit
    optimizer._scaling.saved = loaded.scale
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    if loaded.lost:
        warnings.warn(COPIED_ALONE.format(loaded.lost), UserWarning, stacklevel=3)


def make_pickle(optimizer: Any) -> dict[str, Any]:
    """Return what a copy or a pickle of an optimizer consists of."""
    engine = optimizer._engine
    share_groups(optimizer)
    saved = engine.saved()
    return {
        **Optimizer.__getstate__(optimizer),
        "base_optimizer": optimizer.base_optimizer,
        "check_finite": optimizer.skip_nonfinite,
        "max_grad_norm": engine.max_grad_norm,
        "backend": engine.backend,
        "stochastic_rounding": engine.stochastic_rounding,
        "exclusive": engine.exclusive,
        "in_backward": engine.early is not None,
        "variant": engine.variant,
        "steps": engine.steps,
        "unit": engine.mixing.unit,
        "training": engine.training,
        "scale": None if optimizer._scaling.scale is None else optimizer._scaling.scale.clone(),
        "model": optimizer._statistics.modules,
        "frozen": optimizer._statistics.frozen,
        "perturbations": engine.perturbations.clone(),
        "perturbed": engine.phase is not Phase.IDLE,
        "saved": [saved.get(p) for p in parameters_of(optimizer.param_groups)],
        "left_out": engine.numbers_left_out(),
    }


def load_pickle(optimizer: Any, state: dict[str, Any]) -> None:
    """Make an optimizer of what `make_pickle` returned."""
    backend, perturbed, saved = (state.pop(name) for name in ("backend", "perturbed", "saved"))
    rounding, perturbations = (state.pop(name) for name in ("stochastic_rounding", "perturbations"))
    exclusive = state.pop("exclusive", False)  # pickles of older versions have none
    in_backward = state.pop("in_backward", False)
    optimizer.skip_nonfinite, max_grad_norm = state.pop("check_finite"), state.pop("max_grad_norm", None)
    variant, steps = state.pop("variant", PLAIN), state.pop("steps", 0)
    unit, scale = state.pop("unit", None), state.pop("scale", None)
    training, left_out = state.pop("training", True), state.pop("left_out", None)
    statistics = Statistics(state.pop("model", ()), state.pop("frozen", ()))
    Optimizer.__setstate__(optimizer, state)
    engine = optimizer._engine = engine_of(optimizer.base_optimizer, backend, rounding, exclusive, variant)
    engine.early = Early() if in_backward else None
    engine.set_max_grad_norm(max_grad_norm)
    engine.perturbations, engine.steps = perturbations, steps
    engine.mixing.unit, engine.training = unit, training
    optimizer._statistics = statistics
    optimizer._scaling = Scaling(scale)
    optimizer._leftover, optimizer._clip_check = Leftover(), ClipCheck()
    optimizer._leftover.forget()
    params = parameters_of(optimizer.param_groups)
    weights = {p: found for p, found in zip(params, saved, strict=True) if found}
    engine.load(weights, perturbed, left_out)
    share_groups(optimizer)
    optimizer._follow_modules()


def make_initial_state(optimizer: Any) -> None:
    """Make a step of torch.distributed.checkpoint, with zero gradients and no learning rate: it makes the state, for
    one that was saved to come in."""
    share_groups(optimizer)
    optimizer._engine.make_state()
    if optimizer._engine.rule is None:
        unhooked_step(optimizer.base_optimizer)(optimizer.base_optimizer)
