"""SAM: Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization",
ICLR 2021 (Algorithm 1).
ASAM: Kwon, Kim, Park and Choi, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural
Networks", ICML 2021 (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastsam.optim.suggestions import check_options
from fastsam.step import GradCoefficients

if TYPE_CHECKING:
    from typing_extensions import Self


class OnePassDirection(Enum):
    """The vector along which a variant of one pass perturbs.

    It is known before the step's gradient, so that the weights can stay at the perturbed point between steps.
    """

    NONE = "none: the perturbation takes a separate pass"
    MOMENTUM = "against the base optimizer's momentum"
    GRADIENT = "along the gradient of the step before, which the variant keeps in the gradients' dtype"


class VariantState(Enum):
    """The vector that a variant of two passes keeps from step to step, if any."""

    NONE = "none"
    DIRECTION = "the vector from which `direction` makes the next one; in the dtype of the arithmetic, zeros at first"
    ORTHOGONAL = (
        "the part of g2 that is orthogonal to g1, of the last step that perturbed; in the dtype of the gradients"
    )


@dataclass(frozen=True)
class SAM:
    """The gradient at the worst point of a ball around the weights.

        eps = rho * T^2*g1 / (||T*g1|| + 1e-12),   T = |w| + eta if adaptive (ASAM), else 1
        w <- the base optimizer's update with g2 = gradient at w + eps

    Two gradient passes a step; state: a copy of the weights between them. Every other variant is a `SAM` too, and
    overrides what it chooses otherwise. `rho`, `adaptive` and `eta` are options of every parameter group.

    Args:
        rho: radius of the perturbation, a number, or a one-element tensor that is read on the device in every step.
        adaptive: ASAM.
        eta: eta of ASAM, a number or a one-element tensor.
        interval: number of steps of which the first perturbs; the other steps are the base optimizer's, with one
            gradient pass.
        start: number of steps before the first that perturbs. They are the base optimizer's too, and `interval` counts
            from there.
        rho_fn: None, or a function that returns the radius of a step, for example `LESAM`. It maps tensors on the
            device, rho `[1, groups]` and norm `[1]`, both float64, to a tensor like rho.

    Raises:
        TypeError: `interval` is not an integer or `rho_fn` is not a function.
        ValueError: `interval` is below 1, or `start` is not an integer or negative.
    """

    state: ClassVar[VariantState] = VariantState.NONE
    one_pass_direction: ClassVar[OnePassDirection] = OnePassDirection.NONE
    #: degree of the norm by which a perturbation is divided: 2, or infinity for the largest element
    norm_degree: ClassVar[float] = 2
    #: name of an entry of the base optimizer's state that `direction` reads as `state`, if any
    base_state: ClassVar[str | None] = None

    rho: float | Tensor = 0.05
    adaptive: bool = False
    eta: float | Tensor = 0.0
    interval: int = 1
    start: int = 0
    rho_fn: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a class that overrides `direction` a state, unless it declares none.

        Raises TypeError if it keeps another vector, or takes one pass, so that its direction would not be called.
        """
        super().__init_subclass__(**options)
        if cls.norm_degree not in (2, math.inf):
            raise TypeError(f"{cls.__name__}: norm_degree must be 2 or math.inf, got {cls.norm_degree!r}")
        if cls.direction is SAM.direction:
            return
        one_pass = cls.one_pass_direction is not OnePassDirection.NONE
        if one_pass or cls.state not in (VariantState.NONE, VariantState.DIRECTION):
            raise TypeError(
                f"{cls.__name__} overrides direction, and {cls.__mro__[1].__name__} has a state or a pass that uses no "
                "direction. Derive it from fastsam.SAM"
            )
        if cls.__dict__.get("state") is not VariantState.NONE:
            cls.state = VariantState.DIRECTION

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError for an unknown option, with the nearest one."""
        check_options(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_interval("interval", self.interval)
        check_start(self.start)
        if self.rho_fn is not None and (not callable(self.rho_fn) or isinstance(self.rho_fn, torch.nn.Module)):
            raise TypeError(f"rho_fn must be a function such as fastsam.variants.LESAM(sigma=0.1), got {self.rho_fn!r}")

    @property
    def coefficients(self) -> GradCoefficients:
        """Coefficients of the two gradients in the update of a step that perturbs."""
        return GradCoefficients()

    @property
    def unperturbed_coefficients(self) -> GradCoefficients:
        """Coefficients in the update of a step that does not perturb: with at most a `looksam_alpha`."""
        return GradCoefficients()

    def perturbs_group(self, group: Mapping[str, Any]) -> bool:
        """Return True if the parameters of this group are perturbed. The norm leaves all other groups out."""
        return True

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        """Return what to perturb along. A class that overrides this has `VariantState.DIRECTION`, or declares
        `state = VariantState.NONE` and gets empty vectors for `state` and `next_state`. With `base_state` it gets that
        entry of the base optimizer's state, which it must not write, as `state`.

        All vectors are `[1, n]`, all parameters of one dtype in one vector: float32, or float64 for float64 parameters.

        With a GradScaler, g is the gradient times the scale of the first step. The scale cancels if the direction is
        homogeneous: c * g and c * state give c times the direction and c times the next state, for every c > 0. Linear
        functions and `g * g.abs() / g.norm()` are homogeneous. Another function, such as `g + g.sign()`, is right only
        without a GradScaler.

        Args:
            g: first gradient, which may be overwritten.
            state: kept vector, as the last step left it; zeros at first.
            next_state: output, the kept vector after this step.
        """
        raise NotImplementedError

    @property
    def has_direction(self) -> bool:
        """True if the perturbation is along another vector than the gradient."""
        return type(self).direction is not SAM.direction

    def perturbs(self, step: int) -> bool:
        """Return True if the step with this number perturbs; steps are counted from 0, which is the step `start`."""
        return step % self.interval == 0

    def perturbs_at(self, step: int) -> bool:
        """Return True if step number `step` of a training perturbs: not before `start`, and then as `perturbs` says."""
        return step >= self.start and self.perturbs(step - self.start)

    @property
    def perturbs_every_step(self) -> bool:
        """True if there is no step without a perturbation."""
        return self.start == 0 and self.interval == 1 and type(self).perturbs is SAM.perturbs


def check_one_pass(variant: SAM) -> None:
    """Raise ValueError for options that a variant of one pass cannot use."""
    for name, default in (("interval", 1), ("start", 0)):
        if (value := getattr(variant, name)) != default:
            kind = type(variant).__name__
            raise ValueError(f"{name} must be left at {default}: {kind} takes one pass in every step, got {value!r}")
    if variant.rho_fn is not None:
        raise ValueError(
            f"rho_fn must be left at None: it needs the gradient's norm, and {type(variant).__name__} perturbs "
            f"before the gradient is known"
        )


def check_interval(name: str, value: int) -> None:
    """Raise TypeError if `value` is not an integer, and ValueError if it is below 1."""
    steps = _whole(value)
    if steps is None:
        raise TypeError(f"{name} must be a whole number of steps, got {value!r}")
    if steps < 1:
        raise ValueError(f"{name} must be 1 or more steps, got {value!r}")


def check_start(value: int) -> None:
    """Raise ValueError if `value` is not an integer, or is below 0."""
    steps = _whole(value)
    if steps is None or steps < 0:
        raise ValueError(f"start must be a whole number of steps, 0 or more, got {value!r}")


def _whole(value: object) -> int | None:
    """Return `value` as an integer, or None if it is not an integer."""
    try:
        return None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except Exception:  # `__index__` of the user may raise any exception
        return None


def check_real(name: str, value: float, requirement: str, fits: Callable[[float], Any]) -> None:
    """Raise TypeError if `value` is neither a real number nor a tensor, and ValueError if it does not fit."""
    if not isinstance(value, (Real, Tensor)):  # a Decimal, for example, raises other errors when it is compared
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not fits(value):
        raise ValueError(f"{name} must be {requirement}, got {value!r}")


def variant_of(
    variant: SAM | None, rho: float | Tensor | None, adaptive: bool, eta: float | Tensor, interval: int, start: int
) -> SAM:
    """Return the given variant, or a SAM with these options if None is given."""
    sam = SAM(0.05 if rho is None else rho, adaptive, eta, interval, start)
    if variant is None:
        return sam
    if not isinstance(variant, SAM):
        raise TypeError(f"variant must be an instance such as fastsam.variants.GSAM(rho=0.05), got {variant!r}")
    is_counted = (sam.interval, sam.start) != (1, 0)
    if is_counted or rho is not None or adaptive or isinstance(eta, Tensor) or eta:
        raise ValueError(
            "rho, adaptive, eta, interval and start cannot be combined with variant. Pass them to the variant: "
            "variant=GSAM(rho=0.05)"
        )
    return variant
