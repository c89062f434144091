"""Weights that an algorithm gives its clients in addition to the run's weights: `Upload(weight=...)`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State, Upload
from fastsam.fed.stages.base import ClientUploads, Stage

WEIGHT = "weight of the client"  # the name under which weights enter the sums


class ClientWeights(Stage):
    """Multiply uploads by the weights that the algorithm sends, and divide the means by the mean weight.

    A product is float64, so it is rounded once before it enters the sums.
    """

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Replace the rows for weighted means by their products, and add the weights."""
        assert uploads.own_weights is not None
        uploads.mean = apply_weights(uploads.mean, uploads.own_weights)

    def process_aggregate(self, aggregate: Aggregate | None, server: State, round: Round) -> Aggregate | None:
        """Return the aggregate whose means are divided by the mean weight."""
        return None if aggregate is None else ClientWeightedAggregate(aggregate)


def apply_weights(rows: Mapping[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Return the weights (float64 `[n]`) and the rows `[n, ...]` times the weights, in float64."""
    columns = {name: weights.view(-1, *[1] * (x.dim() - 1)) for name, x in rows.items()}
    return {WEIGHT: weights[:, None], **{name: x.double() * columns[name] for name, x in rows.items()}}


class ClientWeightedAggregate:
    """The aggregate of a round whose clients sent weights: means are over these weights too."""

    def __init__(self, aggregate: Aggregate) -> None:
        self._aggregate = aggregate

    @property
    def num_clients(self) -> int:
        return self._aggregate.num_clients

    def mean(self, name: str) -> Tensor:
        """Return the weighted mean, float64; zeros if all weights are 0. Raises KeyError for an unknown name."""
        mean, weight = self._aggregate.mean(name), self._aggregate.mean(WEIGHT)
        return torch.where(weight > 0, mean / weight, 0.0)

    def sum(self, name: str) -> Tensor:
        return self._aggregate.sum(name)

    def scalar(self, name: str) -> float:
        return self._aggregate.scalar(name)


def own_weights_of(upload: Upload, sends_weights: bool, n: int, device: torch.device) -> Tensor | None:
    """Return the weights that n clients send, float64 `[n]`, or None if the algorithm sends none.

    Raises:
        ValueError: the upload has weights and the class does not say so, or the reverse; or the weights are not n
            numbers >= 0.
    """
    if (upload.weight is not None) != sends_weights:
        raise ValueError(
            "finish must return an Upload with a weight in every round if the class says sends_weights = True, "
            f"and never otherwise; got {'none with' if sends_weights else 'one without'} sends_weights = True"
        )
    if upload.weight is None:
        return None
    weights = torch.as_tensor(upload.weight, dtype=torch.float64, device=device).detach()
    if weights.shape != (n,) or bool((weights < 0).any()):
        raise ValueError(
            f"Upload(weight=...) of finish must be a number >= 0 for each of the {n} clients, [{n}]; got "
            f"{weights.tolist() if weights.shape == (n,) else list(weights.shape)}"
        )
    return weights
