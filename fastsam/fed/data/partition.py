"""Splits of one labelled training set over clients.

A split is a function ``(labels, clients, seed, ...) -> Partition`` with an entry in `SPLITS`. The random splits of the
FedSAM and FedLESAM experiments (`dirichlet`, `pathological`, `iid`) draw from numpy's legacy ``RandomState`` in the
order of the public simulators (woodenchild95/FL-Simulator and MediaBrain-SJTU/FedLESAM, ``dataset.py``), so that a
split can be compared with theirs sample by sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fastsam.fed.common.checks import choice, integer, number
from fastsam.fed.data.dealing import (
    Partition,
    check_clients,
    check_labels,
    check_shares,
    draw,
    equal_sizes,
    split_generator,
)
from fastsam.fed.data.lists import own
from fastsam.fed.data.per_class import dirichlet_per_class


def dirichlet(
    labels: Any, clients: int, alpha: float, seed: int = 20, exhausted: str = "reset", classes: int | None = None
) -> Partition:
    """Label ratios per client from a symmetric Dirichlet distribution; equal client sizes.

    Not the per-class split of other libraries, which makes unequal sizes: here each client draws its own class prior
    ``p_i ~ Dir(alpha * 1)`` and then its samples from it (FL-Simulator's procedure: permute the training set, draw
    the priors, then `draw`).

    labels: [samples] integers. alpha: concentration, > 0; small is heterogeneous. seed: random seed of the legacy
    ``RandomState``; the papers use 20.
    exhausted: see `draw`. classes: number of classes, default ``max(labels) + 1``.
    Raises ValueError for more clients than samples, alpha not > 0, or bad labels.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    alpha = number("alpha", alpha, above=0)
    rng = split_generator(seed)
    order = rng.permutation(labels.size)
    priors = rng.dirichlet([alpha] * classes, size=clients)
    check_shares(priors, alpha)
    taken = draw(labels[order], priors, equal_sizes(labels.size, clients), rng, exhausted)
    return Partition([order[t] for t in taken], priors)


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

    Each chosen class has the prior ``1 / classes_per_client``, from which samples are drawn. So the classes of a
    client are nearly balanced. The shards of McMahan et al. (2017) are a different split.

    Args:
        labels, clients, seed, exhausted, classes: as in `dirichlet`. With ``exhausted="redraw"`` a client cannot be
            filled if other clients have used up its classes.
        classes_per_client: number of classes of a client.

    Raises:
        ValueError: there are too few classes or samples, or a client would need classes that were not chosen for it.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    present = np.flatnonzero(np.bincount(labels, minlength=classes))
    chosen = _check_chosen(classes_per_client, present.size, labels.size, clients)
    rng = split_generator(seed)
    order = rng.permutation(labels.size)
    rows = np.zeros((clients, present.size))
    rows[:, :chosen] = 1 / chosen
    for row in rows:
        rng.shuffle(row)
    priors = np.zeros((clients, classes))
    priors[:, present] = rows
    taken = draw(labels[order], priors, equal_sizes(labels.size, clients), rng, exhausted)
    made = Partition([order[t] for t in taken], priors)
    _check_own_classes(labels, made, exhausted)
    return made


def _check_chosen(classes_per_client: int, present: int, samples: int, clients: int) -> int:
    chosen = integer("classes_per_client", classes_per_client, at_least=1)
    if chosen > present:
        raise ValueError(
            f"classes_per_client={chosen}, but the training set has samples of {present} classes; take at most "
            f"{present}"
        )
    if chosen > samples // clients:
        raise ValueError(
            f"classes_per_client={chosen}, but {samples} samples give each of {clients} clients {samples // clients}; "
            "take fewer clients or fewer classes"
        )
    return chosen


def _check_own_classes(labels: np.ndarray, made: Partition, exhausted: str) -> None:
    for client, (indices, prior) in enumerate(zip(made.indices, made.priors, strict=True)):
        if (prior[labels[indices]] == 0).any():
            raise ValueError(
                f"exhausted={exhausted!r}: the classes {np.flatnonzero(prior).tolist()} of client {client} were used "
                f"up; "
                "use exhausted='reset', more classes per client, or another split_seed"
            )


def iid(labels: Any, clients: int, seed: int = 20, balanced: bool = False, classes: int | None = None) -> Partition:
    """Shuffle and cut into consecutive blocks of equal size (the remainder goes to client 0, the first block).

    Every client's prior is the class distribution of the whole training set.

    Args:
        labels: class of each sample.
        clients: number of clients.
        seed: random seed.
        balanced: every client gets the same number of samples of each class (the simulators' CIFAR-100 case).
        classes: number of classes.

    Raises:
        ValueError: an argument is invalid, or `balanced` needs a class that cannot be divided.
    """
    labels, classes = check_labels(labels, classes)
    check_clients(clients, labels.size)
    order = split_generator(seed).permutation(labels.size)
    counts = np.bincount(labels, minlength=classes)
    if balanced:
        uneven = np.flatnonzero(counts % clients)
        if uneven.size:
            raise ValueError(
                f"balanced=True needs class sizes divisible by {clients} clients; class {uneven[0]} has "
                f"{counts[uneven[0]]} samples"
            )
        by_class = np.split(order[np.argsort(labels[order], kind="stable")], np.cumsum(counts)[:-1])
        blocks = [np.concatenate(rows) for rows in zip(*(np.split(pool, clients) for pool in by_class), strict=True)]
    else:
        blocks = np.split(order, np.cumsum(equal_sizes(labels.size, clients))[:-1])
    return Partition([np.asarray(block) for block in blocks], np.tile(counts / labels.size, (clients, 1)))


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
    """Return the split of that name with its options. Raises ValueError for an unknown split or an option of another
    split."""
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
