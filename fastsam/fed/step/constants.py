"""The constants of a LocalUpdate, checked and made once for all local updates with equal numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fastsam.fed.common.checks import integer, number
from fastsam.fed.step.variant import ALONG_THE_WAY, StepVariant
from fastsam.step import Direction, Mix

# Fields of a LocalUpdate: the numbers and flags, the vectors, and all optional objects.
NUMBERS = (
    *("direction", "rho", "eta", "perturbed_weight", "clean_weight", "surrogate_gap", "proximal_coefficient"),
    *("drift", "remembers", "penalty", "lr_end_factor", "rho_end_factor", "pull", "full_gradient", "epochs", "only"),
)
VECTORS = (
    *("gradient_offset", "direction_vector", "dual", "server_perturbation"),
    *("start", "anchor", "beside", "rho_scale"),
)
OBJECTS = (*VECTORS, "pilot", "input_map", "teacher", "then", "envelope", "mixture")
_NEEDS = {
    Direction.GRADIENT_MINUS_DUAL: ("dual", "server_perturbation"),
    Direction.CONSTANT: ("direction_vector",),
    **dict.fromkeys(ALONG_THE_WAY, ("direction_vector",)),
}


class Values(NamedTuple):
    """The fields of a LocalUpdate on which its checks and its variant depend.

    Args:
        given: names of the optional objects that are given.
        teacher_perturbs: the teacher's term gives the first gradient.
        next_phase_chains: `then` can be one of several phases.
    """

    direction: Direction
    rho: float
    eta: float
    perturbed_weight: float
    clean_weight: float
    surrogate_gap: float
    proximal_coefficient: float
    drift: float
    remembers: bool
    penalty: float
    lr_end_factor: float
    rho_end_factor: float
    pull: float
    full_gradient: bool
    epochs: int | None
    only: tuple[int, ...] | None
    given: tuple[str, ...]
    teacher_perturbs: bool
    next_phase_chains: bool

    @property
    def has_one_gradient(self) -> bool:
        """True if a step has one backward pass."""
        return self.direction.backward_passes == 1

    @property
    def chains(self) -> bool:
        """True if the step can be one of several phases: it leaves only a delta."""
        alone = self.direction not in _NEEDS and not self.full_gradient
        return alone and "pilot" not in self.given and "input_map" not in self.given

    @property
    def mixes(self) -> bool:
        """True if a second model can be trained in lock step."""
        plain = self.direction is Direction.NONE and not {"teacher", "then", "envelope"}.intersection(self.given)
        return plain and self.chains


@dataclass(frozen=True, eq=False)
class Constants:
    """Properties that follow from the numbers of a LocalUpdate. Equal local updates share one object.

    Args:
        mix: weights of the two gradients.
        variant: which kernels a step calls.
        vectors: names of the vectors that are given.
        chains: the step can be one of several phases.
        is_plain: the client only takes steps, without a gradient at the start, a map of the inputs, a teacher, an
            envelope, a second model, or phases.
    """

    mix: Mix
    variant: StepVariant
    vectors: tuple[str, ...]
    chains: bool
    is_plain: bool


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
    mix = Mix(values.perturbed_weight, values.clean_weight, values.surrogate_gap)
    variant = _variant(
        values.direction,
        "gradient_offset" in values.given,
        bool(values.proximal_coefficient),
        mix.needs_g1,
        bool(values.surrogate_gap),
        values.lr_end_factor != 1 or values.rho_end_factor != 1,
        values.drift,
        values.remembers,
        values.pull,
        "pilot" in values.given,
        "rho_scale" in values.given,
    )
    vectors = tuple(name for name in VECTORS if name in values.given)
    extras = {"pilot", "input_map", "teacher", "then", "envelope", "mixture"}.intersection(values.given)
    is_plain = not extras and not values.full_gradient and values.epochs is None
    return Constants(mix, variant, vectors, values.chains, is_plain)


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
    number("pull", c.pull, at_least=0, at_most=1)
    for name in ("perturbed_weight", "clean_weight", "proximal_coefficient", "surrogate_gap", "drift"):
        number(name, getattr(c, name))
    needed = _NEEDS.get(c.direction, ())
    for name in ("direction_vector", "dual", "server_perturbation"):
        if (name in c.given) != (name in needed):
            raise ValueError(
                f"LocalUpdate: the direction {c.direction.value!r} takes {', '.join(needed) or 'none'} of the "
                f"vectors direction_vector, dual, server_perturbation; "
                f"{name} was {'not given' if name in needed else 'given'}"
            )
    if (c.drift and c.direction not in ALONG_THE_WAY) or (c.remembers and c.direction is not Direction.GRADIENT_PLUS):
        raise ValueError(
            f"LocalUpdate: drift belongs to the directions 'path' and 'gradient plus', remembers to 'gradient "
            f"plus'; the direction is {c.direction.value!r}, with drift={c.drift!r} and "
            f"remembers={c.remembers!r}"
        )
    if ("anchor" not in c.given) == (c.pull > 0) or (c.pull and c.has_one_gradient):
        raise ValueError(
            "LocalUpdate: an anchor and a pull > 0 go together, in a step whose perturbation is found by a first "
            "gradient; got "
            f"pull={c.pull!r}, {'no' if 'anchor' not in c.given else 'an'} anchor, and the direction "
            f"{c.direction.value!r}"
        )
    if "teacher" in c.given and "input_map" in c.given:
        raise ValueError("LocalUpdate: a step has a teacher or a map of the inputs, not both")
    if "teacher" in c.given and c.teacher_perturbs and c.has_one_gradient:
        raise ValueError(
            "LocalUpdate: a teacher with perturbs=True gives the first gradient of a step with two; the direction "
            f"{c.direction.value!r} has one gradient only"
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
    if c.epochs is not None:
        integer("epochs", c.epochs, at_least=1)
    if c.only is not None and not (isinstance(c.only, tuple) and all(type(i) is int for i in c.only)):
        raise ValueError(
            "LocalUpdate: only must be a tuple of places, as ParameterLayout.places(...) returns them, got "
            f"{type(c.only).__name__}"
        )
    if c.only is not None and not c.only:
        raise ValueError("LocalUpdate: only=() trains nothing; leave the phase out")
    if "then" in c.given and not (c.chains and c.next_phase_chains):
        raise ValueError(
            "LocalUpdate: a step with a further phase, and that phase, have no dual, constant direction, full "
            "gradient, pilot or map of the inputs"
        )
    if "envelope" in c.given and not (
        c.chains and "then" not in c.given and c.proximal_coefficient and "gradient_offset" in c.given
    ):
        raise ValueError(
            "LocalUpdate: an envelope needs a proximal term (proximal_coefficient > 0 and gradient_offset = "
            "-proximal_coefficient * start), in a step of one phase without a dual, constant direction, full "
            "gradient, pilot or map of the inputs"
        )
    if ("beside" not in c.given) != ("mixture" not in c.given) or ("mixture" in c.given and not c.mixes):
        raise ValueError(
            "LocalUpdate: beside and mixture are one model and how it learns, next to plain steps of one phase, "
            "without a direction, teacher, "
            f"full gradient or map of the inputs; got the direction {c.direction.value!r}, "
            f"{'no' if 'beside' not in c.given else 'a'} vector "
            f"beside and {'no' if 'mixture' not in c.given else 'a'} mixture"
        )
