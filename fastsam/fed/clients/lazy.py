"""Clients whose data a function loads when they are sampled, and that are forgotten when they have trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from fastsam.fed.clients.all_clients import Clients, check_kind
from fastsam.fed.clients.prefetcher import Prefetcher
from fastsam.fed.clients.reading import LARGEST_READ, read, source
from fastsam.fed.clients.samples import ClientDataset, Collate, as_samples, generators, hashed, seeded
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
        ahead: number of clients that a thread loads before they train. None: the number of clients that train at once,
            if loading takes more than a millisecond; `load` is then called from several threads. 0: no client. A `load`
            that draws random numbers is always called when its client trains.

    Raises:
        ValueError: sizes are not integers >= 1, or `ahead` is below 0.
    """

    def __init__(
        self,
        clients: int,
        load: Callable[[int], Any],
        sizes: Sequence[int] | None = None,
        ahead: int | None = None,
    ) -> None:
        self.clients = integer("LazyClients: clients", clients, at_least=1)
        if not callable(load):
            raise ValueError(f"LazyClients: load must be a function client id -> data, got {load!r}")
        self.load, self.ahead = load, None if ahead is None else integer("LazyClients: ahead", ahead, at_least=0)
        self.sizes = None if sizes is None else [integer(f"LazyClients: sizes[{i}]", n, 1) for i, n in enumerate(sizes)]
        if self.sizes is not None and len(self.sizes) != clients:
            raise ValueError(
                f"LazyClients: sizes must have a number for each of the {clients} clients, got {len(self.sizes)}"
            )

    def __len__(self) -> int:
        return self.clients


@dataclass(frozen=True)
class RawClientData:
    """The value that `load` returned, not read yet."""

    data: Any


class LazySizes(Sequence[int]):
    """The known numbers of samples: the given ones, or the numbers of the clients that were loaded."""

    def __init__(self, clients: int, known: dict[int, int]) -> None:
        self.clients, self.known = clients, known

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> int:  # type: ignore[override]
        if not 0 <= client < self.clients:
            raise IndexError(client)
        return self.known[client]


class LazyClientData(Clients):
    """The clients of a `LazyClients`. Nothing of a client is kept but its number of samples and a digest, by which
    other data are noticed."""

    def __init__(
        self, lazy: LazyClients, whole: bool, collate: Collate | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Loads client 0. Raises ValueError, naming the client, for data that cannot be read."""
        self.lazy, self.whole, self.collate, self.dtype, self.device = lazy, whole, collate, dtype, device
        self.told = lazy.sizes is not None
        self._known = dict(enumerate(lazy.sizes or ()))
        self.sizes = LazySizes(len(lazy), self._known)
        self.draws, self._digests = False, dict[int, bytes]()
        self._reads_draw: bool | None = None  # looked for in client 0
        self._first: Mapping[str, str] | None = None
        self._seconds = 0.0  # that `load` took at first
        first = self._loaded(0)
        self.draws, self._reads_draw = self.draws or first.draws, first.draws
        self._first = first.kinds
        wanted = self._seconds > _INSTANT if lazy.ahead is None else lazy.ahead > 0
        self.prefetches = wanted and not self.draws
        self._ahead = Prefetcher(self._early) if self.prefetches else None

    def known_size(self, client: int) -> int:
        return self._known.get(client, 0)

    @property
    def known_sizes(self) -> Mapping[int, int]:
        return self._known

    @property
    def sized(self) -> bool:
        return len(self._known) == len(self)

    def prefetch(self, clients: Sequence[int], together: int) -> None:
        if self._ahead is not None:
            self._ahead.prefetch(clients, together if self.lazy.ahead is None else self.lazy.ahead)

    def hash(self, digest: blake2b) -> None:
        digest.update(hashed(len(self), [str(self.lazy.sizes), self._digests[0].hex()]))

    def __getitem__(self, client: int) -> ClientDataset:  # type: ignore[override]
        early = None if self._ahead is None else self._ahead.take(client)
        own = early if isinstance(early, ClientDataset) else self._loaded(client, early)
        if self._known.setdefault(client, len(own)) != len(own):
            raise ValueError(
                f"client {client}: it has {len(own)} samples, {'sizes says' if self.told else 'it had'} "
                f"{self._known[client]}"
            )
        if self._digests.setdefault(client, digest := own.digest()) != digest:
            raise ValueError(
                f"client {client}: load({client}) returns different data than in its first call, and the bits of a run "
                "depend on them. It must be a function of the client id only"
            )
        return own

    def _early(self, client: int) -> ClientDataset | RawClientData:
        """Return what can be prepared before the client trains: everything on the CPU. The memory of a GPU belongs to
        the stream that requests it."""
        return self._loaded(client) if self.device.type == "cpu" else RawClientData(self._given(client, False))

    def _loaded(self, client: int, early: RawClientData | None = None) -> ClientDataset:
        """Return the samples of a client. early: the value that `load` returned before, if any."""
        who, looking = f"client {client}", self._reads_draw is None
        given = self._given(client, looking) if early is None else early.data
        found = read(
            source(given, who, self.collate is not None),
            who,
            self.collate,
            self.dtype,
            self.device,
            LARGEST_READ,
            self._reads_draw,
        )
        own = as_samples(found)
        check_kind(own, who, self._first, self.whole)
        if looking:
            self._digests[client] = own.digest()
        return own

    def _given(self, client: int, looking: bool) -> Any:
        """Return the value of `load`. looking: find out whether it draws random numbers."""
        with seeded(seeds.derive("load", client)) if looking or self.draws else nullcontext():
            before = generators() if looking else b""
            began = time.perf_counter()
            try:
                given = self.lazy.load(client)
            except Exception as error:
                raise ValueError(f"client {client}: load({client}) failed: {type(error).__name__}: {error}") from error
            if looking:
                self._seconds = time.perf_counter() - began
                self.draws = self.draws or generators() != before
        return given
