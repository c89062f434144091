"""Drift of the clients within a round: of their weights, their perturbations and their ends.

The vectors are float `[row_size]` rows. `weights[i][p]` and `perturbations[i][p]` belong to client i at the p-th kept
local step (the first, the middle and the last, say). Every client has the same number of kept steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastsam.fed.measures.objective import unit

Rows = Sequence[Sequence[Tensor]]


def consistency(squares: float, total: Tensor, change: Tensor, clients: int) -> float:
    """Return `sum_i ||w_i - w^{t+1}||^2 / n_t` (FL-Simulator) from sums. Rounding cannot make it negative.

    Args:
        squares: sum of ||w_i - w^t||^2.
        total: sum of w_i - w^t.
        change: w^{t+1} - w^t.
        clients: n_t.
    """
    total, change = total.double(), change.double()
    return max(0.0, (squares - 2 * float(total @ change)) / clients + float(change @ change))


def weight_drift(weights: Rows, w: Tensor) -> float:
    """Return `E_w = mean over clients and kept steps of ||w_i,k - w^t||^2` (FedSAM paper, Lemma B.2)."""
    return _mean([float((v.double() - w.double()).square().sum()) for client in weights for v in client])


def perturbation_spread(perturbations: Rows) -> float:
    """Return `E_delta = mean over clients and kept steps of ||delta_i,k - delta||^2` (FedSAM paper, Lemma B.1).

    delta is the clients' mean perturbation at the first kept step, where all clients are at w^t. It is exactly 0 if all
    perturbations are equal.
    """
    reference = mean_row([client[0] for client in perturbations])
    return _mean([float((v.double() - reference).square().sum()) for client in perturbations for v in client])


def perturbation_drift(
    weights: Rows, perturbations: Rows, w: Tensor, gradient: Callable[[Tensor], Tensor], server_lr: float = 1.0
) -> float:
    """Return `PD = mean over clients and kept steps of ||u_g,k - u_i,k|| / 2`, in 0..1 (FedLESAM paper, Figure 2).

    u_i,k is the unit perturbation of client i. u_g,k is the unit `gradient` of the mean loss over all clients at the
    virtual model `w^t - server_lr * mean_i(w^t - w_i,k)` of the round's clients.
    """
    drifts = []
    for p in range(len(weights[0])):
        virtual = w.double() + server_lr * (mean_row([client[p] for client in weights]) - w.double())
        common = unit(gradient(virtual))
        drifts += [float((common - unit(client[p])).norm()) / 2 for client in perturbations]
    return _mean(drifts)


def mean_row(rows: Sequence[Tensor]) -> Tensor:
    """Return the mean, float64. It is the first row plus a mean difference, which is exact if all are equal."""
    first = rows[0].double()
    return first + torch.stack([row.double() - first for row in rows]).mean(dim=0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
