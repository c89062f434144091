"""The base optimizer's update as a call of the kernels.

`fastsam_kernels.rules` has the rules: names of options and of state (torch's, so that state dicts are interchangeable),
and arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.optim.bucket import Bucket, BucketGrads
from fastsam.optim.selection import Selection
from fastsam_kernels.rule import UpdateRule
from fastsam_kernels.rules import RULES

Group = dict[str, Any]


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
        return None if self.g1_field is None else part.views(bucket.arena.field(self.g1_field, bucket.dtype))


def state_spec_of(rule: UpdateRule, group: Group) -> StateSpec:
    """Return the state specification of a group's parameters."""
    fields, start = rule.fields(group), rule.initial_state(group)
    starts = start if isinstance(start, tuple) else (start,) * len(fields)
    return StateSpec(fields, rule.counter, rule.initializes_in_first_step(group), starts)


def operands_of(rule: UpdateRule, bucket: Bucket, spec: StateSpec) -> tuple[list[Tensor | None], Tensor | None]:
    """Return the state's fields (None for missing ones), and the step counts if the rule has them."""
    state = [bucket.field(name) if name in spec.fields else None for name in rule.state]
    return state, None if spec.counter is None else bucket.steps


def calls_of(
    rule: UpdateRule,
    bucket: Bucket,
    part: Selection,
    grads: Sequence[Tensor],
    spec: StateSpec,
    first: bool,
    inputs: UpdateInputs,
) -> list[partial[Any]]:
    """Return the update of `part`, ready to run: calls to make in order, until one returns true because it could not
    run."""
    state, steps = operands_of(rule, bucket, spec)
    operands = *bucket.backup.operands(part), grads, part.table, bucket.hparams, rule.name, state
    return op_calls(bucket, operands, inputs, part, steps=steps, init_state=first)


def op_calls(
    bucket: Bucket, operands: Sequence[Any], inputs: UpdateInputs, part: Selection, **options: Any
) -> list[partial[Any]]:
    """Return `update_` with these operands, options and inputs as calls to make in order."""
    options |= {"g1": inputs.g1(bucket, part), "grad_scale": inputs.grad_scale, "found_inf": inputs.found_inf}
    options |= {"sumsq_v": inputs.sumsq, "write_master": bucket.backup.is_master}
    make = None if torch.compiler.is_compiling() else getattr(bucket.kernels, "update_calls", None)
    return [partial(bucket.kernels.update_, *operands, **options)] if make is None else make(*operands, **options)


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """Return the rule of `optimizer`, or None if its own `step` must make the update."""
    for rule in RULES.values():
        if type(optimizer) in rule.optimizer_types and all(map(rule.supports, optimizer.param_groups)):
            return rule
    return None
