"""Common parts of all splits: their result, their checks, and the simulators' procedure, which fills slots by
priors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from fastsam.fed.clients.pairs import text_hint
from fastsam.fed.common.checks import choice, integer

EXHAUSTED = ("reset", "redraw")
MOST_CLASSES = 2**20  # largest number of classes that is inferred from labels

# Number of uniform draws of a class without samples before one slot is filled from the renormalised prior
# instead. Rejection and renormalising have the same distribution; rejection keeps the simulators' stream of random
# numbers, but may need 1e20 draws for one sample.
_MAX_REJECTIONS = 1000


@dataclass(frozen=True)
class Partition:
    """A split: `indices[i]` are the indices in the training set of client i's samples, in stored order, int64.

    `priors` is [clients, classes] float64: the class distribution from which each client was drawn.
    """

    indices: list[np.ndarray]
    priors: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)


def check_clients(clients: int, samples: int) -> None:
    """Raise ValueError unless each of `clients` clients can get a sample."""
    if integer("clients", clients, at_least=1) > samples:
        raise ValueError(
            f"{clients} clients cannot share {samples} training samples: each needs one; take at most {samples} clients"
        )


def split_generator(seed: int) -> np.random.RandomState:
    """Return numpy's legacy generator, from which the splits draw. Raises ValueError for a seed that it does not
    take."""
    number = integer("the split's seed", seed)
    if not 0 <= number < 2**32:
        raise ValueError(f"the split's seed must be an integer in 0..{2**32 - 1}, got {seed!r}")
    return np.random.RandomState(number)


def check_shares(shares: np.ndarray, alpha: float) -> None:
    """Raise ValueError unless every row of a Dirichlet distribution adds up to one: extreme values of alpha fail."""
    if np.isnan(shares).any():
        raise ValueError(f"alpha={alpha!r} is too small: the class priors underflow to 0/0; take 0.01 or more")
    if not np.allclose(shares.sum(-1), 1):
        raise ValueError(f"alpha={alpha!r} is too large: the class priors overflow; take 1e6 or less, or split='iid'")


def equal_sizes(samples: int, clients: int) -> np.ndarray:
    """Return ``floor(samples / clients)`` for each client. The remainder goes to client 0 (as in the simulators)."""
    sizes = np.full(clients, samples // clients, dtype=np.int64)
    sizes[0] += samples - sizes.sum()
    return sizes


def check_labels(labels: Any, classes: int | None = None, label: str = "labels") -> tuple[np.ndarray, int]:
    """Return labels as an int64 vector, and the number of classes (`max + 1` if `classes` is None).

    Raises:
        ValueError: a wrong shape, labels that are not integers or are outside 0..classes-1, or, without `classes`, a
            label that is too large for a class number.
    """
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.size == 0:
        raise ValueError(f"{label}: there are no samples")
    if labels.ndim != 1:
        raise ValueError(
            f"{label} must be a vector with one class number per sample, got the shape {tuple(labels.shape)}"
        )
    if not np.issubdtype(labels.dtype, np.number):
        raise ValueError(f"{label} must be integer class numbers, got {text_hint(labels) or labels.dtype}")
    integers = labels.astype(np.int64)
    if not np.array_equal(integers, labels):
        raise ValueError(
            f"{label} must be integer class numbers, got {labels.dtype} with fractions, e.g. "
            f"{labels[integers != labels][0]!r}"
        )
    low, high = int(integers.min()), int(integers.max())
    if classes is None and high >= MOST_CLASSES:
        raise ValueError(
            f"{label} must be class numbers from 0, got {high} at position {int(integers.argmax())}; numpy.unique(y, "
            "return_inverse=True)[1] numbers classes from 0"
        )
    classes = high + 1 if classes is None else classes
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        raise ValueError(
            f"{label} must be in 0..{classes - 1} ({classes} classes), got {bad} at position "
            f"{int(np.flatnonzero(integers == bad)[0])}; number the classes from 0, or set the number of classes"
        )
    return integers, classes


def _word_blocks(rng: np.random.RandomState) -> Iterator[list[int]]:
    """Yield blocks of the generator's 32-bit words, without an end."""
    while True:
        yield rng.randint(0, 2**32, 4096, np.uint32).tolist()


def draw(
    labels: np.ndarray, priors: np.ndarray, sizes: np.ndarray, rng: np.random.RandomState, exhausted: str = "reset"
) -> list[np.ndarray]:
    """Fill `sizes[i]` slots of each client i with samples whose classes follow its prior, and return indices in stored
    order.

    Until all slots are full: draw a client uniformly (``randint``; skip it when full), a class by the inverse CDF of
    its prior (``uniform``), and take the next sample from the end of that class's list. A client's slots fill from the
    last to the first. When a class has run out:

    - ``exhausted="reset"`` (FL-Simulator, FedLESAM): its list starts anew and the class is drawn again, so later draws
    repeat samples;
    - ``exhausted="redraw"`` (FedDyn): only the class is drawn again, so no sample is used twice. When a client's
    classes are all used up, it takes from the remaining samples in proportion (FedDyn's loop would not end).

    The priors are [clients, classes], the labels integers >= 0. `rng` is advanced in place.

    Raises:
        ValueError: shapes do not fit, a prior is invalid, or slots cannot be filled.
    """
    labels, _ = check_labels(labels, priors.shape[1])
    sizes = np.asarray(sizes)
    _check_draw(labels, priors, sizes, exhausted)
    classes = priors.shape[1]
    lists = [np.flatnonzero(labels == c).tolist() for c in range(classes)]
    num_left = [len(pool) for pool in lists]
    begins = [0, *accumulate(sizes.tolist())]
    mask = (1 << (len(sizes) - 1).bit_length()) - 1
    open_slots = sizes.tolist() + [0] * (mask + 1 - len(sizes))
    cdf, indices = np.cumsum(priors, axis=1).ravel().tolist(), [0] * begins[-1]
    # numpy's numbers are made from its 32-bit words, many times as fast as by a call each.
    state, num_used, client = rng.get_state(), 0, 0
    words = enumerate(chain.from_iterable(_word_blocks(rng)), 1)

    def uniform() -> float:
        """Return `rng.random_sample()`: 53 bits of two words."""
        nonlocal num_used
        (_, high), (num_used, low) = next(words), next(words)
        return ((high >> 5) * 67108864.0 + (low >> 6)) / 9007199254740992.0

    for _ in range(begins[-1]):
        # `randint(clients)`, until a client has an open slot
        for num_used, word in words if mask else ():  # noqa: B007 - it is read at the end
            client = word & mask
            if open_slots[client]:
                break
        open_slots[client] -= 1
        row = client * classes
        for _ in range(_MAX_REJECTIONS):
            c = bisect_left(cdf, uniform(), row, row + classes) - row
            c = 0 if c == classes else c  # rounding left the last sum under 1: numpy's argmax of "none is true" is 0
            if num_left[c]:
                break
            if exhausted == "reset":
                num_left[c] = len(lists[c])
        else:
            counts = num_left if exhausted == "redraw" else [len(pool) for pool in lists]
            c = _draw_remaining(priors[client], counts, uniform())
            num_left[c] = num_left[c] or len(lists[c])
        num_left[c] -= 1
        indices[begins[client] + open_slots[client]] = lists[c][num_left[c]]
    rng.set_state(state)
    rng.randint(0, 2**32, num_used, np.uint32)
    places = np.array(indices, dtype=np.int64)
    return [places[begin:end] for begin, end in pairwise(begins)]


def _draw_remaining(prior: np.ndarray, available: list[int], u: float) -> int:
    """Return a class with samples left, by `prior`, or by numbers of samples if the prior has no mass there."""
    counts = np.asarray(available, dtype=np.float64)
    weights = prior * (counts > 0)
    weights = weights if weights.sum() > 0 else counts
    # The last class with weight is the guard against u above a sum that rounding left under 1.
    return min(bisect_left((np.cumsum(weights) / weights.sum()).tolist(), u), int(np.flatnonzero(weights)[-1]))


def _check_draw(labels: np.ndarray, priors: np.ndarray, sizes: np.ndarray, exhausted: str) -> None:
    choice("exhausted", exhausted, EXHAUSTED)
    if sizes.shape != (len(priors),) or not np.issubdtype(sizes.dtype, np.integer) or (sizes < 0).any():
        raise ValueError(f"sizes must hold one integer >= 0 for each of the {len(priors)} clients, got {sizes!r}")
    if exhausted == "redraw" and sizes.sum() > labels.size:
        raise ValueError(
            f"exhausted='redraw' uses each sample once: {sizes.sum()} slots cannot be filled from {labels.size} "
            f"samples; use 'reset'"
        )
    if not np.isfinite(priors).all() or (priors < 0).any():
        raise ValueError("priors must be finite and >= 0")
    present = np.bincount(labels, minlength=priors.shape[1]) > 0
    empty = np.flatnonzero((priors * present).sum(axis=1) <= 0)
    if empty.size:
        raise ValueError(
            f"the prior of client {empty[0]} gives no weight to any class that has samples (classes "
            f"{np.flatnonzero(present).tolist()})"
        )


def frequencies(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Return each client's class frequencies, `[clients, classes]`."""
    return np.stack([np.bincount(labels[part], minlength=classes) / len(part) for part in parts])
