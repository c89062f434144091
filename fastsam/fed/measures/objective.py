"""A loss over fixed data as a function of flat weights: its value, its gradient, and its Hessian times a vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.clients.labels import num_labels
from fastsam.fed.clients.loss_kind import LossKind, kind_of
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.population import Loss
from fastsam.fed.clients.set_loss import SetLoss
from fastsam.fed.common import seeds
from fastsam.fed.update.model_copy import Replica

_BATCH = 512


class Objective:
    """`F(w) = sum_b weight_b * loss(model_w(x_b), y_b)`, the model in eval mode, data as they are stored (no
    augmentation). The weights are the shares of labels that the loss does not ignore.

    For the value, the loss is called once on all outputs of a set (`SetLoss`). Gradients are averaged over batches if
    the loss is a mean. Otherwise a set is one batch, whose activations are kept together.

    Weights are flat `[row_size]` rows of the replica's layout in any floating-point dtype; they are rounded to the
    dtype of the model. The replica's row is scratch: every call overwrites it. Its buffers are used as they are.
    """

    def __init__(
        self,
        replica: Replica,
        loss: Loss,
        batches: Sequence[tuple[Tensor, Tensor, float]],
        sets: Sequence[Sequence[Pair]] | None = None,
        kind: LossKind | None = None,
    ) -> None:
        """Make the objective.

        Args:
            replica: scratch copy of the model.
            loss: function of outputs and labels.
            batches: x, y and weight of each batch.
            sets: the batches (x, y) of each set. The value is the mean of the sets' losses. None: all batches are one
                set.
            kind: the kind of the loss, by default `kind_of(loss)`.
        """
        self.replica, self.loss, self.batches = replica, loss, list(batches)
        self.kind = kind_of(loss) if kind is None else kind
        self.sets = [[(x, y) for x, y, _ in batches]] if sets is None else sets

    @classmethod
    def sample_mean(
        cls, replica: Replica, loss: Loss, pairs: Sequence[Pair], batch: int = _BATCH, kind: LossKind | None = None
    ) -> Objective:
        """Return the mean over all samples of all `pairs`."""
        kind = kind_of(loss) if kind is None else kind
        x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        batches = _batches(x, y, batch, kind)
        total = _total(batches)
        return cls(replica, loss, [(a, b, n / total) for a, b, n in batches], kind=kind)

    @classmethod
    def mean_of(
        cls, replica: Replica, loss: Loss, pairs: Sequence[Pair], batch: int = _BATCH, kind: LossKind | None = None
    ) -> Objective:
        """Return the mean over the clients of their mean losses, whatever their numbers of samples are. A client
        without a label does not count."""
        kind = kind_of(loss) if kind is None else kind
        clients = [batches for x, y in pairs if (batches := _batches(x, y, batch, kind))]
        sets, totals = (
            [[(a, b) for a, b, _ in batches] for batches in clients],
            [_total(batches) for batches in clients],
        )
        if kind.is_mean and len(set(totals)) == 1:  # larger batches have the same gradient
            means = cls.sample_mean(replica, loss, pairs, batch, kind).batches
        else:
            of_clients = zip(clients, totals, strict=True)
            means = [(a, b, n / total / len(clients)) for batches, total in of_clients for a, b, n in batches]
        return cls(replica, loss, means, sets, kind)

    @torch.no_grad()
    def value(self, w: Tensor) -> float:
        """Return F(w)."""
        self._load(w)
        values = []
        for batches in self.sets:
            loss = SetLoss(self.loss, self.kind)
            for x, y in batches:
                loss.add(self.replica.module(x), y, len(y))
            values.append(loss.value())
        return sum(values) / len(values)

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradient at w, float64 `[row_size]`; zero for unused parameters and in the padding."""
        self._load(w)
        total = torch.zeros_like(self.replica.row, dtype=torch.float64)
        for x, y, weight in self.batches:
            value = self.loss(self.replica.module(x), y)
            grads = torch.autograd.grad(value, self.replica.parameters, materialize_grads=True, allow_unused=True)
            total.add_(self._flat(grads), alpha=weight)
        return total

    def hessian_times(self, w: Tensor, v: Tensor) -> Tensor:
        """Return the Hessian at w times `v` (`[row_size]`), float64 `[row_size]`, by differentiating `<gradient,
        v>`."""
        self._load(w)
        direction = self.replica.layout.views(v.to(self.replica.row.dtype))
        total = torch.zeros_like(self.replica.row, dtype=torch.float64)
        for x, y, weight in self.batches:
            value = self.loss(self.replica.module(x), y)
            grads = torch.autograd.grad(
                value, self.replica.parameters, create_graph=True, materialize_grads=True, allow_unused=True
            )
            slope = sum((g * u).sum() for g, u in zip(grads, direction, strict=True))
            if not isinstance(slope, Tensor) or not slope.requires_grad:
                continue  # the loss is linear in the weights: no curvature
            second = torch.autograd.grad(slope, self.replica.parameters, materialize_grads=True, allow_unused=True)
            total.add_(self._flat(second), alpha=weight)
        return total

    def _load(self, w: Tensor) -> None:
        with torch.no_grad():
            self.replica.row.copy_(w)
        self.replica.module.eval()

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        row = torch.zeros_like(self.replica.row, dtype=torch.float64)
        return self.replica.layout.gather([t.detach() for t in tensors], row)


def _batches(x: Tensor, y: Tensor, size: int, kind: LossKind) -> list[tuple[Tensor, Tensor, int]]:
    """Return the batches of samples with their numbers of labels, without batches that have no label."""
    size = size if kind.is_mean else len(y)
    parts = zip(x.split(size), y.split(size), strict=True)
    return [(a, b, n) for a, b in parts if (n := num_labels(b, len(b), kind.ignored))]


def _total(batches: Sequence[tuple[Tensor, Tensor, int]]) -> int:
    return sum(n for _, _, n in batches)


def subset(pairs: Sequence[Pair], samples: int | None, seed: int) -> list[Pair]:
    """Return about `samples` of all samples, a share of every client, chosen once from `seed`; None: all."""
    total = sum(len(y) for _, y in pairs)
    if samples is None or samples >= total:
        return list(pairs)
    rng = np.random.default_rng(seeds.derive(seed, "measured samples"))
    indices = []
    for x, y in pairs:
        order = np.sort(rng.permutation(len(y))[: max(1, len(y) * samples // total)])
        index = torch.from_numpy(order).to(y.device)
        indices.append((x[index], y[index]))
    return indices


def unit(vector: Tensor) -> Tensor:
    """Return `vector / ||vector||` in float64, zero for the zero vector."""
    vector = vector.double()
    norm = float(vector.norm())
    return vector / norm if norm > 0 else vector


def random_unit(replica: Replica, seed: int) -> Tensor:
    """Return a random unit vector, float64 `[row_size]` on the replica's device, zero in the padding, like the
    weights."""
    direction = torch.zeros(replica.layout.row_size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for view in replica.layout.views(direction):
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
    return unit(direction).to(replica.row.device)
