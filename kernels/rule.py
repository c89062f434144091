"""Update rules: how `update_` uses the gradient of the local update rule (`reference.update_`).

A rule is two files. `rules/NAME.py` has its `RULE`, with the equation and its source in the docstring;
`csrc/rules/NAME.h` has the same arithmetic for the compiled kernels. Both are found by their names; nothing else lists
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .columns import OWN, WIDTH, HParam

Group = Mapping[str, Any]  # options of an optimizer's parameter group
Scalars = Mapping[int, Tensor]  # columns of `hparams`, each `[rows, 1]`
MOST_FIELDS = 3  # of a rule's state


def _always(group: Group) -> bool:
    return True


def _never(group: Group) -> bool:
    return False


def _zero(group: Group) -> float:
    return 0.0


@dataclass(frozen=True, eq=False)
class Rule:
    """The update of some optimizer classes.

    name
        That of both files.
    serves
        The optimizer classes; a subclass may do anything, so these very classes.
    options
        Keys of a parameter group that the rule reads.
    state, counter
        Keys of a parameter's state: of its fields, in the order in which kernels take them; of its number of steps,
        None where nobody counts.
    optional
        Those of the fields that parameters may be without; `kept` says which a group's parameters have.
    own
        From a group to the numbers of the rule's own columns of `hparams`, in their order: Python numbers, or
        one-element tensors.
    step
        `step(h, w, d, fields, t, first)`: the new weights, and the new fields in their order, `[rows, length]` all.
        `h`: the columns; `w`: the weights, shrunk already where the decay is decoupled; `d`: the gradient, with a
        coupled decay in it; `fields`: in the order of `state`, None for those that these parameters do not have; `t`:
        float64 `[rows, 1]`, the number of this step, counted from 1; `first`: the fields hold nothing yet.
    numbers, element
        The same for Triton, which compiles them: `numbers(lr, own, count, COMPUTE)` makes a tuple of scalars, in
        float64, from the own columns (a tuple); `element(w, d, fields, numbers, GIVEN, FIRST)` gives a tuple of the new
        weights and the new fields. Bit i of GIVEN is set where there is field i. `tl`, and `divide`, `root` and `power`
        of `triton_common`, are globals there.
    lists
        The same for torch's multi-tensor functions and fused optimizers, on lists of tensors on the CPU, in place:
        `lists(h, w_, d, decay, fields_, t, first)`. `h`: the columns as numbers; where they say that the decay is
        decoupled, shrinking the weights is left to it; `d`: the gradient without `decay*w`; `t`: a count per tensor,
        where steps are counted. None: the reference serves.
    fits
        Whether the kernels have a group's options; where one does not fit, the optimizer's own `step` serves.
    starts_alone
        Whether a parameter's first update is another than the later ones, from fields of zeros (`first`).
    start
        What the fields of a group's parameters hold before the first step: one number, or one for each of `kept`.
    decoupled
        Whether weight decay shrinks the weights by `lr*decay` instead of being a part of the gradient.
    """

    name: str
    serves: tuple[type[Optimizer], ...]
    options: tuple[str, ...]
    state: tuple[str, ...]
    own: Callable[[Group], Sequence[Any]]
    step: Callable[[Scalars, Tensor, Tensor, Sequence[Tensor | None], Tensor, bool], tuple[Tensor, ...]]
    numbers: Callable[..., Any]
    element: Callable[..., Any]
    lists: Callable[..., None] | None = None
    optional: tuple[str, ...] = ()
    counter: str | None = None
    fits: Callable[[Group], bool] = _always
    kept: Callable[[Group], tuple[str, ...]] | None = None
    starts_alone: Callable[[Group], bool] = _never
    start: Callable[[Group], float | tuple[float, ...]] = _zero
    decoupled: Callable[[Group], bool] = _never

    def columns(self, group: Group) -> dict[int, Any]:
        """The group's device scalars, by column."""
        common: dict[int, Any] = {
            HParam.LR: group["lr"],
            HParam.DECAY: group["weight_decay"],
            HParam.A: -1.0 if group["maximize"] else 1.0,
            HParam.DECOUPLED: float(self.decoupled(group)),
        }
        return {**common, **dict(zip(range(OWN, WIDTH), self.own(group), strict=False))}

    def fields(self, group: Group) -> tuple[str, ...]:
        """Keys of the fields that a group's parameters have."""
        return self.state if self.kept is None else self.kept(group)

    @property
    def needed(self) -> tuple[bool, ...]:
        """Of each field, whether every call has it."""
        return tuple(name not in self.optional for name in self.state)


def all_fields(state: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The fields of a state, filled up with None to `MOST_FIELDS`. Raises ValueError for more than those."""
    if len(state) > MOST_FIELDS:
        raise ValueError(f"a rule's state has at most {MOST_FIELDS} fields, got {len(state)}")
    padded = [*state, None, None, None]
    return padded[0], padded[1], padded[2]
