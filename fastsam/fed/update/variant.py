"""The variant of a local step: which kernels it calls, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from fastsam.step import Direction

ALONG_THE_WAY = (Direction.PATH, Direction.GRADIENT_PLUS)  # directions that know the way so far


def needs_of(options: Any) -> frozenset[str]:
    """Return the names of the fields of a dataclass that differ from their defaults.

    A part that takes local steps lists the names that it serves. It so refuses a field that it does not know.
    """
    return frozenset(f.name for f in fields(options) if getattr(options, f.name) != f.default)


@dataclass(frozen=True)
class StepVariant:
    """The part of a LocalUpdate that decides which kernels are called.

    Rows of one variant share their calls. Numbers are in `hparams`, row by row, except the numbers that torch's own
    operations take, which are here. Variants are made once for all equal constants (`LocalUpdate.constants`), so their
    properties are computed once.

    Args:
        direction: direction of the perturbation.
        has_q: a constant is added to the gradient.
        has_phi: there is a proximal term.
        keeps_first: the update reads the first gradient too.
        surrogate: the weight of g2 is computed on the device (GSAM).
        has_schedule: the learning rate is different in every step.
        drift_weight: weight of `w - w^t` in the direction.
        uses_last_gradient: the gradient of the step before is in the direction.
        anchor_weight: share by which the perturbed point is pulled towards the anchor.
        has_pilot: gradients at the start find the radius.
        has_full_gradient: the gradient over all samples is taken at the start.
        has_start: the local steps begin elsewhere than at the global model.
        has_optimizer_state: the local optimizer's state comes from outside, and is a result of the round.
        has_step_offset: a constant is added to the step.
    """

    direction: Direction = Direction.NONE
    has_q: bool = False
    has_phi: bool = False
    keeps_first: bool = False
    surrogate: bool = False
    has_schedule: bool = False
    drift_weight: float = 0.0
    uses_last_gradient: bool = False
    anchor_weight: float = 0.0
    has_pilot: bool = False
    has_full_gradient: bool = False
    has_start: bool = False
    has_optimizer_state: bool = False
    has_step_offset: bool = False

    def __hash__(self) -> int:  # variants are keys of every stacked client; a dataclass would hash all fields each time
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    @cached_property
    def needs(self) -> frozenset[str]:
        """Names of the features of a step: its direction, and the fields that differ from a plain step."""
        features = needs_of(self)
        return features - {"direction"} | {self.direction.value} if "direction" in features else features

    @cached_property
    def rewrites(self) -> bool:
        """True if the device or a schedule changes `hparams` after they were written."""
        return self.surrogate or self.has_schedule or self.has_pilot

    @cached_property
    def two_passes(self) -> bool:
        """True if a first gradient finds the perturbation."""
        return self.direction.backward_passes == 2

    @cached_property
    def constant(self) -> bool:
        """True if one perturbation serves the whole round."""
        return self.direction is Direction.CONSTANT

    @cached_property
    def uses_path(self) -> bool:
        """True if each step has a new perturbation that is found without a gradient."""
        return self.direction is Direction.PATH

    @cached_property
    def has_dual(self) -> bool:
        """True if the direction has a dual and the server's perturbation."""
        return self.direction is Direction.GRADIENT_MINUS_DUAL

    @cached_property
    def has_first_gradient(self) -> bool:
        """True if a gradient is computed before the first step."""
        return self.has_full_gradient or self.has_pilot

    @cached_property
    def serves_writes(self) -> bool:
        """True if what a forward pass writes into the weights can count, because each step begins with a pass at the
        unperturbed weights, and no pass comes before the first step."""
        return not (self.constant or self.uses_path or self.has_first_gradient)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of the fields that are results of a round, in addition to delta."""
        return ("dual", "eps") * self.has_dual + ("gradient",) * self.has_first_gradient

    @cached_property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that the steps only read, in addition to the gradient offset and the server's
        perturbation."""
        uses = {
            "direction_vector": self.direction in ALONG_THE_WAY,
            "anchor": self.anchor_weight > 0,
            "step_offset": self.has_step_offset,
        }
        return tuple(name for name, is_given in uses.items() if is_given)

    @cached_property
    def needs_origin(self) -> bool:
        """True if the steps read the weights with which the round began."""
        return bool(self.drift_weight) or self.direction is Direction.GRADIENT_BY_DRIFT

    @cached_property
    def memory(self) -> tuple[str, ...]:
        """Names of the fields that a step leaves to the next one or to the results, zero at the start."""
        if self.has_dual:
            return ("eps",)
        return ("path",) if self.uses_path else ("last",) if self.uses_last_gradient else ()
