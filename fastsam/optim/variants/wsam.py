"""WSAM: Yue, Jiang, Ye, Gao, Liu and Zhang, "Sharpness-Aware Minimization Revisited: Weighted Sharpness as a
Regularization Term", KDD 2023."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.optim.variants.sam import SAM, check_real
from fastsam.step import GradCoefficients


@dataclass(frozen=True)
class WSAM(SAM):
    """Weighs the sharpness, the perturbed loss minus the loss itself, by `gamma/(1 - gamma)`.

        s = gamma/(1 - gamma)
        decouple:  w <- the base optimizer's update with g1;  w <- w - lr*s*(g2 - g1)
        else:      w <- the base optimizer's update with g1 + s*(g2 - g1)

    gamma = 0 is the base optimizer, gamma = 1/2 with `decouple=False` SAM. `lr` is the group's, after any schedule. A
    first gradient with inf or NaN updates nothing. Two gradient passes a step; state between them: a copy of the
    weights, and g1. Bytes per float32 parameter beyond SAM's 40: 8 to keep g1; 4 to read it in a coupled update, 16 for
    the second update of a decoupled one. Raises ValueError for a gamma outside [0, 1), TypeError for a `decouple` that
    is neither True nor False.
    """

    gamma: float = 0.9
    decouple: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("gamma", self.gamma, "0 or more and below 1", lambda v: 0 <= v < 1)
        if self.decouple not in (True, False):
            raise TypeError(f"decouple must be True or False, got {self.decouple!r}")

    @property
    def coefficients(self) -> GradCoefficients:
        weight = self.gamma / (1 - self.gamma)
        return (
            GradCoefficients(wsam_weight=weight)
            if self.decouple and weight
            else GradCoefficients(g2=weight, g1=1 - weight)
        )
