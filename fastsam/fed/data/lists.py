"""A split that a user brings: lists of positions, or a file of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.fed.common.atomic_files import read_json
from fastsam.fed.data.dealing import Partition, check_labels, frequencies


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
        labels: labels of the training set.
        clients: expected number of lists, or None for any number.
        seed: has no effect, because nothing is drawn.
        indices: a list of integer lists, or a JSON file with one.
        duplicates: a sample may be named more than once.
        classes: number of classes.

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
    everything = np.sort(np.concatenate(parts))
    twice = everything[1:][everything[1:] == everything[:-1]]
    if twice.size and not duplicates:
        raise ValueError(
            f"indices name sample {twice[0]} more than once ({twice.size} such entries); say duplicates=True if that "
            f"is meant"
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
