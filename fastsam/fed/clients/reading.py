"""Reading of clients' data: a pair, a tree of columns, a data set or a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from fastsam.fed.clients.pairs import Pair, all_finite, checked_pair, is_array, text_hint
from fastsam.fed.clients.samples import (
    ClientDataset,
    Collate,
    DatasetSamples,
    TensorSamples,
    fetch,
    generators,
    leaves,
    move_tree,
    seed_generators,
)

LARGEST_READ = 2**30  # bytes of all clients together; data sets of more are read batch by batch
FORMS = (
    "a pair (x, y) of tensors or arrays, a dict of columns [n, ...], a data set (anything with __len__ and "
    "__getitem__) or a DataLoader"
)
MEMORY = "The commands take one input x of one shape and a class number y; fed.run takes other samples too"


@dataclass(frozen=True)
class SampleSource:
    """A data set of samples, and the collate of the loader that it came in."""

    data: Any
    collate: Collate | None = None

    def __len__(self) -> int:
        return len(self.data)


def source(data: Any, label: str, has_collate: bool = False) -> Any:
    """Return a `SampleSource` of a data set, a list of samples or a loader. Columns are returned as they are.

    Args:
        data: data of a client or of the test set.
        label: name for messages.
        has_collate: a `collate` of the run takes samples.

    Raises:
        ValueError: the form of the data is not in `FORMS`.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, label, has_collate)
    if isinstance(data, (IterableDataset, Iterator)):
        raise ValueError(
            f"{label} is {type(data).__name__}, which has no samples by number; hand over {FORMS} (list(...) of it, "
            "say)"
        )
    if type(data) is TensorDataset and not has_collate:
        return _columns(list(data.tensors))
    if type(data) is Subset and type(data.dataset) is TensorDataset and not has_collate:
        places = torch.as_tensor(data.indices, dtype=torch.int64)
        return _columns([t.index_select(0, places.to(t.device)) for t in data.dataset.tensors])
    if isinstance(data, (str, bytes)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(f"{label} must be {FORMS}, got {type(data).__name__}")
    if isinstance(data, Mapping) or is_array(data):
        return data
    if isinstance(data, tuple):
        if len(data) != 2:
            raise ValueError(f"{label} must be {FORMS}, got a tuple of {len(data)}")
        return data
    if isinstance(data, list) and data and not isinstance(data[0], (tuple, Mapping)):
        if len(data) != 2:
            raise ValueError(
                f"{label} must be {FORMS}, got a list of {len(data)} that are not samples (tuples or dicts)"
            )
        return tuple(data)
    return SampleSource(data)


def _columns(tensors: list[Tensor]) -> Any:
    return tuple(tensors) if len(tensors) == 2 else tensors


def _of_loader(loader: DataLoader[Any], label: str, has_collate: bool) -> Any:
    """Return a loader's data set, the part that its sampler takes, and its collate."""
    data, sampler = loader.dataset, loader.sampler
    is_sequential = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler and not sampler.replacement:
        is_sequential = sampler.num_samples == len(data)  # type: ignore[arg-type]
    if isinstance(data, IterableDataset) or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        is_sequential = False
    elif type(sampler) is SubsetRandomSampler:
        data, is_sequential = Subset(data, list(sampler.indices)), True
    if not is_sequential:
        raise ValueError(
            f"{label} is a DataLoader with its own sampler ({type(loader.batch_sampler or sampler).__name__}, "
            f"{type(sampler).__name__}), and a run draws its own batches; hand over torch.utils.data.Subset(dataset, "
            f"indices)"
        )
    collate = loader.collate_fn if loader.batch_size is not None else None
    if collate is default_collate or collate is None:
        return source(data, label, has_collate)
    return SampleSource(data, collate)


def read(
    data: Any,
    label: str,
    collate: Collate | None,
    dtype: torch.dtype,
    device: torch.device,
    per_sample: float,
    draws: bool | None = None,
) -> Pair | ClientDataset:
    """Return a `source` as a pair of tensors or as samples.

    Args:
        data: result of `source`.
        label: name for messages.
        collate: function of the run; it wins over a loader's.
        dtype: dtype of the model.
        device: device of the run.
        per_sample: largest number of bytes of a sample that is kept in memory.
        draws: reading draws random numbers. None: find out, by a look at generators that other threads might use.

    Raises:
        ValueError: the data cannot be read; the message names client and sample.
    """
    if not isinstance(data, SampleSource):
        return _of_columns(data, label, dtype, device)
    if len(data) == 0:
        raise ValueError(f"{label} has no samples; leave it out or give it some")
    collate_fn = collate or data.collate
    with seed_generators(0) if draws is not False else nullcontext():
        has_draws, size = _try_sample(data.data, label) if draws is None else (draws, 0)
        if collate_fn is None and not has_draws and size <= per_sample:
            generator_states = generators() if draws is None else b""
            items = _items(data.data, range(len(data)), label)
            has_draws = draws is None and generators() != generator_states
            tree = None if has_draws else _stack(items, label, dtype, device)
            if tree is not None:
                return tree
        samples = DatasetSamples(data.data, collate_fn or default_collate, label, dtype, device)
        samples.draws = has_draws or (draws is None and _collate_draws(samples))
        return samples


def read_whole(data: Any, label: str) -> tuple[Any, Any]:
    """Return x and y of all samples of a client, in one of the `FORMS`, as arrays or tensors in their own dtypes.

    Raises:
        ValueError: reading fails or draws random numbers, samples differ in shape, or they are not pairs (x, y).
    """
    samples = source(data, label)
    if isinstance(samples, SampleSource):
        if len(samples) == 0:
            raise ValueError(f"{label} has no samples; leave it out or give it some")
        with seed_generators(0):
            if _try_sample(samples.data, label)[0]:
                raise ValueError(
                    f"{label}: reading a sample draws random numbers, and here samples are read once. Leave the random "
                    "transform out, and take the key augment"
                )
            items = _items(samples.data, range(len(samples)), label)
        try:
            samples = (samples.collate or default_collate)(items)
        except Exception as error:
            raise ValueError(
                f"{label}: its samples make no batch. {MEMORY} ({type(error).__name__}: {error})"
            ) from error
    if not isinstance(samples, (tuple, list)) or len(samples) != 2 or not all(map(is_array, samples)):
        raise ValueError(f"{label} must have samples (x, y), got {type(samples).__name__}. {MEMORY}")
    return samples[0], samples[1]


def _of_columns(columns: Any, label: str, dtype: torch.dtype, device: torch.device) -> Pair | ClientDataset:
    """Return columns (tensors or arrays of all samples) as a pair, or as a tree of columns."""
    if isinstance(columns, tuple) and not isinstance(columns[0], (Mapping, tuple)):
        return checked_pair(columns, label, dtype, device)
    return _tree(columns, label, dtype, device)


def _tree(data: Any, label: str, dtype: torch.dtype, device: torch.device) -> ClientDataset:
    tree = move_tree(data, dtype, device)
    for path, leaf in leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            kind = text_hint(leaf) or type(leaf).__name__
            raise ValueError(
                f"{label}: {path or 'it'} must be a tensor or an array [n, ...] of all samples, got {kind}"
            )
    sizes = {path: len(leaf) for path, leaf in leaves(tree)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{path} has {n}" for path, n in sizes.items())
        raise ValueError(f"{label}: columns must have one number of samples, {counts}")
    count = next(iter(sizes.values()), 0)
    if count == 0:
        raise ValueError(f"{label} has no samples; leave it out or give it some")
    for path, leaf in leaves(tree):
        if leaf.is_floating_point() and not all_finite(leaf):
            raise ValueError(f"{label}: {path} holds NaN or infinity (in {dtype}); remove or replace those values")
    return TensorSamples(tree, count)


def _items(data: Any, places: Sequence[int], label: str) -> list[Any]:
    try:
        return fetch(data, places)
    except Exception as error:
        subject = f"sample {places[0]}" if len(places) == 1 else "its samples"
        raise ValueError(f"{label}: reading {subject} failed: {type(error).__name__}: {error}") from error


def _try_sample(data: Any, label: str) -> tuple[bool, int]:
    """Return whether reading a sample draws from seedable generators, and the size of a sample in bytes."""
    generator_states = generators()
    (first,) = _items(data, [0], label)
    draws = generators() != generator_states
    if not draws and not _are_equal(first, _items(data, [0], label)[0]):
        raise ValueError(
            f"{label}: sample 0 is another one when it is read again, and the numbers are not from torch's, numpy's or "
            "Python's own generators, which a run seeds for every batch; draw from one of these"
        )
    sizes = (np.asarray(leaf).nbytes if not isinstance(leaf, Tensor) else leaf.nbytes for _, leaf in leaves(first))
    return draws, sum(sizes)


def _are_equal(a: Any, b: Any) -> bool:
    """Return True if two readings of a sample are equal, as far as they are tensors, arrays and numbers."""
    for (_, one), (_, right) in zip(leaves(a), leaves(b), strict=False):
        if isinstance(one, (Tensor, np.ndarray, int, float)):
            x, y = (torch.as_tensor(leaf) for leaf in (one, right))
            if x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return False
    return True


def _stack(items: list[Any], label: str, dtype: torch.dtype, device: torch.device) -> Pair | ClientDataset | None:
    """Return all samples in one tensor, or None if parts of them are texts, which are collated batch by batch."""
    if any(isinstance(leaf, (str, bytes)) for _, leaf in leaves(items[0])):
        return None
    try:
        tree = default_collate(items)
    except Exception as error:
        raise ValueError(
            f"{label}: its samples make no batch ({type(error).__name__}: {error}); hand over collate=, a function of "
            "a list of samples that returns tensors, or samples of tensors, arrays and numbers"
        ) from error
    if isinstance(tree, (tuple, list)) and len(tree) == 2 and all(isinstance(t, Tensor) for t in tree):
        return checked_pair(tree, label, dtype, device)
    return _tree(tree, label, dtype, device)


def _collate_draws(samples: DatasetSamples) -> bool:
    """Return True if making a batch draws random numbers, as collates of language models do that mask words."""
    generator_states = generators()
    try:
        samples.take(torch.arange(min(len(samples), 2)), 0)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{samples.label}: the collate failed on its first samples: {type(error).__name__}: {error}"
        ) from error
    return generators() != generator_states
