"""The base optimizer's update by the kernels: its inputs, the state of a bucket, and the calls of a step.

`fastsam_kernels.rules` has the rules: names of options and of state (torch's, so that state dicts are interchangeable),
and arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.optim.backup import Target
from fastsam.optim.bucket import Bucket, BucketGrads
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import as_dtensor_like, local_part_like, to_local
from fastsam_kernels.rule import UpdateRule
from fastsam_kernels.rules import RULES

Group = dict[str, Any]
State = dict[Tensor, dict[str, Any]]


class StateSpec(NamedTuple):
    """The state that an update reads and writes. Parameters of one specification are updated by one call."""

    fields: tuple[str, ...]  # keys of the state that they have
    counter: str | None
    initializes_in_first_step: bool  # their first update differs from later ones
    initial_values: tuple[float, ...]  # values of the fields before the first step

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the state."""
        return self.fields if self.counter is None else (*self.fields, self.counter)


def state_spec_of(rule: UpdateRule, group: Group) -> StateSpec:
    """Return the state specification of a group's parameters."""
    fields, start = rule.fields(group), rule.initial_state(group)
    starts = start if isinstance(start, tuple) else (start,) * len(fields)
    return StateSpec(fields, rule.counter, rule.initializes_in_first_step(group), starts)


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """Return the rule of `optimizer`, or None if its own `step` must make the update."""
    for rule in RULES.values():
        if type(optimizer) in rule.optimizer_types and all(map(rule.supports, optimizer.param_groups)):
            return rule
    return None


class UpdateInputs(NamedTuple):
    """Inputs of an update besides options and state, and the calls that follow it."""

    calls: Sequence[BucketGrads]
    g1_field: str | None = None  # field of another gradient that the update reads
    calls_after: list[partial[Any]] = []  # noqa: RUF012  (never written)
    found_inf: Tensor | None = None  # not 0: nothing is updated
    grad_scale: Tensor | None = None  # divides the gradients of `calls`
    sumsq: Tensor | None = None  # squared norm of the combined gradient, for clipping

    @property
    def plain(self) -> bool:
        """True if the update reads nothing but the gradients of `calls`."""
        return self.g1_field is None and self.found_inf is None and self.grad_scale is None and self.sumsq is None

    def g1(self, bucket: Bucket, part: Selection) -> list[Tensor] | None:
        """Return what the field of the other gradient has of these parameters."""
        return None if self.g1_field is None else part.field_views(bucket.arena.field(self.g1_field, bucket.dtype))

    def op_calls(self, bucket: Bucket, part: Selection, operands: Sequence[Any], **options: Any) -> list[partial[Any]]:
        """Return `update_` of `part` with these operands, options and inputs as calls to make in order, until one
        returns true because it could not run."""
        options |= {"g1": self.g1(bucket, part), "grad_scale": self.grad_scale, "found_inf": self.found_inf}
        options |= {"sumsq_v": self.sumsq, "write_master": bucket.backup.is_master}
        make = None if torch.compiler.is_compiling() else getattr(bucket.kernels, "update_calls", None)
        return [partial(bucket.kernels.update_, *operands, **options)] if make is None else make(*operands, **options)


@dataclass(eq=False)
class UpdatePart:
    """Parameters of an update that one call updates."""

    selection: Selection
    index: tuple[int, ...] | None  # indices of their gradients among the update's; None: all
    spec: StateSpec
    first: bool
    direct: Any = None  # direct calls that made `calls`
    calls: list[partial[Any]] = field(default_factory=list)


@dataclass(eq=False)
class UpdatePlan:
    """The calls of an update. A plan is valid as long as the state has the same tensors."""

    specs: tuple[StateSpec, ...]
    parts: list[UpdatePart] = field(default_factory=list)
    new_entries: State = field(default_factory=dict)  # new entries of the state, after the update


class FusedUpdate:
    """The fused update of a bucket.

    The optimizer's `state` of each parameter, under torch's own names, is a view of this bucket's fields.
    """

    def __init__(self, bucket: Bucket, rule: UpdateRule) -> None:
        self.bucket, self.rule = bucket, rule
        # True if the update writes one part after the other (the reference), so that an interrupt may come between.
        self.in_parts = bucket.dtype in getattr(bucket.kernels, "WRITES_IN_PARTS", ())
        self._plans: dict[Selection, UpdatePlan] = {}
        self._views: dict[str, list[Tensor]] = {}

    def reset(self) -> None:
        """Forget the plans, because the state may have changed."""
        self._plans.clear()

    def adopt(self, specs: tuple[StateSpec, ...], state: State) -> None:
        """Move the state that the parameters have into the fields."""
        self._plan(self.bucket.whole, specs, state)

    def make_initial_state(self, specs: tuple[StateSpec, ...], state: State) -> None:
        """Make the state as it is before a first update, for parameters with a gradient and without state."""
        slots = tuple(i for i, p in enumerate(self.bucket.params) if p.grad is not None)
        state.update(self._plan(self.bucket.select(slots), specs, state).new_entries)
        self.reset()

    def prepare(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        specs: tuple[StateSpec, ...],
        state: State,
        inputs: UpdateInputs,
        afterwards: list[partial[Any]],
    ) -> list[partial[Any]]:
        """Return the calls that restore and update these parameters.

        Until the calls run, weights and state are unchanged. Weights that were not saved yet are saved. `afterwards` is
        an output: calls to make after the calls of every bucket.
        """
        bucket = self.bucket
        target = bucket.backup.target
        if selection is not bucket.backup_selection and target is not Target.PARAMS:
            self._reconcile(selection, grads)
        plan = self._plans.get(selection)
        # A compiled step is traced after the state was made, and torch traces again when an option changes.
        if plan is None or not (torch.compiler.is_compiling() or (plan.specs is specs and not plan.new_entries)):
            plan = self._plans[selection] = self._plan(selection, specs, state)
        # If a first update is skipped, the next one is the first, so the host has to know.
        if inputs.found_inf is not None and any(p.first for p in plan.parts) and inputs.found_inf.item() != 0:
            return [partial(bucket.backup.restore, selection)]
        calls: list[partial[Any]] = []
        for part in plan.parts:
            part_grads = grads if part.index is None else [grads[i] for i in part.index]
            direct = bucket.direct_calls(part.selection) if inputs.plain else None
            if direct is None:
                calls += self._op_calls(part, part_grads, inputs)
            else:
                calls += self._direct_calls(part, direct, part_grads)
        if selection.indirect and target is not Target.BACKUP:
            calls.append(partial(selection.store))
        if plan.new_entries:
            afterwards.append(partial(state.update, plan.new_entries))
        return calls

    def _operands(self, spec: StateSpec) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the state's fields (None for missing ones), and the step counts if the rule has them."""
        state = [self.bucket.field(name) if name in spec.fields else None for name in self.rule.state]
        return state, None if spec.counter is None else self.bucket.steps

    def _op_calls(self, part: UpdatePart, grads: Sequence[Tensor], inputs: UpdateInputs) -> list[partial[Any]]:
        """Return the calls of a part by way of torch's dispatcher."""
        bucket, selection = self.bucket, part.selection
        state, steps = self._operands(part.spec)
        operands = *bucket.backup.operands(selection), grads, selection.table, bucket.hparams, self.rule.name, state
        return inputs.op_calls(bucket, selection, operands, steps=steps, init_state=part.first)

    def _direct_calls(self, part: UpdatePart, direct: Any, grads: Sequence[Tensor]) -> list[partial[Any]]:
        """Return the calls of a part that bypass the dispatcher. If nothing moved they are the calls of the last step,
        with other gradients."""
        if part.direct is direct and direct.renew(part.calls, grads):
            return part.calls
        part.direct = None  # an interrupt on the way leaves the calls of another step, which are not to be made again
        backup = self.bucket.backup
        state, steps = self._operands(part.spec)
        in_place = backup.target is not Target.RESTORED
        options = {"steps": steps, "init_state": part.first, "write_master": backup.is_master}
        calls = direct.update(self.rule.name, state, grads, in_place, **options)
        if direct.REPEATS:  # other calls hold the gradients, which must not outlive the step
            part.calls, part.direct = calls, direct
        return calls

    def copy_state(self) -> dict[str, Tensor]:
        """Return copies of all that an update writes in addition to the weights."""
        return {name: tensor.clone() for name, tensor in self._state_tensors().items()}

    def load_state(self, copies: dict[str, Tensor]) -> None:
        """Take back an update that was interrupted, with the result of `copy_state` from before the update."""
        for name, tensor in self._state_tensors().items():
            if name in copies:
                tensor.copy_(copies[name])

    def _state_tensors(self) -> dict[str, Tensor]:
        bucket = self.bucket
        fields = {name: bucket.field(name) for name in self.rule.state if name in bucket.arena}
        return {**fields, "steps": bucket.steps, "backup": bucket.backup.weights}

    def _reconcile(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """Restore parameters without a second gradient, and save parameters without a first gradient."""
        bucket, old_slots = self.bucket, set(self.bucket.backup_selection.slots)
        bucket.backup.restore(bucket.select(tuple(sorted(old_slots.difference(selection.slots)))))
        new_slots = [(i, g) for i, g in zip(selection.slots, grads, strict=True) if i not in old_slots]
        if new_slots:
            new_part = bucket.select(tuple(i for i, _ in new_slots))
            bucket.save_(new_part, [g for _, g in new_slots])
        bucket.backup_selection = selection

    def _plan(self, selection: Selection, specs: tuple[StateSpec, ...], state: State) -> UpdatePlan:
        """Sort the parameters of an update into calls, and move state that is elsewhere into the fields."""
        bucket = self.bucket
        parts: dict[tuple[StateSpec, bool], list[int]] = {}
        plan = UpdatePlan(specs)
        for position, slot in enumerate(selection.slots):
            spec = specs[bucket.groups[slot]]
            fresh = bool(spec.keys) and not self._adopt(slot, spec, state)
            if fresh:
                parameter = bucket.params[slot]
                plan.new_entries[parameter] = {**state.get(parameter, {}), **self._state_of(slot, spec)}
            first = fresh and spec.initializes_in_first_step
            parts.setdefault((spec, first), []).append(position)
        for (spec, first), index in parts.items():
            part = bucket.select(tuple(selection.slots[i] for i in index))
            plan.parts.append(UpdatePart(part, None if part is selection else tuple(index), spec, first))
        return plan

    def _state_of(self, slot: int, spec: StateSpec) -> dict[str, Tensor]:
        """Return the state of a parameter: views of the fields, shaped as the parameter is."""
        for name in spec.keys:
            if name in self._views:
                continue
            if name == spec.counter:
                self._views[name] = [self.bucket.steps[0, i] for i in range(len(self.bucket.params))]
            else:
                self.bucket.field(name)
                views = zip(self.bucket.arena.views(name), self.bucket.params, strict=True)
                self._views[name] = [as_dtensor_like(view, p) for view, p in views]
        return {name: self._views[name][slot] for name in spec.keys}

    def _adopt(self, slot: int, spec: StateSpec, state: State) -> bool:
        """Replace the state of a parameter by views of the fields, with the values that it has.

        Returns False if the parameter has no state. The fields then have the initial values.
        """
        entry = state.get(self.bucket.params[slot], {})
        views = self._state_of(slot, spec)
        starts = dict(zip(spec.fields, spec.initial_values, strict=True))
        for name, view in views.items():
            value = entry.get(name)
            if value is None:
                to_local(view).fill_(starts.get(name, 0.0))
            elif value is not view:
                found_value = torch.as_tensor(value, device=view.device).detach()
                to_local(view).copy_(local_part_like(found_value, view))
        has_state = any(isinstance(entry.get(name), (Tensor, float, int)) for name in views)
        if has_state:
            entry.update(views)
        return has_state
