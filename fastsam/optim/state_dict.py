"""State dicts and pickles of `FusedSAM`, at any moment of a step.

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
from fastsam.optim.engine import Engine
from fastsam.optim.grad_checks import AccumulationCheck, ClipCheck, PassCheck
from fastsam.optim.param_groups import ParamGroupsMixin
from fastsam.optim.param_tracking import WeightState
from fastsam.optim.parameters import parameters_of
from fastsam.optim.running_stats import RunningStatsFreezer
from fastsam.optim.state_dict_format import COPIED_ALONE, CheckedState, pack
from fastsam.optim.step_phase import StepPhaseMixin
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


class StateDictMixin(StepPhaseMixin, ParamGroupsMixin):
    """State dicts, copies and pickles of an optimizer whose steps an engine makes."""

    skip_nonfinite: bool
    _scaler_tracker: GradScalerTracker
    _accumulation_check: AccumulationCheck
    _clip_check: ClipCheck
    _pass_check: PassCheck
    _running_stats: RunningStatsFreezer

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, which can be loaded into the base optimizer's class too; copies, which
        later steps do not change.

        Possible at any time: between the two passes, and between the steps of a variant of one pass, it holds the
        unperturbed weights, so that training can go on from there. The model's state has the weights of the same
        moment; call `eval()` before saving both, and the model's are the clean ones.
        """
        engine = self._engine
        self._share_groups()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        params = parameters_of(self.param_groups)
        is_perturbed = engine.weight_state is not WeightState.ORIGINAL
        if is_perturbed and called_by_checkpoint("_get_optim_state_dict"):
            raise RuntimeError(NOT_THERE.format("eval" if engine.one_pass else "restore"))
        facts = engine.facts()
        if engine.variant.state is VariantState.DIRECTION and self._scaler_tracker.scale is not None:
            facts["scale"] = float(self._scaler_tracker.scale)
        state_dict = pack(self.base_optimizer.state_dict(), params, engine.copy_weights(), facts)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of `FusedSAM` or of the base optimizer's class.

        A state dict that was saved between the two passes leaves the optimizer between them. Then load the model's
        weights of the same moment too, and go on with the second pass, or with `restore()`. The state dict of a SAM
        class that leaves its base optimizer's state out is taken for its options, with a warning.

        Raises ValueError if the state belongs to a different model or optimizer, TypeError if it is not a dict, and
        RuntimeError while the weights are perturbed. The optimizer is unchanged then.
        """
        engine = self._engine
        self._require(
            WeightState.ORIGINAL,
            "load_state_dict() while the weights are perturbed",
            f"call {'eval' if engine.one_pass else 'restore'}() first, then load model and optimizer",
        )
        self._share_groups()
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # which a hook may change
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        rule = engine.rule
        new_state = CheckedState(state_dict, self.param_groups, rule, engine.variant)
        if rule is None:
            self.base_optimizer.load_state_dict(new_state.for_base())
            self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state
        else:
            state = new_state.for_fused(rule)
            self.state.clear()
            self.state.update(state)
            for group, new in zip(self.param_groups, new_state.groups, strict=True):
                group.update(new)
        engine.load_checked(new_state)
        if new_state.is_perturbed and not engine.one_pass:
            self._running_stats.freeze(self.param_groups)
        self._accumulation_check.reset()
        self._scaler_tracker.saved_scale = new_state.scale
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if new_state.missing_state:
            warnings.warn(COPIED_ALONE.format(new_state.missing_state), UserWarning, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        self._share_groups()
        scale, running_stats = self._scaler_tracker.scale, self._running_stats
        return {
            **Optimizer.__getstate__(self),
            **self._engine.pickle(),
            "base_optimizer": self.base_optimizer,
            "skip_nonfinite": self.skip_nonfinite,
            "scale": None if scale is None else scale.clone(),
            "model": running_stats.modules,
            "frozen": running_stats.frozen,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        of_torch = ("state", "param_groups", "defaults", "base_optimizer")
        Optimizer.__setstate__(self, {name: state[name] for name in of_torch})
        self.skip_nonfinite = state["skip_nonfinite"]
        self._share_groups()
        self._engine = Engine(
            self.base_optimizer, state["backend"], state["stochastic_rounding"], state["exclusive"], state["variant"]
        )
        self._engine.unpickle(state)
        self._running_stats = RunningStatsFreezer(state["model"], state["frozen"])
        self._scaler_tracker = GradScalerTracker(state["scale"])
        self._accumulation_check, self._clip_check = AccumulationCheck(), ClipCheck()
        self._accumulation_check.reset()
        self._pass_check = PassCheck()
        self._follow_modules()

    def _make_initial_state(self) -> None:
        """Make the state that torch.distributed.checkpoint, which calls `step` for it, then fills with a saved one."""
        self._share_groups()
        self._engine.make_state()
        if self._engine.rule is None:
            unhooked_step(self.base_optimizer)(self.base_optimizer)
