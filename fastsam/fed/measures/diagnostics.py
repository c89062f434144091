"""Quantities that the papers' theorems bound or assume: smoothness, gradient variances, estimation bias, margin risk
and Q."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.arena import Layout
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.samples import IGNORED
from fastsam.fed.measures.drift import mean_row
from fastsam.fed.measures.objective import Objective, random_unit, unit
from fastsam.fed.update.model_copy import Replica


def path_smoothness(objective: Objective, path: Sequence[Tensor]) -> float:
    """Return the largest `||g(u) - g(v)|| / ||u - v||` over neighbours on `path`, a lower bound of L; or 0."""
    gradients = [objective.gradient(w) for w in path]
    largest = 0.0
    for i in range(1, len(path)):
        distance = float((path[i].double() - path[i - 1].double()).norm())
        if distance > 0:
            largest = max(largest, float((gradients[i] - gradients[i - 1]).norm()) / distance)
    return largest


def hessian_norm(
    objective: Objective, w: Tensor, iterations: int = 30, tolerance: float = 1e-4, seed: int = 0
) -> float:
    """Return the spectral norm of the Hessian at w (the largest |eigenvalue|), by power iteration from a random vector.
    It is a lower bound of L.

    The iteration ends when the estimate changes by less than `tolerance` (relative), or after `iterations`.
    """
    v, norm = random_unit(objective.replica, seed), 0.0
    for _ in range(iterations):
        image = objective.hessian_times(w, v)
        old_norm, norm = norm, float(image.norm())
        if norm == 0 or abs(norm - old_norm) <= tolerance * norm:
            break
        v = image / norm
    return norm


def sigma_local(objective: Objective, batches: Sequence[Objective], w: Tensor) -> float:
    """Return `sigma_l`: root of the mean of `||unit(g_batch) - unit(g)||^2` (FedSAM paper, Assumption 3)."""
    full = unit(objective.gradient(w))
    return _root_mean([float((unit(b.gradient(w)) - full).square().sum()) for b in batches])


def sigma_global(clients: Sequence[Objective], w: Tensor) -> float:
    """Return `sigma_g`: root of the mean of `||grad f_i(w) - grad f(w)||^2`, f the mean of the f_i (Assumption 2)."""
    gradients = [client.gradient(w) for client in clients]
    mean = torch.stack(gradients).mean(dim=0)
    return _root_mean([float((g - mean).square().sum()) for g in gradients])


def estimation_bias(old_w: Tensor, w: Tensor, gradient: Tensor) -> float:
    """Return `||unit(w^{t-1} - w^t) - unit(grad F(w^t))||` in 0..2 (FedLESAM paper, Theorem 2), with w^{t-1} =
    `old_w`."""
    return float((unit(old_w.double() - w.double()) - unit(gradient)).norm())


def dual_gap(perturbations: Sequence[Tensor], s: Tensor) -> float:
    """Return FedSMOO's `||mean_i eps_i - s||`: how far the clients' perturbations are from the common one."""
    return float((mean_row(perturbations) - s.double()).norm())


@torch.no_grad()
def margin_risk(
    replica: Replica,
    pairs: Sequence[Pair],
    w: Tensor,
    margin: float = 0.1,
    unlabelled: int = IGNORED,
    batch: int = 512,
) -> float:
    """Return the mean over clients of the share of samples with `p[y] - max_{j != y} p[j] <= margin` (FedSAM paper, eq.
    5, empirical).

    p are the model's outputs after softmax, as the paper has it, so that margins lie in -1..1; `margin = 0` counts
    errors (and ties). Samples with the label `unlabelled` do not count. Clients without other samples do not count
    either. The result is NaN if no sample counts.
    """
    replica.row.copy_(w)
    replica.module.eval()
    risks = []
    for x, y in pairs:
        num_small, is_labelled = 0, y != unlabelled
        x, y = (x, y) if bool(is_labelled.all()) else (x[is_labelled], y[is_labelled])
        if not len(y):
            continue
        for a, b in zip(x.split(batch), y.split(batch), strict=True):
            p = replica.module(a).double().softmax(dim=1)
            correct = p.gather(1, b[:, None])[:, 0]
            runner_up = p.scatter(1, b[:, None], -1.0).amax(dim=1)
            num_small += int((correct - runner_up <= margin).sum())
        risks.append(num_small / len(y))
    return sum(risks) / len(risks) if risks else float("nan")


def spectral_complexity(layout: Layout, w: Tensor) -> float:
    """Return `Q = prod_j ||W_j|| * sum_j ||W_j||_F^2 / ||W_j||` with spectral norms, as Theorem 3.5 of the FedSAM paper
    prints it.

    (The bound of Neyshabur et al. 2018, on which it is based, squares the spectral norms.) It is over the tensors of
    rank 2 and more, each as a matrix [dimension 0, the rest]. A zero matrix makes it 0.
    """
    matrices = [view.flatten(1) for view in layout.views(w.double()) if view.dim() > 1]
    norms = [float(torch.linalg.matrix_norm(m, 2)) for m in matrices]
    if not norms or min(norms) == 0:
        return 0.0
    product = 1.0
    for norm in norms:
        product *= norm
    return product * sum(float(m.square().sum()) / norm for m, norm in zip(matrices, norms, strict=True))


def _root_mean(squares: Sequence[float]) -> float:
    return (sum(squares) / len(squares)) ** 0.5
