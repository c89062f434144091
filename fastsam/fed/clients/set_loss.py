"""The loss of a set of samples whose outputs are computed in batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.clients.labels import num_labels
from fastsam.fed.clients.loss_kind import LossKind

LIMIT = 256 * 2**20  # bytes of outputs and labels that are kept for one call of the loss
MEAN_LIMIT = 2**20  # the same for a loss that is a mean: a call on outputs in the cache is faster


class SetLoss:
    """The loss of a set, called once on the outputs and labels of all batches, which stay on their device.

    Up to `LIMIT` bytes are kept, or `MEAN_LIMIT` for a mean. The losses of larger parts are averaged by their numbers
    of labels, as are batches whose outputs cannot be joined: of different shapes, or not tensors with a row for each
    sample.

    Args:
        loss: function of outputs and labels, or None if only means are added.
        kind: the kind of the loss.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor] | None, kind: LossKind) -> None:
        self.loss, self.kind = loss, kind
        self._limit = MEAN_LIMIT if kind.is_mean else LIMIT
        self._batches: list[tuple[Any, Any, int]] = []  # outputs, labels and numbers of samples of the current part
        self._nbytes = 0  # size of its batches, 0 before the second one
        self._parts: list[tuple[float, Any, int]] = []  # losses, labels and numbers of samples

    def add(self, outputs: Any, labels: Any, samples: int) -> None:
        """Add the outputs and labels of a batch."""
        if self._batches and not self._joins(outputs, labels, samples):
            self._finish_part()
        if isinstance(outputs, Tensor) and outputs.is_cuda:  # the next pass of a model in a CUDA graph overwrites them
            outputs = outputs.clone()
        self._batches.append((outputs, labels, samples))

    def add_mean(self, value: float, samples: int) -> None:
        """Add the mean loss of some samples."""
        self._parts.append((value, None, samples))

    def value(self) -> float:
        """Return the loss of all samples, NaN if no sample has a label."""
        if self._batches:
            self._finish_part()
        if len(self._parts) == 1:
            value, _, samples = self._parts[0]
            return value * samples / samples  # with the rounding of several parts
        weights = [num_labels(labels, samples, self.kind.ignored) for _, labels, samples in self._parts]
        pairs = [(value, weight) for (value, _, _), weight in zip(self._parts, weights, strict=True) if weight]
        return sum(value * weight for value, weight in pairs) / sum(weights) if pairs else math.nan

    def _joins(self, outputs: Any, labels: Any, samples: int) -> bool:
        """Return True if a batch can be joined with the batches of the current part."""
        last_outputs, last_labels, last_samples = self._batches[-1]
        pairs = (last_outputs, outputs), (last_labels, labels)
        if not all(_has_rows(a, last_samples) and _has_rows(b, samples) for a, b in pairs):
            return False
        self._nbytes = (self._nbytes or last_outputs.nbytes + last_labels.nbytes) + outputs.nbytes + labels.nbytes
        is_alike = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)
        return is_alike and self._nbytes <= self._limit

    def _finish_part(self) -> None:
        """Call the loss on the current part."""
        assert self.loss is not None
        outputs, labels, samples = self._batches[0]
        if len(self._batches) > 1:
            *tensors, numbers = zip(*self._batches, strict=True)
            outputs, labels, samples = *map(torch.cat, tensors), sum(numbers)
        self._parts.append((float(self.loss(outputs, labels)), labels, samples))
        self._batches, self._nbytes = [], 0


def _has_rows(x: object, samples: int) -> bool:
    """Return True for a tensor with a row for each sample."""
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == samples
