"""State dicts and pickles of `FusedSAM` at any moment of a step: torch's own format, plus what SAM adds to it.

    {"state": {0: {"momentum_buffer": ..., "master": ..., "unperturbed": ...}, ...},
     "param_groups": [...],
     "fastsam": {"format": 1, "perturbed": False, "left_out": [1]}}

`master` (float32) belongs to half-precision parameters with a fused update. `unperturbed` is there between the two
passes, and with a variant of one pass also between steps, where "fastsam" has `training` too. `first_gradient` is there
if the update reads it, `sam_memory` if the variant keeps a vector. `sam_memory_next`, between the two passes, is the
vector after the direction. `left_out` are the numbers of parameters without buffers, which have no entry at all.
torch's own optimizers ignore what they do not know, so such a dict loads into torch.optim.SGD, and one of
torch.optim.SGD loads here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.backup import WeightState
from fastsam.optim.base_optimizer import unhooked_step
from fastsam.optim.bucket import G1, MASTER, NEXT_STATE, UNPERTURBED, VARIANT_STATE, Weights
from fastsam.optim.hparams import STEPS, check_group
from fastsam.optim.param_groups import ParamGroupsMixin
from fastsam.optim.parameters import parameters_of
from fastsam.optim.update import Group, UpdateRule
from fastsam.optim.variants.sam import SAM, VariantState
from fastsam_kernels.constants import compute_dtype

if TYPE_CHECKING:
    from fastsam.optim.amp import GradScalerTracker
    from fastsam.optim.grad_checks import AccumulationCheck
    from fastsam.optim.running_stats import RunningStatsFreezer

T = TypeVar("T")
FORMAT = 1
KINDS: dict[type, str] = {
    bool: "True or False", int: "an integer", float: "a number", str: "a name", dict: "a dict", list: "a list"
}  # fmt: skip
FACTS = {  # entries of "fastsam" besides the format
    "perturbed": bool, "variant": str, "training": bool, "perturbations": int, "steps": int, "unit": float,
    "scale": float, "left_out": list,
}  # fmt: skip
NULLABLE = ("unit", "scale", "left_out")  # entries that may be None
SAM_KEYS = (MASTER, UNPERTURBED, G1, VARIANT_STATE, NEXT_STATE)
# The widely copied SAM class keeps the weights and the perturbation of the last step in its state, and not the base
# optimizer's state.
COPIED = ("old_p", "e_w")
COPIED_ALONE = (
    "this is the state dict of a SAM class that does not save its base optimizer's state: the options were taken over, "
    "and {} starts anew. Load the old optimizer's base_optimizer.state_dict() instead, which has both"
)
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


class StateDictMixin(ParamGroupsMixin):
    """State dicts, copies and pickles of an optimizer whose steps an engine makes."""

    skip_nonfinite: bool
    _scaler_tracker: GradScalerTracker
    _accumulation_check: AccumulationCheck
    _running_stats: RunningStatsFreezer
    _set_up: Callable[..., None]
    _follow_modules: Callable[[], None]

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
        if engine.weight_state is not WeightState.ORIGINAL and called_by_checkpoint("_get_optim_state_dict"):
            raise RuntimeError(NOT_THERE.format("eval" if engine.one_pass else "restore"))
        state_dict = _copy(self.base_optimizer.state_dict())
        weights, state = engine.copy_weights(), state_dict["state"]
        for i, parameter in enumerate(parameters_of(self.param_groups)):
            if parameter in weights:
                state[i] = {**state.get(i, {}), **_copy(weights[parameter])}
        state_dict["fastsam"] = {"format": FORMAT, **engine.facts()}
        if engine.variant.state is VariantState.DIRECTION and self._scaler_tracker.scale is not None:
            state_dict["fastsam"]["scale"] = float(self._scaler_tracker.scale)
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
        engine.require(
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
        new_state = CheckedState(state_dict, self.param_groups, engine.rule, engine.variant)
        if engine.rule is None:
            self.base_optimizer.load_state_dict({"state": new_state.state, "param_groups": new_state.groups})
            self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state
        else:
            self.state.clear()
            self.state.update({new_state.params.get(key, key): entry for key, entry in new_state.state.items()})
            for group, new_group in zip(self.param_groups, new_state.groups, strict=True):
                group.update({name: value for name, value in new_group.items() if name != "params"})
        engine.load(new_state.weights, new_state.facts)
        if engine.weight_state is not WeightState.ORIGINAL and not engine.one_pass:
            self._running_stats.freeze(self.param_groups)
        self._accumulation_check.reset()
        scale = new_state.facts.get("scale")
        self._scaler_tracker.saved_scale = None if scale is None else torch.tensor(scale, device="cpu")
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if new_state.missing_state:
            warnings.warn(COPIED_ALONE.format(new_state.missing_state), UserWarning, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        self._share_groups()
        weights, scale, running_stats = self._engine.copy_weights(), self._scaler_tracker.scale, self._running_stats
        return {
            **Optimizer.__getstate__(self),
            "base_optimizer": self.base_optimizer,
            "skip_nonfinite": self.skip_nonfinite,
            "max_grad_norm": self._engine.max_grad_norm,
            "options": self._engine.options,
            "facts": self._engine.facts(),
            "weights": [weights.get(p) for p in parameters_of(self.param_groups)],
            "scale": None if scale is None else scale.clone(),
            "model": running_stats.modules,
            "frozen": running_stats.frozen,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        of_torch = ("state", "param_groups", "defaults", "base_optimizer", "skip_nonfinite")
        Optimizer.__setstate__(self, {name: state[name] for name in of_torch})
        self._set_up(state["options"], state["model"], state["frozen"], state["scale"])
        self._engine.set_max_grad_norm(state["max_grad_norm"])
        weights = zip(parameters_of(self.param_groups), state["weights"], strict=True)
        self._engine.load({p: tensors for p, tensors in weights if tensors}, state["facts"])
        self._accumulation_check.reset()
        self._follow_modules()

    def _make_initial_state(self) -> None:
        """Make the state that torch.distributed.checkpoint, which calls `step` for it, then fills with a saved one."""
        self._share_groups()
        self._engine.make_state()
        if self._engine.rule is None:
            unhooked_step(self.base_optimizer)(self.base_optimizer)


def _copy(value: Any) -> Any:
    """Return `value` with copies of its tensors, dicts and lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


class CheckedState:
    """A state dict that was checked against the optimizer's parameters. The optimizer has not changed yet.

    Attributes:
        facts: entry "fastsam", or its defaults.
        groups: options for the parameter groups, with the keys of the saved parameters.
        params: parameters by key.
        state: copies of the base optimizer's state by key. Momenta of a fused update have the dtype of the arithmetic.
        weights: copies of SAM's entries.
        missing_state: state of the base optimizer that the dict does not have, in words.

    Raises:
        ValueError: it is the state of another model or optimizer, or not a state dict.
    """

    def __init__(self, state_dict: Mapping[str, Any], groups: list[Group], rule: UpdateRule | None, sam: SAM) -> None:
        _check_form(state_dict)
        entries, saved_groups = state_dict["state"], state_dict["param_groups"]
        steps = saved_groups[0].get(STEPS, 0) if saved_groups else 0
        self.facts = {"steps": steps, **state_dict.get("fastsam", {"format": FORMAT, "perturbed": False})}
        params = parameters_of(groups)
        _check_facts(self.facts, len(params))
        _check_variant(self.facts, entries, sam)
        self.groups = _merge_groups(saved_groups, groups, rule)
        keys = [key for group in saved_groups for key in group["params"]]
        if len(set(keys)) < len(keys):
            raise ValueError(f"not a state dict of an optimizer: 'params' name a parameter twice, got {keys}")
        self.params: dict[Any, Tensor] = dict(zip(keys, params, strict=True))
        self.weights: Weights = {}
        self.state: dict[Any, Any] = {}
        for key, entry in entries.items():
            if key in self.params:
                self._split(key, self.params[key], entry, rule)
            else:
                self.state[key] = deepcopy(entry)
        self.missing_state = ""
        if any(isinstance(e, dict) and COPIED[0] in e for e in entries.values()) and not any(self.state.values()):
            fields = [name for group in self.groups for name in (rule.fields(group) if rule else ())]
            self.missing_state = ", ".join(dict.fromkeys(fields)) if rule else "the base optimizer's state"

    def _split(self, key: Any, parameter: Tensor, entry: Any, rule: UpdateRule | None) -> None:
        """Copy SAM's entries and the base optimizer's."""
        momenta = rule.state if rule else ()
        for name, value in _is(dict, entry, f"the state of parameter {key}").items():
            if name in SAM_KEYS or (name in momenta and value is not None):
                _check_field(value, parameter, f"{name} of parameter {key}")
            elif rule is not None and name == rule.counter:
                _check_count(value, f"{name} of parameter {key}")
        saved_weights = {name: _copy(entry[name]) for name in SAM_KEYS if name in entry}
        if saved_weights:
            self.weights[parameter] = saved_weights
        self.state[key] = {
            name: value.detach().to(parameter.device, compute_dtype(parameter.dtype), copy=True)
            if name in momenta
            else _copy(value)
            for name, value in entry.items()
            if name not in SAM_KEYS + COPIED and value is not None
        }


def _is(kind: type[T], value: Any, subject: str) -> T:
    """Return `value`. Raises ValueError unless it is of that kind."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        type_name = type(value).__name__
        raise ValueError(f"not a state dict of an optimizer: {subject} must be {KINDS[kind]}, got {type_name}")
    return value


def _check_facts(facts: Mapping[str, Any], num_params: int) -> None:
    """Raise ValueError for entries of "fastsam" that are not of their kinds, or belong to a model with other
    parameters."""
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"this state dict has format {facts.get('format')!r}, this version of fastsam reads format {FORMAT}; "
            f"update fastsam"
        )
    for name, kind in FACTS.items():
        value = facts.get(name)
        if value is not None or name == "perturbed" or (name in facts and name not in NULLABLE):
            _is(kind, value, f"{name!r} of 'fastsam'")
    for number in facts.get("left_out") or ():
        if not 0 <= _is(int, number, "a number in 'left_out' of 'fastsam'") < num_params:
            raise ValueError(f"this is the state of another model: 'left_out' names parameter {number} of {num_params}")


def _check_variant(facts: Mapping[str, Any], entries: Mapping[Any, Any], sam: SAM) -> None:
    """Raise ValueError if `sam` could not go on from the state, because it belongs to a different variant."""
    keeps = any(isinstance(entry, dict) and VARIANT_STATE in entry for entry in entries.values())
    variant_name = facts.get("variant", type(sam).__name__)
    if variant_name != type(sam).__name__ and (keeps or facts["perturbed"]):
        midway = "between its two passes" if "training" not in facts else "in training, at its perturbed point"
        raise ValueError(
            f"this is the state of another variant: of {variant_name}, "
            f"{'which keeps a vector' if keeps else midway}, and this optimizer's is {type(sam).__name__}. Build "
            f"it with variant={variant_name}(...), or load the state dict of that one's base_optimizer, which "
            "starts anew"
        )


def _check_form(state_dict: Any) -> None:
    """Raise TypeError or ValueError unless dicts and lists are in the places of an optimizer's state dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict such as state_dict() returns, got {type(state_dict).__name__}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"not a state dict of an optimizer: it has the keys {sorted(map(str, state_dict))}, and no {key!r}"
            )
    _is(dict, state_dict["state"], "'state'")
    _is(dict, state_dict.get("fastsam", {}), "'fastsam'")
    for number, group in enumerate(_is(list, state_dict["param_groups"], "'param_groups'")):
        subject = f"'params' of parameter group {number}"
        for key in _is(list, _is(dict, group, f"parameter group {number}").get("params"), subject):
            if not isinstance(key, (int, str)):  # torch.distributed.checkpoint has names
                raise ValueError(
                    f"not a state dict of an optimizer: {subject} must hold numbers of parameters, got {key!r}"
                )


def _check_field(value: Any, parameter: Tensor, subject: str) -> None:
    """Raise ValueError unless it is a dense real tensor of the parameter's shape, with memory."""
    if not isinstance(value, Tensor):
        raise ValueError(f"not a state dict of an optimizer: {subject} must be a tensor, got {type(value).__name__}")
    if value.shape != parameter.shape:
        raise ValueError(
            f"this is the state of another model: {subject} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(parameter.shape)}"
        )
    if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.is_meta:
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else f"{value.layout}, {value.dtype}"
        raise ValueError(
            f"{subject} must be a dense tensor of real numbers, got a {kind} tensor. Call value.to_dense() on a sparse "
            "tensor"
        )


def _check_count(value: Any, subject: str) -> None:
    """Raise ValueError unless it is a number of steps: a Python number, or a tensor of one element."""
    one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta
    if not one and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"not a state dict of an optimizer: {subject} must be a number of steps, got {kind}")


def _merge_groups(saved_groups: list[Group], groups: list[Group], rule: UpdateRule | None) -> list[Group]:
    """Return the saved options on top of the present ones, each group checked."""
    sizes = [len(g["params"]) for g in groups]
    num_params = [len(g["params"]) for g in saved_groups]
    if sizes != num_params:
        raise ValueError(
            f"this is the state of another model: its parameter groups have {num_params} parameters, and this "
            f"optimizer's groups have {sizes}"
        )
    absent = sorted({name for g in saved_groups for name in (rule.options if rule else ()) if name not in g})
    if absent:
        raise ValueError(
            f"this is the state of another base optimizer: its parameter groups have no {', '.join(absent)}; build "
            "FusedSAM with the base optimizer that was saved"
        )
    result = []
    for number, (new, old) in enumerate(zip(saved_groups, groups, strict=True)):
        group = {**old, **deepcopy({name: value for name, value in new.items() if name != STEPS})}
        check_group(group, number)
        result.append(group)
    return result
