"""Subsets of a data set as clients, dealt out by a Dirichlet distribution over the labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fastsam.fed.data.partition import dirichlet, iid


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
    found = _labels(dataset) if labels is None else labels
    made = iid(found, clients, seed) if alpha is None else dirichlet(found, clients, alpha, seed, exhausted="redraw")
    return [Subset(dataset, indices.tolist()) for indices in made.indices]


def _labels(dataset: Any) -> Any:
    """Return the labels of all samples of a data set, `[len(dataset)]`."""
    if isinstance(dataset, Subset):
        return np.asarray(_labels(dataset.dataset))[list(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1].cpu().numpy()
    known = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if known is None:
        known = [int(dataset[i][1]) for i in range(len(dataset))]
    return known.cpu().numpy() if isinstance(known, Tensor) else np.asarray(known)
