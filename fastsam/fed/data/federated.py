"""FederatedData: the clients' samples, the common test set, and the facts of the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fastsam.fed.clients.pairs import all_finite
from fastsam.fed.data import partition
from fastsam.fed.data.augment import Augment
from fastsam.fed.data.partition import dirichlet, iid


@dataclass(frozen=True, eq=False)  # tensors have no single truth value
class FederatedData:
    """A federated data set: ``len(data)`` clients, ``data[i]`` is ``(x, y)`` of client i.

    Args:
        clients: pairs of tensors, x [n_i, *shape] and y [n_i] int64 (class numbers).
        test: such a pair, the common test set.
        classes: number of classes.
        name: name for reports.
        priors: [clients, classes] float64 class distribution from which the split drew each client, or None.
        domains: the domain of each client, if clients belong to domains.
        held_out: the domain of the test set, if training left one out.
        augment: function of a batch of training inputs (never in evaluation), or None.
        pixels: for uint8 images [n, C, H, W], mean and standard deviation of each channel in 0..1. The model should get
            ``(x / 255 - mean) / std``, which `fastsam.fed.models.Pixels` around it computes.

    Raises:
        ValueError: there is no client, x and y differ in length, a client has no samples, or a label is outside the
            classes.
    """

    clients: Sequence[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    classes: int
    name: str = "data"
    priors: np.ndarray | None = None
    domains: Sequence[str] | None = None
    held_out: str | None = None
    augment: Augment | None = None
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        if len(self.clients) == 0:
            raise ValueError("a federated data set needs at least one client, got none")
        if not _are_valid(self.clients, self.classes):
            for i, pair in enumerate(self.clients):
                _check_pair(pair, self.classes, f"client {i}")
        _check_pair(self.test, self.classes, "the test set")
        shapes = {tuple(x.shape[1:]) for x, _ in [*self.clients, self.test]}
        if len(shapes) > 1:
            raise ValueError(f"all samples must have one shape, got {' and '.join(map(str, sorted(shapes)))}")
        if self.priors is not None and self.priors.shape != (len(self.clients), self.classes):
            raise ValueError(f"priors must have the shape {(len(self.clients), self.classes)}, got {self.priors.shape}")
        if self.domains is not None and len(self.domains) != len(self.clients):
            raise ValueError(f"domains must name one domain per client ({len(self.clients)}), got {len(self.domains)}")
        if self.augment is not None and not callable(self.augment):
            raise ValueError(f"augment must be callable (x, generator) -> x, got {type(self.augment).__name__}")

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
        return self.clients[client]

    @property
    def in_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.test[0].shape[1:])

    def class_counts(self) -> np.ndarray:
        """Return how many samples of each class every client holds, int64 [clients, classes]."""
        return np.stack([np.bincount(y.cpu().numpy(), minlength=self.classes) for _, y in self.clients])


def _are_valid(clients: Sequence[Any], classes: int) -> bool:
    """Return True if all clients are valid, checked together. A check of one after the other finds the wrong client."""
    if not all(len(pair) == 2 and all(isinstance(t, Tensor) and t.dim() for t in pair) for pair in clients):
        return False
    if not all(y.dtype == torch.int64 and y.dim() == 1 and 0 < y.shape[0] == x.shape[0] for x, y in clients):
        return False
    y = torch.cat([y.cpu() for _, y in clients])
    return isinstance(classes, int) and bool(((y >= 0) & (y < classes)).all())


def _check_pair(pair: Any, classes: int, label: str) -> None:
    if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        raise ValueError(
            f"{label} must be a pair (x, y) of tensors, got {type(pair).__name__}. Use fastsam.fed.data.as_tensors "
            "for arrays"
        )
    x, y = pair
    if len(x) != len(y):
        raise ValueError(f"{label}: x has {len(x)} samples and y {len(y)} labels; they must be of one length")
    if len(y) == 0:
        raise ValueError(f"{label} has no samples; leave it out or give it some")
    if y.dtype != torch.int64:
        raise ValueError(f"{label}: labels must be int64 class numbers, got {y.dtype}")
    partition.check_labels(y.cpu().numpy(), classes, f"{label}: labels")


def as_tensors(x: Any, y: Any, classes: int | None = None, label: str = "data") -> tuple[Tensor, Tensor]:
    """Return arrays or tensors as the pair that `FederatedData` holds.

    Args:
        x: [n, ...]. Bytes (uint8: pixels) become float32 in 0..1, other integers (token numbers) int64.
            Floating-point numbers keep their type (a run casts them to its model's).
        y: [n] integers of any type, or [n, 1].
        classes: number of classes; default: one more than the largest label.
        label: name for messages.

    Raises:
        ValueError: lengths differ, labels are not class numbers, or x holds NaN or infinity.
    """
    # a copy: torch warns about read-only arrays
    x = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x, order="C"))
    labels, _ = partition.check_labels(y.cpu().numpy() if isinstance(y, Tensor) else y, classes, f"{label}: labels")
    if x.ndim == 0 or len(x) != len(labels):
        raise ValueError(
            f"{label}: x has {len(x) if x.ndim else 0} samples and y {len(labels)} labels; they must be of one length"
        )
    if x.dtype == torch.uint8:
        x = x.to(torch.float32) / 255
    elif x.is_floating_point():
        if not all_finite(x):
            raise ValueError(f"{label}: x holds NaN or infinity; remove or replace those values")
    else:
        x = x.to(torch.int64)
    return x, torch.from_numpy(labels)


def split_data(
    x: Tensor,
    y: Tensor,
    test: tuple[Tensor, Tensor],
    *,
    clients: int | None,
    split: str = "dirichlet",
    seed: int = 20,
    classes: int | None = None,
    name: str = "data",
    augment: Augment | None = None,
    **options: Any,
) -> FederatedData:
    """Deal pooled training data out to clients.

    Args:
        x: training inputs, [n, ...].
        y: training labels, [n] int64.
        test: the common test set.
        clients: number of clients; may be None for the split "own", which knows it.
        split: a name of `fastsam.fed.data.partition.SPLITS`.
        seed: random seed of the split.
        classes: number of classes; default: one more than the largest label in training and test set.
        name: name for reports.
        augment: see `FederatedData`.
        **options: options of this split (`alpha`, `exhausted` for "dirichlet"; `balanced` for "iid"; ...).
    """
    if classes is None:
        classes = 1 + max(int(y.max()), int(test[1].max()))
    split_of_labels = partition.make(split, y.numpy(), clients, seed, classes, **options)
    parts = [torch.from_numpy(indices) for indices in split_of_labels.indices]
    return FederatedData(
        [(x.index_select(0, i), y[i]) for i in parts], test, classes, name, split_of_labels.priors, augment=augment
    )


def stratified_test(labels: np.ndarray, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of training and test samples (ascending), with the class frequencies of the whole in the test
    set.

    The test set has ``ceil(fraction * n)`` samples. Each class gives the integer part of its share, and the largest
    remainders one more (ties: the lower class). The choice depends only on `seed`, so the test set does not change with
    the split over clients.
    """
    if not isinstance(fraction, Real) or not 0 < fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {fraction!r}")
    labels, classes = partition.check_labels(labels)
    counts = np.bincount(labels, minlength=classes)
    total = int(np.ceil(fraction * labels.size))
    if total >= labels.size:
        raise ValueError(f"test_fraction={fraction!r} of {labels.size} samples leaves nothing to train on")
    share = counts * total / labels.size
    take = np.floor(share).astype(np.int64)
    take[np.argsort(take - share, kind="stable")[: total - take.sum()]] += 1
    rng = np.random.RandomState(seed)
    parts = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in enumerate(take)]
    is_test = np.zeros(labels.size, dtype=bool)
    is_test[np.concatenate(parts)] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def split(dataset: Any, *, clients: int, alpha: float | None, seed: int = 20, labels: Any = None) -> list[Subset[Any]]:
    """Deal a data set out to clients of equal size, each sample to one of them.

    Args:
        dataset (Dataset): any data set with `__len__` and `__getitem__`, such as one of torchvision.
        clients (int): number of clients.
        alpha (float | None): concentration of the Dirichlet distribution from which each client draws its shares of the
            classes, > 0. Small values make unlike clients; None makes them alike (a random split).
        seed (int): random seed of the split.
        labels: class numbers `[len(dataset)]`. By default `dataset.targets`, `dataset.labels`, or the last tensor of a
            `TensorDataset`; for other data sets every sample `(x, y)` is read once.

    Returns:
        A `torch.utils.data.Subset` for each client.

    Raises:
        ValueError: if there are more clients than samples, if `alpha` is not positive, or if a label is not a class
            number.

    Example:
        data = fed.split(torchvision.datasets.MNIST(...), clients=50, alpha=0.3)
        result = fed.run(model, data, fed.FedSAM(rho=0.05), rounds=100)
    """
    classes = _labels(dataset) if labels is None else labels
    assignment = (
        iid(classes, clients, seed) if alpha is None else dirichlet(classes, clients, alpha, seed, exhausted="redraw")
    )
    return [Subset(dataset, indices.tolist()) for indices in assignment.indices]


def _labels(dataset: Any) -> Any:
    """Return the labels of all samples of a data set, `[len(dataset)]`."""
    if isinstance(dataset, Subset):
        return np.asarray(_labels(dataset.dataset))[list(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1].cpu().numpy()
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if labels is None:
        labels = [y if isinstance(y, str) else int(y) for y in (dataset[i][1] for i in range(len(dataset)))]
    return labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
