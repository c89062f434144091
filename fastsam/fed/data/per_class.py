"""The per-class Dirichlet split of other libraries, with clients of unequal sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastsam.fed.common.checks import integer, number
from fastsam.fed.data.dealing import Partition, check_clients, check_labels, frequencies, split_generator

_ATTEMPTS = 1000  # at leaving no client with too few samples


def dirichlet_per_class(
    labels: Any, clients: int, alpha: float, seed: int = 20, min_samples: int = 10, classes: int | None = None
) -> Partition:
    """Return the unbalanced Dirichlet split of other libraries: each class is divided among the clients in proportions
    ``Dir(alpha * 1)``.

    Every sample is used once and client sizes differ. The procedure and its random numbers agree with NIID-Bench (Li
    et al., ICDE 2022; ``noniid-labeldir``), which FedLab follows: a client that has its equal share gets nothing of
    later classes, and the whole is repeated until each client has `min_samples`. `priors` are the class frequencies
    that came out.

    Args:
        labels, clients, alpha, seed, classes: as in `dirichlet`.
        min_samples: least number of samples of a client.

    Raises:
        ValueError: there are fewer than `clients * min_samples` samples, or 1000 attempts left a client with fewer.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    alpha = number("alpha", alpha, above=0)
    least = integer("min_samples", min_samples, at_least=1)
    if least * clients > labels.size:
        raise ValueError(
            f"min_samples={least}: {clients} clients would need {least * clients} training samples, there are "
            f"{labels.size}"
        )
    rng = split_generator(seed)
    pools = [np.flatnonzero(labels == c) for c in range(classes)]
    for _ in range(_ATTEMPTS):
        parts = _deal_classes(pools, clients, alpha, labels.size / clients, rng)
        if min(map(len, parts)) >= least:
            for part in parts:
                rng.shuffle(part)
            return Partition(parts, frequencies(labels, parts, classes))
    raise ValueError(
        f"alpha={alpha!r} left a client of {clients} with less than {least} samples in each of {_ATTEMPTS} attempts; "
        "take a larger alpha, fewer clients or a smaller min_samples"
    )


def _deal_classes(
    pools: list[np.ndarray], clients: int, alpha: float, share: float, rng: np.random.RandomState
) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for pool in pools:
        pool = pool.copy()
        rng.shuffle(pool)
        proportions = rng.dirichlet([alpha] * clients) * (sizes < share)
        total = proportions.sum()
        # A tiny alpha can put nothing on the clients that still want samples: they share the class equally then.
        proportions = proportions / total if total > 0 else (sizes < share) / max(1, (sizes < share).sum())
        cuts = (np.cumsum(proportions) * len(pool)).astype(int)[:-1]
        for client, piece in enumerate(np.split(pool, cuts)):
            parts[client].append(piece)
            sizes[client] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]
