"""The fused update of one bucket: its state, and the calls of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_not, itemgetter
from typing import Any

import torch
from torch import Tensor

from fastsam.optim.backup import Target
from fastsam.optim.bucket import Bucket
from fastsam.optim.rules import Kind, Rule, UpdateInputs, calls_of, operands_of
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import local, part_of, placed

State = dict[Tensor, dict[str, Any]]


@dataclass(eq=False)
class Part:
    """Parameters of an update that one call serves."""

    selection: Selection
    index: tuple[int, ...] | None  # which of the update's gradients are theirs; None: all
    kind: Kind
    first: bool
    raw: tuple[Any, bool] = (None, False)  # what made `calls`, the shorter way, and whether for weights in place
    calls: list[partial[Any]] = field(default_factory=list)


@dataclass(eq=False)
class Plan:
    """The calls of an update. It holds as long as the state is the one it was made for."""

    parts: list[Part]
    kinds: tuple[Kind, ...]
    missing: State  # what the state gets once the update ran
    dicts: dict[str, list[dict[str, Any]]]  # by key of the state: the entries that have it,
    tensors: dict[str, list[Tensor]]  # and what it was there

    def holds(self, kinds: tuple[Kind, ...]) -> bool:
        """False when a group changed its kind of update, or somebody replaced a tensor of the state."""
        if self.kinds is not kinds or self.missing:
            return False
        try:
            for name, mine in self.tensors.items():
                if any(map(is_not, map(itemgetter(name), self.dicts[name]), mine)):
                    return False
        except KeyError:
            return False
        return True


class FusedUpdate:
    """The optimizer's `state` of each parameter, under torch's own names, is a view of this bucket's fields."""

    def __init__(self, bucket: Bucket, rule: Rule) -> None:
        self.bucket, self.rule = bucket, rule
        # True if the update writes one part after the other (the reference), so that an interrupt may come between.
        self.in_parts = bucket.dtype in getattr(bucket.kernels, "WRITES_IN_PARTS", ())
        self._plans: dict[Selection, Plan] = {}
        self._views: dict[str, list[Tensor]] = {}

    def forget(self) -> None:
        """The state may have changed: it is looked at again."""
        self._plans.clear()

    def adopt(self, kinds: tuple[Kind, ...], state: State) -> None:
        """Takes over the state that the parameters have: it is moved into the fields."""
        self._plan(self.bucket.select(tuple(range(len(self.bucket.params)))), kinds, state)

    def begin(self, kinds: tuple[Kind, ...], state: State) -> None:
        """State, as it is before a first update, for those of these parameters that have a gradient and no state."""
        slots = tuple(i for i, p in enumerate(self.bucket.params) if p.grad is not None)
        state.update(self._plan(self.bucket.select(slots), kinds, state).missing)
        self.forget()

    def prepare(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        kinds: tuple[Kind, ...],
        state: State,
        inputs: UpdateInputs,
        afterwards: list[partial[Any]],
    ) -> list[partial[Any]]:
        """Return the calls that restore and update. Until they run, weights and state are as they were (saved, where
        they had not been). afterwards: gets the calls for when those of every bucket have run."""
        bucket = self.bucket
        target = bucket.backup.target
        if selection is not bucket.held and target is not Target.PARAMS:
            self._reconcile(selection, grads)
        plan = self._plans.get(selection)
        # A compiled step is traced after the state was made, and torch traces again when an option changes.
        if plan is None or not (torch.compiler.is_compiling() or plan.holds(kinds)):
            plan = self._plans[selection] = self._plan(selection, kinds, state)
        # Whether a first update is skipped decides what the next one is, so here the host has to know.
        if inputs.found_inf is not None and any(p.first for p in plan.parts) and inputs.found_inf.item() != 0:
            return [partial(bucket.backup.restore, selection)]
        calls: list[partial[Any]] = []
        for part in plan.parts:
            mine = grads if part.index is None else [grads[i] for i in part.index]
            if inputs.plain:
                raw = bucket.raw_calls(part.selection)
                if raw is not None:
                    calls += self._raw(part, raw, mine)
                    continue
            calls += calls_of(self.rule, bucket, part.selection, mine, part.kind, part.first, inputs)
        if selection.indirect and target is not Target.BACKUP:
            calls.append(partial(selection.store))
        if plan.missing:
            afterwards.append(partial(state.update, plan.missing))
        return calls

    def _raw(self, part: Part, raw: Any, grads: Sequence[Tensor]) -> list[partial[Any]]:
        """The calls of a part by the shorter way. Where nothing moved they are those of the last step, with other
        gradients."""
        in_place = self.bucket.backup.target is not Target.RESTORED
        if part.raw == (raw, in_place) and raw.again(part.calls, grads):
            return part.calls
        # An interrupt on the way leaves the calls of another step, which are not to be made again.
        part.raw = None, False
        bucket = self.bucket
        state, steps = operands_of(self.rule, bucket, part.kind)
        calls = raw.update(self.rule.name, state, steps, grads, part.first, bucket.backup.is_master, in_place)
        if raw.REPEATS:  # other calls hold the gradients, which must not outlive the step
            part.calls, part.raw = calls, (raw, in_place)
        return calls

    def copies(self) -> dict[str, Tensor]:
        """Return copies of all that an update writes in addition to the weights."""
        return {name: tensor.clone() for name, tensor in self._written().items()}

    def put_back(self, copies: dict[str, Tensor]) -> None:
        """Take back an update that was interrupted, with what `copies` returned before it."""
        for name, tensor in self._written().items():
            if name in copies:
                tensor.copy_(copies[name])

    def _written(self) -> dict[str, Tensor]:
        bucket = self.bucket
        fields = {name: bucket.field(name) for name in self.rule.state if name in bucket.arena}
        return {**fields, "steps": bucket.steps, "backup": bucket.backup.weights}

    def _reconcile(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """A parameter without a second gradient is restored; one without a first gradient is updated from where it
        is."""
        bucket, held = self.bucket, set(self.bucket.held.slots)
        bucket.backup.restore(bucket.select(tuple(sorted(held.difference(selection.slots)))))
        late = [(i, g) for i, g in zip(selection.slots, grads, strict=True) if i not in held]
        if late:
            saved = bucket.select(tuple(i for i, _ in late))
            bucket.save_(saved, [g for _, g in late])
        bucket.held = selection

    # --- plans ---

    def _plan(self, selection: Selection, kinds: tuple[Kind, ...], state: State) -> Plan:
        """Sorts the parameters of an update into calls; moves state that is elsewhere into the fields."""
        bucket = self.bucket
        parts: dict[tuple[Kind, bool], list[int]] = {}
        plan = Plan([], kinds, {}, {}, {})
        for position, slot in enumerate(selection.slots):
            kind = kinds[bucket.groups[slot]]
            fresh = bool(kind.keys) and not self._adopt(slot, kind, state)
            if fresh:
                parameter = bucket.params[slot]
                plan.missing[parameter] = {**state.get(parameter, {}), **self._state_of(slot, kind)}
            elif kind.keys:
                entry = state[bucket.params[slot]]
                for name in kind.keys:
                    plan.dicts.setdefault(name, []).append(entry)
                    plan.tensors.setdefault(name, []).append(entry[name])
            first = fresh and kind.starts_alone
            parts.setdefault((kind, first), []).append(position)
        for (kind, first), index in parts.items():
            if len(parts) == 1:
                plan.parts.append(Part(selection, None, kind, first))
            else:
                part = bucket.select(tuple(selection.slots[i] for i in index))
                plan.parts.append(Part(part, tuple(index), kind, first))
        return plan

    def _state_of(self, slot: int, kind: Kind) -> dict[str, Tensor]:
        """The state of a parameter: views of the fields, shaped as the parameter is."""
        for name in kind.keys:
            if name in self._views:
                continue
            if name == kind.counter:
                self._views[name] = [self.bucket.steps[0, i] for i in range(len(self.bucket.params))]
            else:
                self.bucket.field(name)
                views = zip(self.bucket.arena.views(name), self.bucket.params, strict=True)
                self._views[name] = [placed(view, p) for view, p in views]
        return {name: self._views[name][slot] for name in kind.keys}

    def _adopt(self, slot: int, kind: Kind, state: State) -> bool:
        """Makes the state of a parameter the views of the fields, with the values it has. False (and zeros) when it has
        none."""
        entry = state.get(self.bucket.params[slot])
        views = self._state_of(slot, kind)
        starts = dict(zip(kind.fields, kind.starts, strict=True))
        found = entry is not None and any(isinstance(entry.get(name), (Tensor, float, int)) for name in views)
        for name, view in views.items():
            value = entry.get(name) if entry is not None else None
            if value is None:
                local(view).fill_(starts.get(name, 0.0))
            elif value is not view:
                found_value = torch.as_tensor(value, device=view.device).detach()
                local(view).copy_(part_of(found_value, view))
        if found and entry is not None:
            entry.update(views)
        return found
