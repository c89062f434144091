"""The loss of a set of samples whose outputs are computed in batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastsam.fed.clients.labels import num_labels
from fastsam.fed.clients.loss_kind import LossKind, nbytes_of
from fastsam.fed.clients.samples import IGNORED

LIMIT = 256 * 2**20  # bytes of outputs and labels that are kept for one call of the loss
MEAN_LIMIT = 2**20  # the same for a loss that is a mean: a call on outputs in the cache is faster
UNKNOWN = "only torch's own losses without weights are known to be means over samples"
REMEDY = "Use one of them ('cross_entropy', say), or fed.BatchLoss(f), whose values are averaged over batches"


class SetLoss:
    """The loss of a set, called once on the outputs and labels of all batches, which stay on their device. Shorter ones
    are filled up as for metrics: outputs with 0, labels with -100.

    A mean is called on parts of up to `MEAN_LIMIT` bytes and of one shape. Their losses are averaged by their numbers
    of labels.

    Args:
        loss: function of outputs and labels, or None if only means are added.
        kind: the kind of the loss.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor] | None, kind: LossKind) -> None:
        self.loss, self.kind = loss, kind
        self._batches: list[tuple[Any, Any, int]] = []  # outputs, labels and numbers of samples of the current part
        self._nbytes = 0  # size of its batches
        self._parts: list[tuple[float, Any, int]] = []  # losses, labels and numbers of samples

    def add(self, outputs: Any, labels: Any, samples: int) -> None:
        """Add the outputs and labels of a batch.

        Raises ValueError if the loss is not a mean, and the batches cannot be joined, or take too much memory.
        """
        if self._batches and (problem := self._why_not_joined(outputs, labels, samples)):
            if not self.kind.is_mean:
                raise ValueError(
                    f"{self.kind.name} is called once on a set, because {UNKNOWN}, but {problem}. {REMEDY}"
                )
            self._finish_part()
        self._nbytes += nbytes_of((outputs, labels))
        # The next pass of a model in a CUDA graph overwrites its outputs.
        outputs = pytree.tree_map_only(Tensor, lambda t: t.clone() if t.is_cuda else t, outputs)
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
        weights = self._weights()
        pairs = [(value, weight) for (value, _, _), weight in zip(self._parts, weights, strict=True) if weight]
        return sum(value * weight for value, weight in pairs) / sum(weights) if pairs else math.nan

    def _weights(self) -> list[int]:
        """Return the number of labels of each part: of elements, if samples of some parts have more."""
        labels, ignored = [labels for _, labels, _ in self._parts], self.kind.ignored
        is_ragged = len({y.shape[1:] for y in labels if isinstance(y, Tensor)}) > 1
        if is_ragged and (ignored is None or labels[0].is_floating_point()):
            return [y.numel() for y in labels]
        return [num_labels(y, samples, ignored) for _, y, samples in self._parts]

    def _why_not_joined(self, outputs: Any, labels: Any, samples: int) -> str | None:
        """Return the reason why a batch cannot be joined with the batches of the current part, or None."""
        last_outputs, last_labels, last_samples = self._batches[-1]
        old, new = _tensors((last_outputs, last_labels)), _tensors((outputs, labels))
        has_rows = _have_rows(old, last_samples) and _have_rows(new, samples)
        pairs = [(a, b) for a, b in zip(old, new, strict=False) if a.dim() == b.dim() and a.dtype == b.dtype]
        if not has_rows or not len(old) == len(new) == len(pairs):
            shapes = ", ".join(str(list(t.shape)) for t in new)
            return f"a batch of {samples} samples has outputs and labels without a row for each sample ({shapes})"
        if self._nbytes + nbytes_of(new) > (MEAN_LIMIT if self.kind.is_mean else LIMIT):
            return f"outputs and labels exceed the {LIMIT // 2**20} MiB that are kept"
        is_alike = all(a.shape[1:] == b.shape[1:] for a, b in pairs)
        return "samples have other shapes" if self.kind.is_mean and not is_alike else None

    def _finish_part(self) -> None:
        """Call the loss on the current part."""
        assert self.loss is not None
        outputs, labels, samples = self._batches[0]
        if len(self._batches) > 1:
            all_outputs, all_labels, numbers = zip(*self._batches, strict=True)
            outputs, labels = _join_trees(all_outputs), _join_trees(all_labels, IGNORED)
            samples = sum(numbers)
        self._parts.append((float(self.loss(outputs, labels)), labels, samples))
        self._batches, self._nbytes = [], 0


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _have_rows(tensors: Sequence[Tensor], samples: int) -> bool:
    """Return True if each tensor has a row for each sample."""
    return bool(tensors) and all(t.dim() > 0 and len(t) == samples for t in tensors)


def _join_trees(trees: Sequence[Any], padding: float = 0.0) -> Any:
    """Return a tree like the first one, with the tensors of all trees joined."""
    columns = iter([join_batches(parts, padding) for parts in zip(*map(_tensors, trees), strict=True)])
    return pytree.tree_map_only(Tensor, lambda _: next(columns), trees[0])


def join_batches(parts: Sequence[Tensor], padding: float = 0.0) -> Tensor:
    """Concatenate the tensors `[n, ...]` of batches. Shorter ones (of texts, say) are filled up with `padding`."""
    if len({part.shape[1:] for part in parts}) > 1:
        longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        tensors = [part.new_full((len(part), *longest), padding) for part in parts]
        for target, part in zip(tensors, parts, strict=True):
            target[tuple(slice(size) for size in part.shape)] = part
        parts = tensors
    return torch.cat(list(parts))
