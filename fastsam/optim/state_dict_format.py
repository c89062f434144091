"""State dicts in torch's own format, plus what SAM adds to them.

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

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastsam.optim.bucket import G1, NEXT_STATE, VARIANT_STATE, Bucket
from fastsam.optim.hparams import OWN_OPTIONS, check_group
from fastsam.optim.sharded import as_dtensor_like, local_part_like
from fastsam.optim.update import Group, UpdateRule
from fastsam.optim.variants.sam import SAM
from fastsam_kernels.constants import compute_dtype

FORMAT = 1
MASTER, UNPERTURBED = "master", "unperturbed"
STEPS = "sam_steps"  # in every parameter group, if not every step perturbs
T = TypeVar("T")
KINDS: dict[type, str] = {
    bool: "True or False", int: "an integer", float: "a number", str: "a name", dict: "a dict", list: "a list"
}  # fmt: skip
SAM_KEYS = (MASTER, UNPERTURBED, G1, VARIANT_STATE, NEXT_STATE)
# The widely copied SAM class keeps the weights and the perturbation of the last step in its state, and not the base
# optimizer's state.
COPIED = ("old_p", "e_w")
COPIED_ALONE = (
    "this is the state dict of a SAM class that does not save its base optimizer's state: the options were taken over, "
    "and {} starts anew. Load the old optimizer's base_optimizer.state_dict() instead, which has both"
)
Weights = dict[Tensor, dict[str, Tensor]]  # per parameter: its master copy, unperturbed weights, first gradient, memory


def saved_weights(buckets: Iterable[Bucket], is_perturbed: bool) -> Weights:
    """Return copies of the buckets' weights."""
    result: Weights = {}
    for bucket in buckets:
        for slot, parameter in enumerate(bucket.params):
            weights = bucket.backup.unperturbed_weights(bucket.select((slot,)))[0]
            if bucket.backup.is_master:
                result.setdefault(parameter, {})[MASTER] = weights.clone()
            for name in (VARIANT_STATE, NEXT_STATE) if is_perturbed else (VARIANT_STATE,):
                if name in bucket.arena:
                    result.setdefault(parameter, {})[name] = bucket.arena.views(name)[slot].clone()
            if is_perturbed and slot in bucket.backup_selection.slots:
                result.setdefault(parameter, {})[UNPERTURBED] = weights.to(bucket.dtype, copy=True)
                if G1 in bucket.arena:
                    result[parameter][G1] = bucket.arena.views(G1)[slot].clone()
    return {p: {name: as_dtensor_like(tensor, p) for name, tensor in tensors.items()} for p, tensors in result.items()}


def load_saved_weights(bucket: Bucket, copies: Weights, is_perturbed: bool) -> None:
    """Copy the result of `saved_weights` into a new bucket, whose dtype and device may be others."""
    backups = []
    for slot, parameter in enumerate(bucket.params):
        tensors = {name: local_part_like(tensor, parameter) for name, tensor in copies.get(parameter, {}).items()}
        weights = tensors.get(MASTER) if bucket.backup.is_master else None
        if VARIANT_STATE in tensors and VARIANT_STATE in bucket.arena:
            bucket.arena.views(VARIANT_STATE)[slot].copy_(tensors[VARIANT_STATE])
            if NEXT_STATE in tensors:
                bucket.layout.views(bucket.field(NEXT_STATE)[0])[slot].copy_(tensors[NEXT_STATE])
        if is_perturbed and UNPERTURBED in tensors:
            backups.append(slot)
            if G1 in tensors:
                if G1 not in bucket.arena:
                    bucket.arena.field(G1, bucket.dtype)
                bucket.arena.views(G1)[slot].copy_(tensors[G1])
            original = tensors[UNPERTURBED].to(bucket.device, bucket.dtype)
            # A master copy counts only if it rounds to the weights, because a conversion from another half precision
            # may have rounded them otherwise.
            weights = original if weights is None else _where_rounds_to(original, weights.to(bucket.device))
        if weights is not None:
            bucket.select((slot,)).views(bucket.backup.weights)[0].copy_(weights)
    bucket.backup_selection = bucket.select(tuple(backups))


def _where_rounds_to(weights: Tensor, master: Tensor) -> Tensor:
    return torch.where(master.to(weights.dtype) == weights, master, weights.to(master.dtype))


def pack(base_state: dict[str, Any], params: list[Tensor], weights: Weights, facts: dict[str, Any]) -> dict[str, Any]:
    """Complete a state dict of the base optimizer, and add `facts` to it. Tensors become copies, which later steps do
    not change."""
    state = {
        key: {n: _copy(v) for n, v in entry.items()} if isinstance(entry, dict) else entry
        for key, entry in base_state["state"].items()
    }
    for i, parameter in enumerate(params):
        if parameter in weights:
            state[i] = {**state.get(i, {}), **{name: tensor.clone() for name, tensor in weights[parameter].items()}}
    groups = [{name: _copy(value) for name, value in group.items()} for group in base_state["param_groups"]]
    return {**base_state, "state": state, "param_groups": groups, "fastsam": {"format": FORMAT, **facts}}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class CheckedState:
    """A state dict that was checked against the optimizer's parameters. The optimizer has not changed yet.

    Raises:
        ValueError: it is the state of another model or optimizer, or not a state dict.
    """

    def __init__(self, state_dict: Mapping[str, Any], groups: list[Group], rule: UpdateRule | None, sam: SAM) -> None:
        _check_form(state_dict)
        entries, saved_groups = state_dict["state"], state_dict["param_groups"]
        steps = saved_groups[0].get(STEPS, 0) if saved_groups else 0
        facts = {"steps": steps, **state_dict.get("fastsam", {"format": FORMAT, "perturbed": False})}
        if facts.get("format") != FORMAT:
            raise ValueError(
                f"this state dict has format {facts.get('format')!r}, this version of fastsam reads format {FORMAT}; "
                f"update fastsam"
            )
        self.is_perturbed = _is(bool, facts.get("perturbed"), "'perturbed' of 'fastsam'")
        self.training = _is(bool, facts.get("training", True), "'training' of 'fastsam'")
        self.perturbations = _is(int, facts.get("perturbations", 0), "'perturbations' of 'fastsam'")
        self.steps = _is(int, facts["steps"], "'steps' of 'fastsam'")
        self.unit, self.scale = (
            None
            if facts.get(name) is None
            else torch.tensor(_is(float, facts[name], f"{name!r} of 'fastsam'"), device="cpu")
            for name in ("unit", "scale")
        )
        self.uninitialized_numbers = _numbers(facts.get("left_out"), sum(len(group["params"]) for group in groups))
        keeps = any(isinstance(entry, dict) and VARIANT_STATE in entry for entry in entries.values())
        variant_name = _is(str, facts.get("variant", type(sam).__name__), "'variant' of 'fastsam'")
        if variant_name != type(sam).__name__ and (keeps or self.is_perturbed):
            midway = "between its two passes" if "training" not in facts else "in training, at its perturbed point"
            raise ValueError(
                f"this is the state of another variant: of {variant_name}, "
                f"{'which keeps a vector' if keeps else midway}, and this optimizer's is {type(sam).__name__}. Build "
                f"it with variant={variant_name}(...), or load the state dict of that one's base_optimizer, which "
                "starts anew"
            )
        self.groups = _merge_groups(saved_groups, groups, rule)
        self._saved_groups = saved_groups
        keys = [key for group in saved_groups for key in group["params"]]
        if len(set(keys)) < len(keys):
            raise ValueError(f"not a state dict of an optimizer: 'params' name a parameter twice, got {keys}")
        self._params = dict(zip(keys, (p for group in groups for p in group["params"]), strict=True))
        self.weights: Weights = {}
        self._state: dict[Any, Any] = {}
        for key, entry in entries.items():
            self._split(key, entry, rule)
        # State of the base optimizer that the dict does not have, in words.
        self.missing_state = ""
        if any(isinstance(e, dict) and COPIED[0] in e for e in entries.values()) and not any(self._state.values()):
            fields = [name for group in self.groups for name in (rule.fields(group) if rule else ())]
            self.missing_state = ", ".join(dict.fromkeys(fields)) if rule else "the base optimizer's state"

    def _split(self, key: Any, entry: Any, rule: UpdateRule | None) -> None:
        """Separate SAM's entries from the base optimizer's."""
        parameter = self._params.get(key)
        if parameter is None:
            self._state[key] = entry
            return
        _is(dict, entry, f"the state of parameter {key}")
        for name in (*SAM_KEYS, *(rule.state if rule else ())):
            if entry.get(name) is not None or (name in SAM_KEYS and name in entry):
                _check_field(entry[name], parameter, f"{name} of parameter {key}")
        if rule is not None and rule.counter is not None and rule.counter in entry:
            _check_count(entry[rule.counter], f"{rule.counter} of parameter {key}")
        self._state[key] = {name: value for name, value in entry.items() if name not in SAM_KEYS + COPIED}
        entries = {name: entry[name].detach().clone() for name in SAM_KEYS if name in entry}
        if entries:
            self.weights[parameter] = entries

    def for_base(self) -> dict[str, Any]:
        """Return the state dict for the base optimizer's own `load_state_dict`."""
        groups = [
            {**group, "params": saved_group["params"]}
            for group, saved_group in zip(self.groups, self._saved_groups, strict=True)
        ]
        return {"state": self._state, "param_groups": groups}

    def for_fused(self, rule: UpdateRule) -> dict[Any, Any]:
        """Return copies of the state per parameter, on its device; momenta keep the dtype of the arithmetic."""
        state = {}
        for key, entry in self._state.items():
            p = self._params.get(key)
            if p is None or not isinstance(entry, dict):
                state[key] = deepcopy(entry)
                continue
            entries = {
                n: v.detach().to(p.device, compute_dtype(p.dtype), copy=True)
                for n, v in entry.items()
                if n in rule.state and isinstance(v, Tensor)
            }
            state[p] = {**{n: _copy(v) for n, v in entry.items() if v is not None}, **entries}
        return state


def _is(kind: type[T], value: Any, subject: str) -> T:
    """Return `value`. Raises ValueError unless it is of that kind."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        type_name = type(value).__name__
        raise ValueError(f"not a state dict of an optimizer: {subject} must be {KINDS[kind]}, got {type_name}")
    return value


def _numbers(value: Any, count: int) -> list[int] | None:
    """Return `value`. Raises ValueError unless it is None or has numbers of parameters below `count`."""
    if value is None:
        return None
    for number in _is(list, value, "'left_out' of 'fastsam'"):
        if not 0 <= _is(int, number, "a number in 'left_out' of 'fastsam'") < count:
            raise ValueError(f"this is the state of another model: 'left_out' names parameter {number} of {count}")
    return list(value)


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
        group = {
            **{n: v for n, v in old.items() if n in OWN_OPTIONS},
            **deepcopy({n: v for n, v in new.items() if n not in ("params", STEPS)}),
        }
        for name, value in old.items():
            group.setdefault(name, value)
        check_group(group, number)
        result.append({name: value for name, value in group.items() if name != "params"})
    return result
