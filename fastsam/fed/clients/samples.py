"""Samples of a client that are not a pair of tensors: trees of tensors in memory, or a data set that is read batch by
batch."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.clients.pairs import Pair, check_unmasked
from fastsam.fed.common.transfer import to_device

IGNORED = -100  # the label that torch's losses ignore by default
LABEL_COLUMNS = ("labels", "label")  # names of a column of class numbers, as in libraries of Hugging Face
Collate = Callable[[list[Any]], Any]  # samples -> batch
Tensors = tuple[Tensor, ...]  # the tensors of a tree, in the order of `leaves`


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree (dicts, lists, tuples, named ones too) with `function` of each leaf. Other mappings become
    dicts."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, part) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, part) for part in tree))
    if isinstance(tree, (tuple, list)):
        parts = [map_tree(function, part) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    return function(tree)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves, each with its path: `input_ids`, `0.mask`."""
    if isinstance(tree, Mapping):
        parts: Any = tree.items()
    elif isinstance(tree, (tuple, list)):
        parts = enumerate(tree)
    else:
        yield path, tree
        return
    for key, part in parts:
        yield from leaves(part, f"{path}.{key}" if path else str(key))


def tensors_of(tree: Any) -> Tensors:
    """Return the tensors of a tree in the order of `leaves`."""
    return tuple(leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def fill_tree(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a tree of tensors. `template` is the tree with indices into `tensors`, or None, in place of leaves."""
    return map_tree(lambda i: None if i is None else tensors[i], template)


def move_tree(tree: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the tree on `device`: floats in `dtype`, small integers int64, bytes and bools as they are."""

    def move_leaf(leaf: Any) -> Any:
        check_unmasked(leaf, "a part of the samples")
        if isinstance(leaf, np.ndarray) and leaf.dtype != object and leaf.dtype.kind not in "US":
            leaf = torch.from_numpy(np.array(leaf, order="C"))
        if not isinstance(leaf, Tensor):
            return leaf
        is_image = leaf.dtype in (torch.bool, torch.uint8)
        return leaf.detach().to(device, dtype if leaf.is_floating_point() else leaf.dtype if is_image else torch.int64)

    return map_tree(move_leaf, tree)


@contextmanager
def seed_generators(seed: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python inside the block, and restore them afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def generators() -> bytes:
    """Return the states of these generators, to see whether something drew."""
    of_numpy: Any = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes()
        + of_numpy[1].tobytes()
        + repr((of_numpy[2:], random.getstate())).encode()
    )


class ClientDataset(ABC):
    """The samples of a client, `len(samples)` of them, taken in batches.

    Attributes:
        draws: reading the samples draws random numbers, so a batch is read under a seed.
    """

    draws = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, places: Tensor, seed: int) -> Any:
        """Return the batch of the samples at `places`, int64 `[n]` on the CPU. `seed` is the seed of random reading."""

    @property
    def labels(self) -> Tensor | None:
        """y of all samples, if they are pairs (x, y) in memory, or columns with one of the `LABEL_COLUMNS`."""
        return None

    def batches(self, size: int) -> Iterator[tuple[Any, int]]:
        """Yield batches of all samples in their order, and the number of samples in each."""
        for start in range(0, len(self), size):
            places = torch.arange(start, min(start + size, len(self)))
            yield self.take(places, start), len(places)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The leaves of a batch of the first sample, which must be equal for all clients."""
        return {
            path: str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            for path, leaf in leaves(self.take(torch.zeros(1, dtype=torch.int64), 0))
        }

    def digest(self) -> bytes:
        """Return a hash by which the samples are recognized: of their number and of the first one."""
        return hash_tree(len(self), self.take(torch.zeros(1, dtype=torch.int64), 0))

    def note_on_labels(self) -> str:
        """Return a note about the labels, for a loss that is not finite."""
        return ""


def hash_tree(count: int, tree: Any) -> bytes:
    """Return a hash of a number of samples and all leaves of a tree."""
    digest = blake2b(repr(count).encode(), digest_size=16)
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            digest.update(repr((path, leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(repr((path, leaf)).encode())
    return digest.digest()


class TensorSamples(ClientDataset):
    """A tree whose leaves are tensors `[n, ...]`, on the device."""

    def __init__(self, tree: Any, samples: int) -> None:
        self.tree, self.samples = tree, samples

    def __len__(self) -> int:
        return self.samples

    def take(self, places: Tensor, seed: int) -> Any:
        first = next(leaf for _, leaf in leaves(self.tree))
        index = to_device(places, first.device)
        return map_tree(lambda t: t.index_select(0, index), self.tree)

    @property
    def labels(self) -> Tensor | None:
        if isinstance(self.tree, Mapping):
            columns = (self.tree.get(name) for name in LABEL_COLUMNS)
            return next((y for y in columns if isinstance(y, Tensor) and y.dtype == torch.int64 and y.dim() == 1), None)
        pair = isinstance(self.tree, (tuple, list)) and len(self.tree) == 2
        y = self.tree[1] if pair else None
        return y if isinstance(y, Tensor) else None

    def digest(self) -> bytes:
        return hash_tree(self.samples, self.tree)

    def note_on_labels(self) -> str:
        parts = [t for _, t in leaves(self.tree)] if self.labels is None else [self.labels]
        labels = [t for t in parts if t.dtype == torch.int64 and bool((t == IGNORED).any())]
        if not labels:
            return ""
        count = int((labels[0] == IGNORED).sum())
        return f" ({count} of its {labels[0].numel()} labels are {IGNORED}, and a batch of nothing else has no loss)"


class PairSamples(TensorSamples):
    """A pair (x, y) of tensors, whose batches in stored order are views."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(list(pair), len(pair[1]))

    def batches(self, size: int) -> Iterator[tuple[Any, int]]:
        x, y = self.tree
        yield from (((a, b), len(b)) for a, b in zip(x.split(size), y.split(size), strict=True))


def as_samples(samples: Pair | ClientDataset) -> ClientDataset:
    """Return samples as they are, and a pair as samples."""
    return samples if isinstance(samples, ClientDataset) else TensorSamples(list(samples), len(samples[1]))


class DatasetSamples(ClientDataset):
    """A data set that is read one batch at a time, as a `DataLoader` without workers reads it."""

    def __init__(self, data: Any, collate: Collate, label: str, dtype: torch.dtype, device: torch.device) -> None:
        self.data, self.collate, self.label, self.dtype, self.device = data, collate, label, dtype, device
        self._count = len(data)

    def __len__(self) -> int:
        return self._count

    def take(self, places: Tensor, seed: int) -> Any:
        with seed_generators(seed) if self.draws else nullcontext():
            items = fetch(self.data, places.tolist())
            batch = self.collate(items)
        tensors = move_tree(batch, self.dtype, self.device)
        if not any(isinstance(leaf, Tensor) for _, leaf in leaves(tensors)):
            raise ValueError(
                f"the collate of {self.label} must make a batch of tensors (a tensor, or a tuple, list or dict of "
                f"them) of a list of {len(items)} samples, got {type(batch).__name__}"
            )
        return tensors


def fetch(data: Any, places: Sequence[int]) -> list[Any]:
    """Return the samples at some places, in one call if the data set has a method for that."""
    get_items = getattr(data, "__getitems__", None)
    return list(get_items(places)) if get_items else [data[i] for i in places]
