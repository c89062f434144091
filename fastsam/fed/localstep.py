"""The one local step that every algorithm is made of, and what a client's row leaves behind.

Form U, in one client and one round (w^t is the global model that the client received):

    d   = none, g1, or T^2*g1 with T = |w| + eta (ASAM)
    eps = rho * d / (||d|| + nu)                  ASAM: the norm is that of T*g1
    v   = a*g2 + q,   g2 = gradient at w + eps    without a direction g2 = g1
    w  <- w - lr * (sig*v + (weight_decay + phi)*w)

An algorithm chooses the constants; an executor runs the step; neither knows the other. The arithmetic stands in
`fastsam_kernels.reference`. `sig` (clipping), the weight decay and the momentum belong to the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from .checks import number


class Direction(Enum):
    """Where a step looks for the worst case: the direction of the perturbation."""

    NONE = "none"  # no perturbation: one back-propagation
    GRADIENT = "gradient"  # SAM
    ADAPTIVE_GRADIENT = "adaptive gradient"  # ASAM


@dataclass(frozen=True)
class LocalStep:
    """The constants of form U for one client in one round.

    q: flat `[stride]` row, in the dtype of the weights, or None. With `phi > 0` it holds the constant half `-phi*w^t` of the proximal
    term `phi*(w - w^t)`. Raises ValueError for numbers that are not finite and for a negative radius.
    """

    direction: Direction = Direction.NONE
    rho: float = 0.0  # radius of the perturbation, over the whole model
    eta: float = 0.0  # ASAM only
    a: float = 1.0  # weight of the gradient at the perturbed point
    q: Tensor | None = None  # constant added to the gradient
    phi: float = 0.0  # proximal coefficient

    def __post_init__(self) -> None:
        number("rho", self.rho, at_least=0)
        number("eta", self.eta, at_least=0)
        number("a", self.a)
        number("phi", self.phi)

    @property
    def perturbs(self) -> bool:
        """Whether a step has two back-propagations."""
        return self.direction is not Direction.NONE


@dataclass(frozen=True)
class RowEnd:
    """What a client's row leaves behind after its local steps. Its tensors are the receiver's to keep.

    displacement: `[stride]`, `w_K - w^t`, in the dtype of the weights.
    steps: local steps really done, `epochs * ceil(samples / batch_size)`. backprops: back-propagations really done.
    loss: 0-dim float64, the sum over the batches of (batch size) * (loss at the unperturbed weights). seen: samples in those batches.
    buffers: flat float64 displacement of the model's buffers, None for a model without.
    """

    client: int
    displacement: Tensor
    steps: int
    backprops: int
    loss: Tensor
    seen: int
    buffers: Tensor | None = None
