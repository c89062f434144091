"""The variants of SAM: a problem, a float64 loop of each from its paper's equations, written without fastsam, and
trainings to compare with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastsam import GSAM, SAM, FusedSAM
from fastsam.optim.variants import (
    LESAM,
    MSAM,
    WSAM,
    FriendlySAM,
    GradientPenalty,
    LastGradient,
    LInfSAM,
    LookSAM,
    PreconditionedSAM,
    VaSSO,
)

ALPHA, RHO = 0.7, 0.3
BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True, "momentum": 0.5, "dampening": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),  # makes its own step
    "plain": (torch.optim.SGD, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
}


def problem(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Callable[[Sequence[Tensor], int], Tensor]]:
    """Return three tensors, and a loss of them whose gradient differs at every point and in every step."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 7), (33,), (2, 3, 4))]
    targets = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]

    def loss(ps: Sequence[Tensor], t: int) -> Tensor:
        pairs = zip(ps, targets, strict=True)
        total = sum(((p.double() * (1 + 0.3 * t) - y).tanh() ** 2 * (1 + y**2)).sum() for p, y in pairs)
        assert isinstance(total, Tensor)
        return total * sum(p.double().square().mean() for p in ps)

    return [p.to(dtype) for p in params], loss


# --- the papers' equations, on all parameters as one vector ---


class Paper:
    """SAM (Foret et al. 2021), in the first of every `interval` steps from step `start` on."""

    interval, start = 1, 0

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    def perturbs(self, t: int) -> bool:
        return t >= self.start and (t - self.start) % self.interval == 0

    def direction(self, g1: Tensor) -> Tensor:
        return g1

    def radius(self, norm: Tensor) -> Tensor | float:
        return RHO

    def mix(self, g1: Tensor, g2: Tensor) -> Tensor:
        """Return the gradient for the base optimizer."""
        return g2

    def rest_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient of a step without a perturbation."""
        return g

    def note_step(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Look at the base optimizer after its step."""

    def correction(self) -> Tensor | None:
        """Return what is subtracted after the base optimizer's step, divided by the learning rate."""
        return None


class PaperGSAM(Paper):
    """Zhuang et al. 2022, by the projection itself: g1 minus its part along the unit vector of g2."""

    def mix(self, g1: Tensor, g2: Tensor) -> Tensor:
        unit = g2 / g2.norm()
        return g2 - ALPHA * (g1 - torch.dot(g1, unit) * unit)


class PaperWSAM(Paper):
    """Yue et al. 2023: the loss plus gamma/(1 - gamma) times its sharpness; `gamma` and `decouple` are given."""

    gamma: float
    decouple: bool

    def mix(self, g1: Tensor, g2: Tensor) -> Tensor:
        self.sharpness = self.gamma / (1 - self.gamma) * (g2 - g1)
        return g1 if self.decouple else g1 + self.sharpness

    def correction(self) -> Tensor | None:
        return self.sharpness if self.decouple else None


class PaperLookSAM(Paper):
    """Liu et al. 2022, Algorithm 1: `interval` is its k."""

    gv: Tensor | None = None

    def mix(self, g1: Tensor, g2: Tensor) -> Tensor:
        cosine = torch.dot(g1, g2) / (g1.norm() * g2.norm())
        self.gv = g2 - g2.norm() * cosine * g1 / g1.norm()
        return g2

    def rest_gradient(self, g: Tensor) -> Tensor:
        return g if self.gv is None else g + ALPHA * g.norm() / self.gv.norm() * self.gv


class PaperFriendly(Paper):
    """Li et al. 2024, Algorithm 1; `sigma` and `lmbda` are given."""

    sigma: float
    lmbda: float
    m: Tensor | float = 0.0

    def direction(self, g1: Tensor) -> Tensor:
        self.m = self.lmbda * self.m + (1 - self.lmbda) * g1
        return g1 - self.sigma * self.m


class PaperGradientPenalty(Paper):
    """Zhao et al. 2022, the gradient of the penalized loss to first order; `alpha` is given."""

    alpha: float

    def mix(self, g1: Tensor, g2: Tensor) -> Tensor:
        return (1 - self.alpha) * g1 + self.alpha * g2


class PaperLInf(Paper):
    """Foret et al. 2021, equation 2 with p = infinity: `run` divides by the L2 norm of the signs."""

    def direction(self, g1: Tensor) -> Tensor:
        return g1.sign()

    def radius(self, norm: Tensor) -> Tensor | float:
        return 0.05 * norm


class PaperPreconditioned(Paper):
    """Singh et al. 2025: each element divided by the root of AdamW's second moment, as the last step left it."""

    v: Tensor | None = None

    def direction(self, g1: Tensor) -> Tensor:
        return g1 if self.v is None else g1 / (self.v.sqrt() + 0.01)

    def note_step(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        self.v = flat([optimizer.state[p]["exp_avg_sq"] for p in params])


class PaperVaSSO(Paper):
    """Li and Giannakis 2023; `theta` is given."""

    theta: float
    d: Tensor | float = 0.0

    def direction(self, g1: Tensor) -> Tensor:
        self.d = (1 - self.theta) * self.d + self.theta * g1
        return self.d


class PaperLESAM(Paper):
    """Wang et al. 2026: the radius at which the loss rises by `sigma`, to first order; here larger than rho in some
    steps, and smaller in others."""

    sigma = 8.0

    def radius(self, norm: Tensor) -> Tensor | float:
        return min(self.sigma / float(norm), RHO)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = vector.split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


def clip_factor(v: Tensor, limit: float) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`."""
    return min(1.0, limit / (v.norm().item() + 1e-6))


def loop(paper: Paper, base: str, steps: int, limit: float = math.inf) -> list[Tensor]:
    """Train in float64, unfused, with torch's own optimizer.

    Args:
        limit: largest norm of all that a step subtracts.
    """
    start, loss = problem()
    params = [p.clone().requires_grad_() for p in start]
    cls, options = BASES[base]
    optimizer = cls(params, **options)
    sign = -1 if options.get("maximize") else 1
    for t in range(steps):
        g1 = flat(torch.autograd.grad(loss(params, t), params))
        if not paper.perturbs(t):
            v = paper.rest_gradient(g1)
        else:
            d = paper.direction(g1)
            eps = sign * paper.radius(d.norm()) * d / (d.norm() + 1e-12)
            perturbed_params = [
                (p + e).detach().requires_grad_() for p, e in zip(params, like(eps, params), strict=True)
            ]
            v = paper.mix(g1, flat(torch.autograd.grad(loss(perturbed_params, t), perturbed_params)))
        correction = paper.correction() if paper.perturbs(t) else None
        factor = clip_factor(v if correction is None else v + correction, limit)
        for p, g in zip(params, like(factor * v, params), strict=True):
            p.grad = g
        optimizer.step()
        paper.note_step(optimizer, params)
        if correction is not None:
            with torch.no_grad():
                for p, c in zip(params, like(factor * correction, params), strict=True):
                    p -= sign * options["lr"] * c
    return [p.detach() for p in params]


# --- variants of one pass ---


def against_momentum(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], g: Tensor) -> Tensor:
    """Return the direction of MSAM (Becker et al. 2024): stored weights are w - rho*v/||v||."""
    return -flat([optimizer.state[p].get("momentum_buffer", optimizer.state[p].get("exp_avg")) for p in params])


def along_gradient(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], g: Tensor) -> Tensor:
    """Return the gradient of the last update (Jo et al. 2025 with a staleness of one)."""
    return -g if optimizer.param_groups[0].get("maximize") else g


Prefetcher = Callable[[torch.optim.Optimizer, Sequence[Tensor], Tensor], Tensor]
ONE_PASS: dict[str, tuple[SAM, Prefetcher]] = {
    "msam": (MSAM(RHO), against_momentum),
    "last gradient": (LastGradient(RHO), along_gradient),
}


def one_pass_loop(direction_of: Prefetcher, base: str, steps: int, limit: float = math.inf) -> list[Tensor]:
    """Train in float64, unfused, with torch's own optimizer, and return the clean weights."""
    start, loss = problem()
    params = [p.clone().requires_grad_() for p in start]
    cls, options = BASES[base]
    optimizer = cls(params, **options)
    eps = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for t in range(steps):
        perturbed_params = [(p + e).detach().requires_grad_() for p, e in zip(params, like(eps, params), strict=True)]
        g = flat(torch.autograd.grad(loss(perturbed_params, t), perturbed_params))
        g = clip_factor(g, limit) * g
        for p, part in zip(params, like(g, params), strict=True):
            p.grad = part
        optimizer.step()
        d = direction_of(optimizer, params, g)
        eps = RHO * d / (d.norm() + 1e-12)
    return [p.detach() for p in params]


# --- cases ---


class Case(NamedTuple):
    sam: SAM
    paper: Callable[[], Paper]
    bases: Sequence[str] = tuple(BASES)  # that the variant can have


CASES: dict[str, Case] = {
    "every other": Case(SAM(RHO, interval=2), lambda: Paper(interval=2)),
    "gsam": Case(GSAM(RHO, alpha=ALPHA), PaperGSAM),
    "wsam": Case(WSAM(RHO, gamma=0.9), lambda: PaperWSAM(gamma=0.9, decouple=True)),
    "wsam, coupled": Case(WSAM(RHO, gamma=0.8, decouple=False), lambda: PaperWSAM(gamma=0.8, decouple=False)),
    "wsam, every other": Case(
        WSAM(RHO, gamma=0.6, interval=2), lambda: PaperWSAM(gamma=0.6, decouple=True, interval=2)
    ),
    "looksam": Case(LookSAM(RHO, k=3, alpha=ALPHA), lambda: PaperLookSAM(interval=3)),
    "friendly": Case(FriendlySAM(RHO, sigma=0.8, lmbda=0.7), lambda: PaperFriendly(sigma=0.8, lmbda=0.7)),
    "gradient penalty": Case(GradientPenalty(RHO, alpha=ALPHA), lambda: PaperGradientPenalty(alpha=ALPHA)),
    "l-inf": Case(LInfSAM(0.05), PaperLInf),
    "vasso": Case(VaSSO(RHO, theta=0.4), lambda: PaperVaSSO(theta=0.4)),
    "vasso, every other": Case(VaSSO(RHO, theta=0.4, interval=2), lambda: PaperVaSSO(theta=0.4, interval=2)),
    "lesam": Case(SAM(RHO, rho_fn=LESAM(sigma=PaperLESAM.sigma)), PaperLESAM),
    "gsam, every third": Case(GSAM(RHO, alpha=ALPHA, interval=3), lambda: PaperGSAM(interval=3)),
    "late": Case(SAM(RHO, start=4), lambda: Paper(start=4)),
    "wsam, every other, late": Case(
        WSAM(RHO, gamma=0.6, interval=2, start=1), lambda: PaperWSAM(gamma=0.6, decouple=True, interval=2, start=1)
    ),
    "vasso, late": Case(VaSSO(RHO, theta=0.4, start=2), lambda: PaperVaSSO(theta=0.4, start=2)),
    "looksam, late": Case(LookSAM(RHO, k=2, alpha=ALPHA, start=3), lambda: PaperLookSAM(interval=2, start=3)),
    "preconditioned": Case(PreconditionedSAM(RHO, eps=0.01), PaperPreconditioned, ["adamw"]),
    "preconditioned, every other": Case(
        PreconditionedSAM(RHO, eps=0.01, interval=2), lambda: PaperPreconditioned(interval=2), ["adamw"]
    ),
}


# --- trainings ---


class Training(NamedTuple):
    """Parameters and optimizer; the optimizer does not keep the parameters alive."""

    params: list[nn.Parameter]
    opt: FusedSAM

    def steps(self, steps: range) -> Training:
        _, loss = problem()
        for t in steps:

            def closure(t: int = t) -> Tensor:
                value = loss(self.params, t)
                value.backward()
                return value

            self.opt.step(closure)
        return self

    def backward(self, t: int) -> None:
        """Compute a new gradient."""
        self.opt.zero_grad()
        problem()[1](self.params, t).backward()

    def ascend(self, t: int, zero_grad: bool = False) -> None:
        """Take the first half of a step, unless it was taken already."""
        if self.opt.phase == "first":
            self.backward(t)
            self.opt.first_step(zero_grad)


def make_fused(
    sam: SAM,
    base: str,
    steps: int,
    backend: str = "auto",
    dtype: torch.dtype = torch.float64,
    layouts: Callable[[list[nn.Parameter]], None] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Training:
    """Return a training of this problem after `steps` steps.

    `layouts` may change the parameters' memory; `groups` has the numbers of the parameters of each group.
    """
    start, _ = problem(dtype)
    cls, base_options = BASES[base]
    params = [nn.Parameter(p) for p in start]
    if layouts is not None:
        layouts(params)
    groups_of_params = params if groups is None else [{"params": [params[i] for i in group]} for group in groups]
    opt = FusedSAM(groups_of_params, cls, variant=sam, backend=backend, **base_options, **options)
    return Training(params, opt).steps(range(steps))
