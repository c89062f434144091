"""Splits of one labelled training set over clients.

A split is a function ``(labels, clients, seed, ...) -> Partition`` with an entry in `SPLITS`. The random splits of the
FedSAM and FedLESAM experiments (`dirichlet`, `pathological`, `iid`) draw from numpy's legacy ``RandomState`` in the
order of the public simulators (woodenchild95/FL-Simulator and MediaBrain-SJTU/FedLESAM, ``dataset.py``), so that a
split can be compared with theirs sample by sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.fed.common.atomic_files import read_json
from fastsam.fed.common.checks import choice, integer, number
from fastsam.fed.data.dealing import (
    Partition,
    check_clients,
    check_labels,
    check_shares,
    draw,
    equal_sizes,
    frequencies,
    split_generator,
)


def dirichlet(
    labels: Any, clients: int, alpha: float, seed: int = 20, exhausted: str = "reset", classes: int | None = None
) -> Partition:
    """Draw each client's class shares from a symmetric Dirichlet distribution; all clients have one size.

    It is not the per-class split of other libraries, which makes unequal sizes. Each client draws its own class prior
    ``p_i ~ Dir(alpha * 1)`` and then its samples from it (FL-Simulator's procedure: permute the training set, draw the
    priors, then `draw`).

    Args:
        labels: [samples] integers.
        clients: number of clients.
        alpha: concentration, > 0; small is heterogeneous.
        seed: random seed of the legacy ``RandomState``; the papers use 20.
        exhausted: see `draw`.
        classes: number of classes, default ``max(labels) + 1``.

    Raises:
        ValueError: there are more clients than samples, alpha is not > 0, or labels are not class numbers.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    alpha = number("alpha", alpha, greater_than=0)
    rng = split_generator(seed)
    order = rng.permutation(labels.size)
    priors = rng.dirichlet([alpha] * classes, size=clients)
    check_shares(priors, alpha)
    parts = draw(labels[order], priors, equal_sizes(labels.size, clients), rng, exhausted)
    return Partition([order[t] for t in parts], priors)


def pathological(
    labels: Any,
    clients: int,
    classes_per_client: int = 3,
    seed: int = 20,
    exhausted: str = "reset",
    classes: int | None = None,
) -> Partition:
    """Give each client samples of `classes_per_client` classes, chosen uniformly, with equal client sizes
    (FL-Simulator's procedure).

    Each chosen class has the prior ``1 / classes_per_client``, from which samples are drawn. So the classes of a client
    are nearly balanced. The shards of McMahan et al. (2017) are a different split. With ``exhausted="redraw"`` a client
    cannot be filled if other clients have used up its classes.

    Raises:
        ValueError: there are too few classes or samples, or a client would need classes that were not chosen for it.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    present = np.flatnonzero(np.bincount(labels, minlength=classes))
    num_classes = _check_classes_per_client(classes_per_client, present.size, labels.size, clients)
    rng = split_generator(seed)
    order = rng.permutation(labels.size)
    rows = np.zeros((clients, present.size))
    rows[:, :num_classes] = 1 / num_classes
    for row in rows:
        rng.shuffle(row)
    priors = np.zeros((clients, classes))
    priors[:, present] = rows
    parts = draw(labels[order], priors, equal_sizes(labels.size, clients), rng, exhausted)
    result = Partition([order[t] for t in parts], priors)
    _check_own_classes(labels, result, exhausted)
    return result


def _check_classes_per_client(classes_per_client: int, present: int, samples: int, clients: int) -> int:
    count = integer("classes_per_client", classes_per_client, at_least=1)
    if count > present:
        raise ValueError(
            f"classes_per_client={count}, but the training set has samples of {present} classes; take at most {present}"
        )
    if count > samples // clients:
        raise ValueError(
            f"classes_per_client={count}, but {samples} samples give each of {clients} clients {samples // clients}; "
            "take fewer clients or fewer classes"
        )
    return count


def _check_own_classes(labels: np.ndarray, split: Partition, exhausted: str) -> None:
    for client, (indices, prior) in enumerate(zip(split.indices, split.priors, strict=True)):
        if (prior[labels[indices]] == 0).any():
            raise ValueError(
                f"exhausted={exhausted!r}: the classes {np.flatnonzero(prior).tolist()} of client {client} were used "
                "up; use exhausted='reset', more classes per client, or another split_seed"
            )


def iid(labels: Any, clients: int, seed: int = 20, balanced: bool = False, classes: int | None = None) -> Partition:
    """Shuffle and cut into consecutive blocks of equal size (the remainder goes to client 0, the first block).

    Every client's prior is the class distribution of the whole training set. With `balanced` every client gets the same
    number of samples of each class (the simulators' CIFAR-100 case).

    Raises:
        ValueError: an argument is invalid, or `balanced` needs a class that cannot be divided.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    order = split_generator(seed).permutation(labels.size)
    counts = np.bincount(labels, minlength=classes)
    if balanced:
        uneven_classes = np.flatnonzero(counts % clients)
        if uneven_classes.size:
            raise ValueError(
                f"balanced=True needs class sizes divisible by {clients} clients; class {uneven_classes[0]} has "
                f"{counts[uneven_classes[0]]} samples"
            )
        by_class = np.split(order[np.argsort(labels[order], kind="stable")], np.cumsum(counts)[:-1])
        blocks = [np.concatenate(rows) for rows in zip(*(np.split(pool, clients) for pool in by_class), strict=True)]
    else:
        blocks = np.split(order, np.cumsum(equal_sizes(labels.size, clients))[:-1])
    return Partition([np.asarray(block) for block in blocks], np.tile(counts / labels.size, (clients, 1)))


_ATTEMPTS = 1000  # at leaving no client with too few samples


def dirichlet_per_class(
    labels: Any, clients: int, alpha: float, seed: int = 20, min_samples: int = 10, classes: int | None = None
) -> Partition:
    """Return the unbalanced Dirichlet split of other libraries: each class is divided among the clients in proportions
    ``Dir(alpha * 1)``.

    Every sample is used once and client sizes differ. The procedure and its random numbers agree with NIID-Bench (Li et
    al., ICDE 2022; ``noniid-labeldir``), which FedLab follows: a client that has its equal share gets nothing of later
    classes, and the whole is repeated until each client has `min_samples`. `priors` are the class frequencies that came
    out.

    Raises:
        ValueError: there are fewer than `clients * min_samples` samples, or 1000 attempts left a client with fewer.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    alpha = number("alpha", alpha, greater_than=0)
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


def own(
    labels: Any,
    clients: int | None = None,
    seed: int = 20,
    indices: str | Path | Sequence[Any] | None = None,
    duplicates: bool = False,
    classes: int | None = None,
) -> Partition:
    """Return the user's split: for each client the indices of its samples in the training set, in that order.

    Samples that no client names are left out. `priors` are the clients' class frequencies.

    Args:
        labels: [samples] integers.
        clients: expected number of lists, or None for any number.
        seed: has no effect, because nothing is drawn.
        indices: a list of integer lists, or a JSON file with one.
        duplicates: a sample may be named more than once.
        classes: number of classes, default ``max(labels) + 1``.

    Raises:
        ValueError: it is not a list, a list is empty, an index is not an integer or outside the training set, or a
            sample is named twice without `duplicates`.
        FileNotFoundError: the file does not exist.
    """
    labels, classes = check_labels(labels, classes)
    lists = _read_lists(indices) if isinstance(indices, (str, Path)) else indices
    if not isinstance(lists, Sequence) or not len(lists):
        raise ValueError(
            f"indices must be one list of positions per client, or a JSON file of such lists, got {lists!r}"
        )
    if clients is not None and len(lists) != clients:
        raise ValueError(f"indices holds the lists of {len(lists)} clients, and clients is {clients}")
    parts = [_positions(part, labels.size, i) for i, part in enumerate(lists)]
    all_indices = np.sort(np.concatenate(parts))
    repeated_indices = all_indices[1:][all_indices[1:] == all_indices[:-1]]
    if repeated_indices.size and not duplicates:
        raise ValueError(
            f"indices name sample {repeated_indices[0]} more than once ({repeated_indices.size} such entries); say "
            f"duplicates=True if that is meant"
        )
    return Partition(parts, frequencies(labels, parts, classes))


def _read_lists(path: str | Path) -> Any:
    try:
        return read_json(Path(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path} with the clients' indices (looked in {Path.cwd()})") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file ({error}); expected [[positions of client 0], [...], ...]") from error


def _positions(part: Any, samples: int, client: int) -> np.ndarray:
    array = np.asarray(part)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"indices of client {client} must be a list with one position or more, got {part!r}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"indices of client {client} must be integers, got {array.dtype}")
    if array.min() < 0 or array.max() >= samples:
        bad = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"indices of client {client} must be in 0..{samples - 1} (the training set), got {bad}")
    return array.astype(np.int64)


SPLITS: dict[str, Callable[..., Partition]] = {
    "dirichlet": dirichlet,
    "iid": iid,
    "pathological": pathological,
    "dirichlet_per_class": dirichlet_per_class,
    "own": own,
}


def make(
    split: str, labels: Any, clients: int | None, seed: int, classes: int | None = None, **options: Any
) -> Partition:
    """Return the split of that name with its options. Raises ValueError for an unknown name or a foreign option."""
    choice("split", split, tuple(SPLITS))
    foreign = set(options) - options_of(split)
    if foreign:
        raise ValueError(
            f"the split {split!r} takes no {', '.join(sorted(foreign))}; its options are "
            f"{', '.join(sorted(options_of(split)))}"
        )
    return SPLITS[split](labels, clients, seed=seed, classes=classes, **options)


def options_of(split: str) -> set[str]:
    """Return the names of the options of this split only, e.g. {"alpha", "exhausted"}."""
    return set(inspect.signature(SPLITS[split]).parameters) - {"labels", "clients", "seed", "classes"}
