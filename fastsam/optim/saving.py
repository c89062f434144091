"""How an optimizer around another one is saved, loaded, copied and pickled, at any moment of a step."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from fastsam.optim.amp import Scaling
from fastsam.optim.checkpoint import COPIED_ALONE, Loaded, pack
from fastsam.optim.early import Early
from fastsam.optim.engine import PLAIN, Phase
from fastsam.optim.leftover import Leftover
from fastsam.optim.one_pass import engine_of
from fastsam.optim.parameters import parameters_of
from fastsam.optim.statistics import Statistics
from fastsam.optim.turns import Turns

NOT_THERE = (
    "torch.distributed.checkpoint saves the state of an optimizer whose weights are perturbed: what it loads into has "
    "no place for the unperturbed "
    "ones, so they would be lost; call {}() first"
)


def called_by_checkpoint(function: str) -> bool:
    """Whether the caller's caller is this function of torch.distributed.checkpoint.state_dict, if by way of a
    scheduler's wrappers of `step`."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None or frame.f_code.co_name == function:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == function


class Saving(Turns):
    """An optimizer whose groups and state `base_optimizer` shares, and whose steps an engine makes."""

    base_optimizer: Optimizer
    skip_nonfinite: bool
    _leftover: Leftover
    _scaling: Scaling

    def state_dict(self) -> dict[str, Any]:
        """torch's format, loadable into the base optimizer's class too; copies, which later steps do not change.
        Possible at any time: between the two passes, and between the steps of a variant of one pass, it holds the
        unperturbed weights, so that training can go on from there. The model's state has the weights of the same
        moment; call `eval()` before saving both, and the model's are the clean ones.
        """
        self._share()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        params = parameters_of(self.param_groups)
        perturbed = self._engine.phase is not Phase.IDLE
        if perturbed and called_by_checkpoint("_get_optim_state_dict"):
            raise RuntimeError(NOT_THERE.format("eval" if self._engine.one_pass else "restore"))
        own = {"perturbed": perturbed, "variant": type(self._engine.variant).__name__, **self._engine.numbers()}
        if self._engine.one_pass:
            own["training"] = self._engine.training
        if (left_out := self._engine.numbers_left_out()) is not None:
            own["left_out"] = left_out
        if self._engine.directs and self._scaling.scale is not None:
            own["scale"] = float(self._scaling.scale)
        state_dict = pack(self.base_optimizer.state_dict(), params, self._engine.saved(), own)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of `FusedSAM` or of the base optimizer's class. One that was saved between the two
        passes leaves the optimizer
        there: load the model's weights of the same moment too, and go on with the second pass, or `restore()`. The
        state dict of a SAM class that leaves its base optimizer's state out is taken for its options, with a warning.

        Raises ValueError for the state of another model or optimizer, TypeError for what is no dict, RuntimeError while
        the weights are perturbed; nothing is changed then.
        """
        self._require(
            Phase.IDLE,
            "load_state_dict() while the weights are perturbed",
            f"call {'eval' if self._engine.one_pass else 'restore'}() first, then load model and optimizer",
        )
        self._share()
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # which a hook may change
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        rule = self._engine.rule
        loaded = Loaded(state_dict, self.param_groups, rule, self._engine.variant)
        if rule is None:
            self.base_optimizer.load_state_dict(loaded.for_base())
            self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state
        else:
            state = loaded.for_fused(rule)
            self.state.clear()
            self.state.update(state)
            for group, new in zip(self.param_groups, loaded.groups, strict=True):
                group.update(new)
        self._engine.load(loaded.weights, loaded.perturbed, loaded.left_out)
        if self._engine.one_pass:
            self._engine.training = loaded.training
        elif loaded.perturbed:
            self._statistics.freeze()
        self._leftover.forget()
        self._engine.perturbations.fill_(loaded.perturbations)
        self._engine.steps, self._engine.mixing.unit = loaded.steps, loaded.unit
        self._scaling.saved = loaded.scale
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if loaded.lost:
            warnings.warn(COPIED_ALONE.format(loaded.lost), UserWarning, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        self._share()
        saved = self._engine.saved()
        return {
            **super().__getstate__(),
            "base_optimizer": self.base_optimizer,
            "check_finite": self.skip_nonfinite,
            "backend": self._engine.backend,
            "stochastic_rounding": self._engine.stochastic_rounding,
            "exclusive": self._engine.exclusive,
            "in_backward": self._engine.early is not None,
            "variant": self._engine.variant,
            "steps": self._engine.steps,
            "unit": self._engine.mixing.unit,
            "training": self._engine.training,
            "scale": None if self._scaling.scale is None else self._scaling.scale.clone(),
            "model": self._statistics.modules,
            "frozen": self._statistics.frozen,
            "perturbations": self._engine.perturbations.clone(),
            "perturbed": self._engine.phase is not Phase.IDLE,
            "saved": [saved.get(p) for p in parameters_of(self.param_groups)],
            "left_out": self._engine.numbers_left_out(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        backend, perturbed, saved = (state.pop(name) for name in ("backend", "perturbed", "saved"))
        rounding, perturbations = (state.pop(name) for name in ("stochastic_rounding", "perturbations"))
        exclusive = state.pop("exclusive", False)  # pickles of older versions have none
        in_backward = state.pop("in_backward", False)
        self.skip_nonfinite = state.pop("check_finite")
        variant, steps = state.pop("variant", PLAIN), state.pop("steps", 0)
        unit, scale = state.pop("unit", None), state.pop("scale", None)
        training, left_out = state.pop("training", True), state.pop("left_out", None)
        statistics = Statistics(state.pop("model", ()), state.pop("frozen", ()))
        super().__setstate__(state)
        self._engine = engine_of(self.base_optimizer, backend, rounding, exclusive, variant)
        self._engine.early = Early() if in_backward else None
        self._engine.perturbations, self._engine.steps = perturbations, steps
        self._engine.mixing.unit, self._engine.training = unit, training
        self._statistics = statistics
        self._scaling = Scaling(scale)
        self._leftover = Leftover()
        self._leftover.forget()
        params = parameters_of(self.param_groups)
        weights = {p: found for p, found in zip(params, saved, strict=True) if found}
        self._engine.load(weights, perturbed, left_out)
        self._share()
        self._follow_modules()

    def _share(self) -> None:
        """The base optimizer works on the very groups and state of this one, also after somebody replaced them."""
        base = self.base_optimizer
        # A hook on either optimizer fires once per step.
        for name in ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if getattr(base, name) is not getattr(self, name):  # torch.compile cannot write it with torch 2.11
                setattr(base, name, getattr(self, name))
