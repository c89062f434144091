"""SAM: Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization",
ICLR 2021 (Algorithm 1).
ASAM: Kwon, Kim, Park and Choi, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural
Networks", ICML 2021 (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsam.step import Mix


class Ahead(Enum):
    """What a variant of one pass perturbs along: a vector that is known before the step's gradient, so that the weights
    can rest at the perturbed point between steps."""

    NONE = "nothing: the perturbation takes a pass of its own"
    MOMENTUM = "against the base optimizer's momentum"
    GRADIENT = "along the gradient of the step before"


class Memory(Enum):
    """The vector that a variant keeps from step to step, if any."""

    NONE = "none"
    GRADIENT = "the gradient of the last step that was made; in the dtype of the gradients"
    DIRECTION = "what `direction` makes the next one of; in the dtype of the arithmetic, zeros at first"
    ORTHOGONAL = (
        "the part of g2 that is orthogonal to g1, of the last step that perturbed; in the dtype of the gradients"
    )


@dataclass(frozen=True)
class SAM:
    """The gradient at the worst point of a ball around the weights.

        eps = rho * T^2*g1 / (||T*g1|| + 1e-12),   T = |w| + eta if adaptive (ASAM), else 1
        w <- the base optimizer's update with g2 = gradient at w + eps

    rho, eta: numbers, or one-element tensors, which are read on the device in every step. They and `adaptive` are
    options of every parameter group. Two gradient passes a step; state: a copy of the weights between them. Every other
    variant is a `SAM` too, and overrides what it chooses otherwise.

    every: only one step in so many perturbs, the first of each; the others are the base optimizer's own, with one
    gradient pass.
    radius: None, or what a step's radius is, a function of tensors on the device: (rho `[1, groups]`, norm `[1]`), both
    float64, to one like rho; `LESAM` is one.
    Raises TypeError for an `every` that is no integer and a `radius` that is no function, ValueError for one below 1.
    """

    memory: ClassVar[Memory] = Memory.NONE
    ahead: ClassVar[Ahead] = Ahead.NONE

    rho: float | Tensor = 0.05
    adaptive: bool = False
    eta: float | Tensor = 0.0
    every: int = 1
    radius: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a class that overrides `direction` its memory. Raises TypeError if it keeps another vector, or takes one
        pass, so that its direction would not be called."""
        super().__init_subclass__(**options)
        if cls.direction is SAM.direction:
            return
        if cls.memory not in (Memory.NONE, Memory.DIRECTION) or cls.ahead is not Ahead.NONE:
            raise TypeError(
                f"{cls.__name__} overrides direction, and {cls.__mro__[1].__name__} has a memory or a pass of another "
                f"kind, with which no direction is asked for. Derive it from fastsam.SAM"
            )
        cls.memory = Memory.DIRECTION

    def __post_init__(self) -> None:
        check_interval("every", self.every)
        if self.radius is not None and (not callable(self.radius) or isinstance(self.radius, torch.nn.Module)):
            raise TypeError(f"radius must be a function such as fastsam.variants.LESAM(sigma=0.1), got {self.radius!r}")

    @property
    def mix(self) -> Mix:
        """What of the two gradients the update sees, in a step that perturbs."""
        return Mix()

    @property
    def between(self) -> Mix:
        """What of its one gradient the update sees in a step that does not perturb: a `Mix` with at most a `reuse`."""
        return Mix()

    def moves(self, group: Mapping[str, Any]) -> bool:
        """Whether the parameters of this group are perturbed. Those that are not stay out of the norm."""
        return True

    def direction(self, g: Tensor, memory: Tensor, after: Tensor) -> Tensor:
        """Return what to perturb along. A class that overrides this has `Memory.DIRECTION`.

        Must be a linear function of g and memory, so that a GradScaler's scale cancels. All vectors are `[1, n]`, all
        parameters of one dtype in one vector: float32, or float64 for float64 parameters.

        Args:
            g: first gradient, which may be overwritten.
            memory: kept vector, as the last step left it; zeros at first.
            after: output, the kept vector after this step.
        """
        raise NotImplementedError

    def perturbs(self, step: int) -> bool:
        """Whether the step with this number, counted from 0, perturbs."""
        return step % self.every == 0


def check_one_pass(variant: SAM) -> None:
    """Raises ValueError for options that a variant of one pass has no use for."""
    if variant.every != 1:
        raise ValueError(
            f"every must be left at 1: {type(variant).__name__} takes one pass in every step, got {variant.every!r}"
        )
    if variant.radius is not None:
        raise ValueError(
            f"radius must be left at None: it is made of the gradient's norm, and {type(variant).__name__} perturbs "
            f"before the gradient is known"
        )


def check_interval(name: str, value: int) -> None:
    """Raises TypeError for what is no integer, ValueError for one below 1."""
    try:
        steps = None if isinstance(value, bool) else index(value)
    except Exception as error:  # whatever an object of the user's raises
        raise TypeError(f"{name} must be a whole number of steps, got {value!r}") from error
    if steps is None:
        raise TypeError(f"{name} must be a whole number of steps, got {value!r}")
    if steps < 1:
        raise ValueError(f"{name} must be 1 or more steps, got {value!r}")


def check_real(name: str, value: float) -> None:
    """Raises TypeError for what is neither a real number nor a tensor: a Decimal, say, whose comparisons raise errors
    of their own."""
    if not isinstance(value, (Real, Tensor)):
        raise TypeError(f"{name} must be a number, got {value!r}")
