"""FedGSAM: FedAvg with local GSAM steps. GSAM: Zhuang, Gong, Yuan, Cui, Adam, Dvornek, Tatikonda, Duncan and Liu,
"Surrogate Gap Minimization Improves Sharpness-Aware Training", ICLR 2022 (Algorithm 1). Qu et al. (ICML 2022) plot a
FedGSAM without defining it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.algorithms.base import SAM, Algorithm, Round, State, Step, hparam
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam.step import set_gsam_coefficients_


@dataclass(frozen=True, eq=False)
class SurrogateGap(SAM):
    """A step of SAM with `v = (1 - b*cc)*g2 + b*g1`, `cc = <g1, g2>/||g2||^2`; the device finds the weights."""

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows.number("inner", 2).zero_()  # <g1, g2> and ||g2||^2

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g1 = passes()
        rows.perturb(g1)
        _, g2 = passes()
        inner = rows.number("inner", 2)
        rows.kernels.inner_(inner, g1.like(g2), g2.tensors, g2.table)
        set_gsam_coefficients_(rows.hparams, inner)
        rows.update(g2, g1)
        return losses


@dataclass(frozen=True)
class FedGSAM(Algorithm):
    """Local steps that lower the perturbed loss and its gap to the unperturbed one.

        g2 as in FedSAM;   g1 = (part along g2) + g1_perp
        w <- w - lr * (g2 - alpha*g1_perp + weight_decay*w)
        rho_t = rho_min + (rho - rho_min) * (lr_t - lr_min)/(lr_0 - lr_min)        if rho_min is given

    GSAM's settings: alpha 0.01, rho 0.04 to 0.02 for ResNets, alpha 0.6, rho 0.6 to 0.1 for ViT-B/32; our default alpha
    lies between. Per round and client 1 P down and 1 P up; state: w. Two backward passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule.
        alpha: weight of g1_perp; 0 is FedSAM.
        rho_min: radius at the learning rate lr_min, so that rho falls with the learning rate; None for rho as it
            is.
        lr_min: learning rate at which the radius is rho_min.
    """

    rho: Scheduled = hparam(0.05, check_scheduled)
    alpha: float = hparam(0.1, number, at_least=0)
    rho_min: float | None = None
    lr_min: float = hparam(0.0, number, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho_min is not None:
            number("rho_min", self.rho_min, at_least=0)
        elif self.lr_min:
            raise ValueError(f"lr_min belongs to rho_min (rho as a function of lr), got only lr_min={self.lr_min!r}")

    def uses_lr(self) -> bool:
        return self.rho_min is not None

    def radius(self, round: Round) -> float:
        """Return rho_t. Raises ValueError if lr_min is not below the first learning rate, or if rho_t is negative."""
        rho = value_at("rho", self.rho, round)
        if self.rho_min is None:
            return rho
        if not self.lr_min < round.first_lr:
            raise ValueError(f"lr_min must be below the run's first lr, {round.first_lr:g}; got {self.lr_min!r}")
        share = (round.lr - self.lr_min) / (round.first_lr - self.lr_min)
        return number(f"rho in round {round.index + 1}", self.rho_min + (rho - self.rho_min) * share, at_least=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        rho = self.radius(round)
        return SurrogateGap(rho=rho, b=-self.alpha) if self.alpha else SAM(rho=rho)
