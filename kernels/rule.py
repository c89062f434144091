"""Update rules: how `update_` uses the gradient of the local update rule (`reference.update_`).

A rule is two files. `rules/NAME.py` has its `RULE`, with the equation and its source in the docstring;
`csrc/rules/NAME.h` has the same arithmetic for the compiled kernels. Both are found by their names, and no other file
lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from .hparams import FIRST_RULE_HPARAM, NUM_HPARAMS, HParam

Group = Mapping[str, Any]  # options of an optimizer's parameter group
Scalars = Mapping[int, Tensor]  # columns of `hparams`, each `[rows, 1]`
MAX_STATE = 3  # largest number of fields in a rule's state


def _true(group: Group) -> bool:
    return True


def _false(group: Group) -> bool:
    return False


def _zero(group: Group) -> float:
    return 0.0


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """The update of some optimizer classes.

    Attributes:
        name: name of both files.
        optimizer_types: the optimizer classes. Their subclasses are not served, because they may change the update.
        options: keys of a parameter group that the rule reads.
        state: keys of the fields in a parameter's state, in the order of the kernels' arguments.
        counter: key of the number of steps in a parameter's state; None if steps are not counted.
        optional: keys of the fields that a parameter may lack; `state_keys` returns the fields of a group's parameters.
        rule_hparams: function from a group to the rule's own columns of `hparams`, in their order: Python numbers or
            one-element tensors.
        reference_update: function of the reference, see below.
        scalar_args, triton_update: functions that Triton compiles, see below.
        foreach_update: function for torch's multi-tensor functions and fused optimizers, see below. None: the reference
        is used.
        supports: function that returns True if the kernels support a group's options. Otherwise the optimizer's own
            `step` is used.
        initializes_in_first_step: function that returns True if a parameter's first update differs from later ones with
            fields of zeros (`init_state`).
        initial_state: function that returns the value of the fields before the first step: one number, or one per field
            of `state_keys`.
        is_decoupled: function that returns True if weight decay shrinks the weights by `lr*decay`, and False if it is a
            part of the gradient.

    `reference_update(h, w, d, fields, t, init_state)` returns the new weights and the new fields in their order, each
    `[rows, length]`:

        h       the columns
        w       the weights, already shrunk if the decay is decoupled
        d       the gradient, with a coupled decay in it
        fields  in the order of `state`, None for fields that these parameters lack
        t       float64 `[rows, 1]`, the number of this step, from 1
        init_state True if the fields are not set yet

    `scalar_args(lr, rule_hparams, count, COMPUTE)` returns a tuple of scalars, computed in float64 from the rule's own
    columns (a tuple). `triton_update(w, d, fields, numbers, STATE_MASK, INIT_STATE)` returns a tuple of the new weights
    and the new fields. Bit i of STATE_MASK is set if field i is given. `tl`, and `divide`, `root` and `power` of
    `triton_common`, are globals of both.

    `foreach_update(h, w_, d, decay, fields_, t, init_state)` updates lists of tensors on the CPU in place. `h` has the
    columns as numbers; if they have a decoupled decay, `foreach_update` shrinks the weights. `d` is the gradient
    without `decay*w`, and `t` has a count per tensor if steps are counted.
    """

    name: str
    optimizer_types: tuple[type[Optimizer], ...]
    options: tuple[str, ...]
    state: tuple[str, ...]
    rule_hparams: Callable[[Group], Sequence[Any]]
    reference_update: Callable[[Scalars, Tensor, Tensor, Sequence[Tensor | None], Tensor, bool], tuple[Tensor, ...]]
    scalar_args: Callable[..., Any]
    triton_update: Callable[..., Any]
    foreach_update: Callable[..., None] | None = None
    optional: tuple[str, ...] = ()
    counter: str | None = None
    supports: Callable[[Group], bool] = _true
    state_keys: Callable[[Group], tuple[str, ...]] | None = None
    initializes_in_first_step: Callable[[Group], bool] = _false
    initial_state: Callable[[Group], float | tuple[float, ...]] = _zero
    is_decoupled: Callable[[Group], bool] = _false

    def columns(self, group: Group) -> dict[int, Any]:
        """Return the group's device scalars, by column."""
        common: dict[int, Any] = {
            HParam.LR: group["lr"],
            HParam.DECAY: group["weight_decay"],
            HParam.G2_COEF: -1.0 if group["maximize"] else 1.0,
            HParam.DECOUPLED: float(self.is_decoupled(group)),
        }
        return {**common, **dict(zip(range(FIRST_RULE_HPARAM, NUM_HPARAMS), self.rule_hparams(group), strict=False))}

    def fields(self, group: Group) -> tuple[str, ...]:
        """Return the keys of the fields that a group's parameters have."""
        return self.state if self.state_keys is None else self.state_keys(group)

    @property
    def required_fields(self) -> tuple[bool, ...]:
        """For each field of the state, True if every call has it."""
        return tuple(name not in self.optional for name in self.state)


class UpdateOptions(NamedTuple):
    """The operands of `reference.update_` that have defaults, by their names there."""

    steps: Tensor | None = None
    g1: Sequence[Tensor] | None = None
    q: Tensor | None = None
    sumsq_v: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    init_state: bool = False
    write_master: bool = False
    shift: Tensor | None = None


def pad_state(state: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the fields of a state, padded with None to `MAX_STATE`. Raises ValueError for more fields."""
    if len(state) > MAX_STATE:
        raise ValueError(f"a rule's state has at most {MAX_STATE} fields, got {len(state)}")
    padded_state = [*state, None, None, None]
    return padded_state[0], padded_state[1], padded_state[2]
