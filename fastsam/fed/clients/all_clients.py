"""All clients of a run in one interface, whether their samples are pairs of tensors or come in batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from fastsam.fed.clients.batch_loss import split_pair
from fastsam.fed.clients.packed_samples import PackedSamples, pack_samples
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.samples import (
    ClientDataset,
    Tensors,
    TensorSamples,
    as_samples,
    fill_tree,
    leaves,
    map_tree,
    tensors_of,
)


class Clients(Sequence[ClientDataset]):
    """The clients of a run: client i is `clients[i]`.

    Attributes:
        sizes: number of samples of each client.
        draws: reading a batch draws random numbers.
        prefetches: clients can be loaded before they are needed.
        is_batched: samples come in batches.
        pairs: the clients as pairs of tensors, empty if samples come in batches.
        tensors: all tensors of each client, in one order, empty if samples are read batch by batch.
        template: inputs and labels, or a tree of tensors and None, with indices into a client's tensors as leaves.
        store: memory with the samples of all clients, or None.
    """

    sizes: Sequence[int]
    draws: bool = False
    prefetches: bool = False
    is_batched: bool = True
    pairs: Sequence[Pair] = ()
    tensors: Sequence[Tensors] = ()
    template: Any = None
    store: PackedSamples | None = None

    @abstractmethod
    def __getitem__(self, client: int) -> ClientDataset: ...  # type: ignore[override]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def labels(self) -> Sequence[Tensor] | None:
        """y of each client, or None if labels are only in batches."""
        return None

    def known_size(self, client: int) -> int:
        """Return the number of samples of a client, 0 if the client has not been loaded."""
        return self.sizes[client]

    @property
    def known_sizes(self) -> Mapping[int, int]:
        """Number of samples by client, for the clients whose size is known before they are loaded."""
        return dict(enumerate(self.sizes))

    @property
    def has_all_sizes(self) -> bool:
        """True if the size of every client is known before the first round."""
        return True

    def labels_together(self) -> tuple[Tensor, Sequence[int]] | None:
        """Return y of all clients in one flat tensor, and the number of labels of each client, or None."""
        labels = self.labels
        if labels is None:
            return None
        parts = [y.flatten() for y in labels]
        return torch.cat(parts), [len(y) for y in parts]

    def prefetch(self, clients: Sequence[int], num_clients: int) -> None:
        """Announce the clients that will train, in this order, `num_clients` at once."""

    @abstractmethod
    def hash(self, digest: blake2b) -> None:
        """Add to `digest` what the same clients are recognized by."""

    def about_ignored(self, client: int) -> str:
        """Return a note about a client's labels, for a loss that is not finite."""
        return self[client].note_on_labels()


class PairClients(Clients):
    """Clients whose samples are pairs of tensors (x, y), perhaps views of a store."""

    is_batched = False
    template = (0, 1)

    def __init__(self, pairs: Sequence[Tensors], store: PackedSamples | None = None) -> None:
        self.pairs, self.tensors, self.store = cast(Sequence[Pair], pairs), pairs, store
        self.sizes = [len(y) for _, y in self.pairs] if store is None else store.sizes

    def __getitem__(self, client: int) -> ClientDataset:  # type: ignore[override]
        return as_samples(self.pairs[client])

    @property
    def labels(self) -> Sequence[Tensor]:
        return [y for _, y in self.pairs]

    def labels_together(self) -> tuple[Tensor, Sequence[int]] | None:
        if self.store is None:
            return super().labels_together()
        y = self.store.labels()
        labels_per_sample = y[0].numel()
        return y.flatten(), [n * labels_per_sample for n in self.sizes]

    def hash(self, digest: blake2b) -> None:
        for pair in self.pairs:
            hash_pair(digest, pair)


class InMemoryClients(Clients):
    """Clients whose samples come in batches, and that are there from the start. Trees of tensors may be views of a
    store."""

    def __init__(self, clients: Sequence[ClientDataset]) -> None:
        self.clients, self.sizes = list(clients), [len(samples) for samples in clients]
        self.draws = any(samples.draws for samples in clients)
        trees = [samples.tree for samples in self.clients if isinstance(samples, TensorSamples)]
        if len(trees) == len(self.clients):
            self._pack([dict(leaves(tree)) for tree in trees], trees[0])
        self._labels = [y for samples in self.clients if (y := samples.labels) is not None]

    def _pack(self, columns: Sequence[Mapping[str, Tensor]], tree: Any) -> None:
        """Put the columns of all clients into a store if they are alike. All clients' trees are then built as `tree`,
        because the order of a dict may differ."""
        if len(columns[0]) < len(tensors_of(tree)):
            return  # two columns have one path, as with the keys "a.b" and "a" of a dict with "b"
        indices = count()
        template = map_tree(lambda leaf: next(indices), tree)
        self.tensors, self.store = pack_samples([tuple(column[path] for path in columns[0]) for column in columns])
        self.clients = [TensorSamples(fill_tree(template, t), len(t[0])) for t in self.tensors]
        self.template = (template, None)

    def __getitem__(self, client: int) -> ClientDataset:  # type: ignore[override]
        return self.clients[client]

    @property
    def labels(self) -> Sequence[Tensor] | None:
        return self._labels if len(self._labels) == len(self.clients) else None

    def hash(self, digest: blake2b) -> None:
        hasher = blake2b(digest_size=16)
        for samples in self.clients:
            hasher.update(samples.digest())
        digest.update(hasher.digest())


def hash_pair(digest: blake2b, pair: Sequence[Tensor]) -> None:
    """Add the dtypes, shapes and bytes of tensors to `digest`."""
    for tensor in pair:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def check_kind(samples: ClientDataset, label: str, first: Mapping[str, str] | None, any_batch: bool) -> None:
    """Check that the loss can read the samples of a client, and that they are like the samples of client 0.

    Args:
        samples: the client's samples.
        label: name for messages.
        first: `kinds` of client 0's samples, or None.
        any_batch: the loss takes any batch, not only pairs.

    Raises:
        ValueError: the samples are not pairs (x, y), or their structure differs from client 0's samples.
    """
    if not any_batch:
        try:
            split_pair(samples.take(torch.zeros(1, dtype=torch.int64), 0))
        except ValueError as error:
            raise ValueError(
                f"{label} must be a pair (x, y) of tensors or arrays, or have samples (x, y): {error}"
            ) from None
    if first is None or samples.kinds == first:
        return
    path = next(path for path in (*first, *samples.kinds) if first.get(path) != samples.kinds.get(path))
    kind, first_kind = (kinds.get(path, "missing") for kinds in (samples.kinds, first))
    raise ValueError(
        f"{label}: {path or 'the tensor'} is {kind} in a batch, but {first_kind} in a batch of client 0. Build the "
        "samples of all clients alike"
    )
