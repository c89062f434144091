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
        self._batches: list[tuple[Any, Any]] = []  # outputs and labels of the current part
        self._samples = self._nbytes = 0  # size of the current part
        self._parts: list[tuple[float, Any, int]] = []  # losses, labels and numbers of samples

    def add(self, outputs: Any, labels: Any, samples: int) -> None:
        """Add the outputs and labels of a batch."""
        can_join = _has_rows(outputs, samples) and _has_rows(labels, samples)
        nbytes = outputs.nbytes + labels.nbytes if can_join else 0
        fits = can_join and self._nbytes + nbytes <= self._limit and self._is_like_last(outputs, labels)
        if not fits:
            self._finish_part()
        if can_join and outputs.is_cuda:  # the next pass of a model in a CUDA graph overwrites its outputs
            outputs = outputs.clone()
        self._batches.append((outputs, labels))
        self._samples, self._nbytes = self._samples + samples, self._nbytes + nbytes
        if not can_join:
            self._finish_part()

    def add_mean(self, value: float, samples: int) -> None:
        """Add the mean loss of some samples."""
        self._parts.append((value, None, samples))

    def value(self) -> float:
        """Return the loss of all samples, NaN if no sample has a label."""
        self._finish_part()
        if len(self._parts) == 1:
            value, _, samples = self._parts[0]
            return value * samples / samples  # with the rounding of several parts
        weights = [num_labels(labels, samples, self.kind.ignored) for _, labels, samples in self._parts]
        pairs = [(value, weight) for (value, _, _), weight in zip(self._parts, weights, strict=True) if weight]
        return sum(value * weight for value, weight in pairs) / sum(weights) if pairs else math.nan

    def _is_like_last(self, outputs: Tensor, labels: Tensor) -> bool:
        """Return True if a batch has the shapes and dtypes of the batches of the current part."""
        pairs = zip(self._batches[-1], (outputs, labels), strict=True) if self._batches else ()
        return all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)

    def _finish_part(self) -> None:
        """Call the loss on the current part."""
        if not self._batches:
            return
        assert self.loss is not None
        outputs, labels = self._batches[0]
        if len(self._batches) > 1:
            outputs, labels = (torch.cat(tensors) for tensors in zip(*self._batches, strict=True))
        self._batches = []
        self._parts.append((float(self.loss(outputs, labels)), labels, self._samples))
        self._samples = self._nbytes = 0


def _has_rows(x: object, samples: int) -> bool:
    """Return True for a tensor with a row for each sample."""
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == samples
