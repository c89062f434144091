"""The constants of a LocalUpdate, checked and made once for all local updates with equal numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fastsam.fed.common.checks import number
from fastsam.fed.step.variant import ALONG_THE_WAY, StepVariant
from fastsam.step import Direction, GradCoefficients

# Fields of a LocalUpdate: the numbers and flags, the vectors, and all optional objects.
NUMBERS = (
    *("direction", "rho", "eta", "perturbed_weight", "clean_weight", "surrogate_gap", "proximal_coefficient"),
    *(
        "drift_weight",
        "uses_last_gradient",
        "penalty",
        "lr_end_factor",
        "rho_end_factor",
        "anchor_weight",
        "full_gradient",
    ),
)
VECTORS = (
    *("gradient_offset", "direction_vector", "dual", "server_perturbation"),
    *("start", "anchor", "rho_scale"),
)
OBJECTS = (*VECTORS, "pilot")
_NEEDS = {
    Direction.GRADIENT_MINUS_DUAL: ("dual", "server_perturbation"),
    Direction.CONSTANT: ("direction_vector",),
    **dict.fromkeys(ALONG_THE_WAY, ("direction_vector",)),
}


class Values(NamedTuple):
    """The fields of a LocalUpdate on which its checks and its variant depend.

    Args:
        given: names of the optional objects that are given.
    """

    direction: Direction
    rho: float
    eta: float
    perturbed_weight: float
    clean_weight: float
    surrogate_gap: float
    proximal_coefficient: float
    drift_weight: float
    uses_last_gradient: bool
    penalty: float
    lr_end_factor: float
    rho_end_factor: float
    anchor_weight: float
    full_gradient: bool
    given: tuple[str, ...]

    @property
    def has_one_gradient(self) -> bool:
        """True if a step has one backward pass."""
        return self.direction.backward_passes == 1


@dataclass(frozen=True, eq=False)
class Constants:
    """Properties that follow from the numbers of a LocalUpdate. Equal local updates share one object.

    Args:
        mix: weights of the two gradients.
        variant: which kernels a step calls.
        vectors: names of the vectors that are given.
        has_first_gradient: a gradient is computed before the first step, over all samples or a pilot's batches.
    """

    mix: GradCoefficients
    variant: StepVariant
    vectors: tuple[str, ...]
    has_first_gradient: bool


def constants_of(values: Values) -> Constants:
    """Return the constants of a LocalUpdate.

    Raises:
        ValueError: for numbers that are not finite or out of range, and for fields that do not go together.
    """
    try:
        return _made(values, tuple(map(type, values)))
    except TypeError:  # a value without a hash, which the checks name
        return _made.__wrapped__(values, ())


@lru_cache(maxsize=1024)
def _made(values: Values, types: tuple[type, ...]) -> Constants:
    """`types` are the types of the values, because True equals 1."""
    _check(values)
    mix = GradCoefficients(values.perturbed_weight, values.clean_weight, values.surrogate_gap)
    variant = _variant(
        values.direction,
        "gradient_offset" in values.given,
        bool(values.proximal_coefficient),
        mix.needs_g1,
        bool(values.surrogate_gap),
        values.lr_end_factor != 1 or values.rho_end_factor != 1,
        values.drift_weight,
        values.uses_last_gradient,
        values.anchor_weight,
        "pilot" in values.given,
        "rho_scale" in values.given,
    )
    vectors = tuple(name for name in VECTORS if name in values.given)
    return Constants(mix, variant, vectors, values.full_gradient or "pilot" in values.given)


_variant = lru_cache(maxsize=256)(StepVariant)


def _check(c: Values) -> None:
    """Raise ValueError for numbers out of range, and for fields that do not go together."""
    number("rho", c.rho, at_least=0)
    number("eta", c.eta, at_least=0)
    number("penalty", c.penalty, above=0)
    number("lr_end_factor", c.lr_end_factor, at_least=0)
    number("rho_end_factor", c.rho_end_factor, at_least=0)
    if c.rho_end_factor != 1 and c.direction in (Direction.NONE, Direction.CONSTANT):
        raise ValueError(
            "LocalUpdate: rho_end_factor belongs to directions with a perturbation of every step; the direction is "
            f"{c.direction.value!r}, with rho_end_factor={c.rho_end_factor!r}"
        )
    if "rho_scale" in c.given and c.direction in (Direction.NONE, Direction.GRADIENT_MINUS_DUAL):
        raise ValueError(
            f"LocalUpdate: rho_scale belongs to a perturbation without a dual; the direction is {c.direction.value!r}"
        )
    number("anchor_weight", c.anchor_weight, at_least=0, at_most=1)
    for name in ("perturbed_weight", "clean_weight", "proximal_coefficient", "surrogate_gap", "drift_weight"):
        number(name, getattr(c, name))
    needed = _NEEDS.get(c.direction, ())
    for name in ("direction_vector", "dual", "server_perturbation"):
        if (name in c.given) != (name in needed):
            raise ValueError(
                f"LocalUpdate: the direction {c.direction.value!r} takes {', '.join(needed) or 'none'} of the "
                f"vectors direction_vector, dual, server_perturbation; "
                f"{name} was {'not given' if name in needed else 'given'}"
            )
    if (c.drift_weight and c.direction not in ALONG_THE_WAY) or (
        c.uses_last_gradient and c.direction is not Direction.GRADIENT_PLUS
    ):
        raise ValueError(
            "LocalUpdate: drift_weight belongs to the directions 'path' and 'gradient plus', uses_last_gradient to "
            f"'gradient plus'; the direction is {c.direction.value!r}, with drift_weight={c.drift_weight!r} and "
            f"uses_last_gradient={c.uses_last_gradient!r}"
        )
    if ("anchor" not in c.given) == (c.anchor_weight > 0) or (c.anchor_weight and c.has_one_gradient):
        raise ValueError(
            "LocalUpdate: an anchor and an anchor_weight > 0 go together, in a step whose perturbation is found by a "
            "first gradient; got "
            f"anchor_weight={c.anchor_weight!r}, {'no' if 'anchor' not in c.given else 'an'} anchor, and the direction "
            f"{c.direction.value!r}"
        )
    if (c.clean_weight or c.surrogate_gap) and c.has_one_gradient:
        raise ValueError(
            "LocalUpdate: clean_weight and surrogate_gap combine the gradients at the unperturbed and at the "
            f"perturbed weights; the direction {c.direction.value!r} has one gradient only"
        )
    if "pilot" in c.given and (c.direction is Direction.NONE or c.full_gradient):
        raise ValueError(
            "LocalUpdate: a pilot finds the radius of a perturbation, by gradients that take the place of the full "
            "one; got the direction "
            f"{c.direction.value!r} and full_gradient={c.full_gradient!r}"
        )
    if "pilot" in c.given and c.rho_end_factor != 1:
        raise ValueError(
            f"LocalUpdate: a pilot finds one radius for the whole round; got rho_end_factor={c.rho_end_factor!r}"
        )
