"""Clients whose data a function loads when they are sampled, and that are forgotten when they have trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any

import torch

from fastsam.fed.clients.all_clients import Clients, check_kind
from fastsam.fed.clients.prefetcher import Prefetcher
from fastsam.fed.clients.reading import LARGEST_READ, read, source
from fastsam.fed.clients.samples import ClientDataset, Collate, as_samples, generators, hash_tree, seed_generators
from fastsam.fed.common import seeds
from fastsam.fed.common.checks import integer

_INSTANT = 1e-3  # seconds; faster loads are not done ahead


class LazyClients:
    """Clients whose data are loaded when they train: `load(i)` returns the data of client i.

    `load` must return the same data again for the same i, in every process. It is called once for every round of a
    client. If it draws from the generators of torch, numpy or Python, it is called under a seed of that client. Two
    calls before the first round find out whether it draws.

    Args:
        clients: number of clients.
        load: function of a client id; it returns anything that a client may be.
        sizes: number of samples of each client, `[clients]` integers. None: known after loading; this serves runs in
            one process with weighting="uniform" and without measures.
        prefetch: number of clients that a thread loads before they train. None: the number of clients that train at
            once, if loading takes more than a millisecond; `load` is then called from several threads. 0: no client. A
            `load` that draws random numbers is always called when its client trains.

    Raises:
        ValueError: sizes are not integers >= 1, or `prefetch` is below 0.
    """

    def __init__(
        self,
        clients: int,
        load: Callable[[int], Any],
        sizes: Sequence[int] | None = None,
        prefetch: int | None = None,
    ) -> None:
        self.clients = integer("LazyClients: clients", clients, at_least=1)
        if not callable(load):
            raise ValueError(f"LazyClients: load must be a function client id -> data, got {load!r}")
        self.load = load
        self.num_prefetched = None if prefetch is None else integer("LazyClients: prefetch", prefetch, at_least=0)
        self.sizes = None if sizes is None else [integer(f"LazyClients: sizes[{i}]", n, 1) for i, n in enumerate(sizes)]
        if self.sizes is not None and len(self.sizes) != clients:
            raise ValueError(
                f"LazyClients: sizes must have a number for each of the {clients} clients, got {len(self.sizes)}"
            )

    def __len__(self) -> int:
        return self.clients


class LazySizes(Sequence[int]):
    """The known numbers of samples: the given ones, or the numbers of the clients that were loaded."""

    def __init__(self, clients: int, sizes: dict[int, int]) -> None:
        self.clients, self.known_sizes = clients, sizes

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> int:  # type: ignore[override]
        if not 0 <= client < self.clients:
            raise IndexError(client)
        return self.known_sizes[client]


class LazyClientData(Clients):
    """The clients of a `LazyClients`. A client's number of samples and a digest are kept, and nothing else."""

    def __init__(
        self, lazy: LazyClients, takes_batches: bool, collate: Collate | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load client 0. Raises ValueError, naming the client, for data that cannot be read."""
        self.lazy, self.whole, self.collate, self.dtype, self.device = lazy, takes_batches, collate, dtype, device
        self.has_sizes = lazy.sizes is not None
        self._sizes = dict(enumerate(lazy.sizes or ()))
        self.sizes = LazySizes(len(lazy), self._sizes)
        self.draws, self._digests = False, dict[int, bytes]()
        self._reads_draw: bool | None = None  # looked for in client 0
        self._first: Mapping[str, str] | None = None
        self._seconds = 0.0  # that `load` took at first
        first = self._load_samples(0)
        self.draws, self._reads_draw = self.draws or first.draws, first.draws
        self._first = first.kinds
        prefetches = self._seconds > _INSTANT if lazy.num_prefetched is None else lazy.num_prefetched > 0
        self.prefetches = prefetches and not self.draws
        self._prefetcher = Prefetcher(self._prefetch) if self.prefetches else None

    def known_size(self, client: int) -> int:
        return self._sizes.get(client, 0)

    @property
    def known_sizes(self) -> Mapping[int, int]:
        return self._sizes

    @property
    def has_all_sizes(self) -> bool:
        return len(self._sizes) == len(self)

    def prefetch(self, clients: Sequence[int], num_clients: int) -> None:
        if self._prefetcher is not None:
            self._prefetcher.prefetch(
                clients, num_clients if self.lazy.num_prefetched is None else self.lazy.num_prefetched
            )

    def about_ignored(self, client: int) -> str:
        return ""  # its data would be loaded again

    def hash(self, digest: blake2b) -> None:
        digest.update(hash_tree(len(self), [str(self.lazy.sizes), self._digests[0].hex()]))

    def __getitem__(self, client: int) -> ClientDataset:  # type: ignore[override]
        result = None if self._prefetcher is None else self._prefetcher.take(client)
        samples = result if isinstance(result, ClientDataset) else self._load_samples(client, result)
        if self._sizes.setdefault(client, len(samples)) != len(samples):
            raise ValueError(
                f"client {client}: it has {len(samples)} samples, {'sizes says' if self.has_sizes else 'it had'} "
                f"{self._sizes[client]}"
            )
        if self._digests.setdefault(client, digest := samples.digest()) != digest:
            raise ValueError(
                f"client {client}: load({client}) returns different data than in its first call, and the bits of a run "
                "depend on them. It must be a function of the client id only"
            )
        return samples

    def _prefetch(self, client: int) -> ClientDataset | tuple[Any]:
        """Return what can be prepared early: everything on the CPU, because a GPU's memory belongs to a stream."""
        return self._load_samples(client) if self.device.type == "cpu" else (self._load(client, False),)

    def _load_samples(self, client: int, result: tuple[Any] | None = None) -> ClientDataset:
        """Return the samples of a client. `result` is a tuple with the value that `load` returned before, or None."""
        label, is_first = f"client {client}", self._reads_draw is None
        data = self._load(client, is_first) if result is None else result[0]
        content = read(
            source(data, label, self.collate is not None),
            label,
            self.collate,
            self.dtype,
            self.device,
            LARGEST_READ,
            self._reads_draw,
        )
        samples = as_samples(content)
        check_kind(samples, label, self._first, self.whole)
        if is_first:
            self._digests[client] = samples.digest()
        return samples

    def _load(self, client: int, is_first: bool) -> Any:
        """Return the value of `load`. With `is_first`, find out whether it draws random numbers."""
        with seed_generators(seeds.derive("load", client)) if is_first or self.draws else nullcontext():
            generator_states = generators() if is_first else b""
            began = time.perf_counter()
            try:
                data = self.lazy.load(client)
            except Exception as error:
                raise ValueError(f"client {client}: load({client}) failed: {type(error).__name__}: {error}") from error
            if is_first:
                self._seconds = time.perf_counter() - began
                self.draws = self.draws or generators() != generator_states
        return data
