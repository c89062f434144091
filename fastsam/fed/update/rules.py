"""The rule by which clients update their weights: SGD of the run's options, or an optimizer of torch that the kernels
have too (Adam, AdamW, Adagrad, RMSprop, Lion, SGD with Nesterov's form)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fastsam.optim.update import rule_of, state_spec_of
from fastsam_kernels.hparams import HParam
from fastsam_kernels.rules import RULES, sgd

STEP = "step"  # name of the number of steps in the state of an optimizer
_LR = 0.125  # rate of the optimizer whose options are read; the rule gets the rate with every client


@dataclass(frozen=True)
class LocalRule:
    """A rule of the kernels (`kernels/rules/`) and its options.

    Attributes:
        name: name of the rule.
        fields: name of each field of the rule's state, None for a field that the options do not need.
        initial_values: values of the fields at the start of a round.
        counts_steps: the rule reads the number of the step.
        columns: hyperparameters that all rows of a run share, by column of `hparams`.
    """

    name: str
    fields: tuple[str | None, ...]
    initial_values: tuple[float, ...]
    counts_steps: bool
    columns: Mapping[int, float]

    @property
    def decay(self) -> float:
        """The weight decay."""
        return self.columns[HParam.DECAY]

    @property
    def is_decoupled(self) -> bool:
        """True if weight decay shrinks the weights by `lr*decay`, and is not a part of the gradient."""
        return bool(self.columns.get(HParam.DECOUPLED, 0.0))


def sgd_rule(momentum: float, weight_decay: float) -> LocalRule:
    """Return the rule of SGD with a run's own options."""
    columns = {HParam.DECAY: weight_decay, sgd.MOMENTUM: momentum}
    return LocalRule("sgd", ("momentum_buffer",) if momentum else (None,), (0.0,), False, columns)


def optimizer_rule(optimizer: Callable[..., torch.optim.Optimizer]) -> LocalRule | None:
    """Return the rule of an optimizer class, or a partial of keywords, or None if only its own `step` can update.

    The kernels do not have it, or it is a function whose groups depend on the parameters, or its first step differs
    from later steps (dampening), or it maximizes.
    """
    cls = optimizer.func if isinstance(optimizer, partial) and not optimizer.args else optimizer
    if not any(cls in rule.optimizer_types for rule in RULES.values()):
        return None
    made = optimizer([nn.Parameter(torch.zeros(1, 1))], lr=_LR)
    rule, group = rule_of(made), made.param_groups[0]
    if rule is None or group["lr"] != _LR or group["maximize"] or rule.initializes_in_first_step(group):
        return None
    spec = state_spec_of(rule, group)
    columns = {column: float(value) for column, value in rule.columns(group).items()}
    columns = {column: value for column, value in columns.items() if column not in (HParam.LR, HParam.G2_COEF)}
    values = dict(zip(spec.fields, spec.initial_values, strict=True))
    fields = tuple(name if name in values else None for name in rule.state)
    initial_values = tuple(values.get(name, 0.0) for name in rule.state)
    return LocalRule(rule.name, fields, initial_values, rule.counter is not None, columns)
