"""Clients whose data a function loads when they are sampled, and that are forgotten when they have trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fastsam.fed.clients.batched import BatchedClients, check_kind
from fastsam.fed.clients.reading import LARGEST_READ, as_samples, read, source
from fastsam.fed.clients.samples import Collate, Samples, generators, hashed, seeded
from fastsam.fed.common import seeds
from fastsam.fed.common.checks import integer


class Lazy:
    """`clients` clients for `fed.run`, of which `load(i)` gives the data of client i, all that a client may be, when it trains.

    sizes: samples of each client, `[clients]` integers; None: known when a client is loaded, which serves a run in one process with
    weighting="uniform" and without measures. `load` must give the same data again for the same i, in every process: it is called once for
    every round of a client, and under seeds of that client where it draws from torch's, numpy's or Python's generators. (Two calls before
    the first round tell whether it does.)

    Raises ValueError for sizes that are none.
    """

    def __init__(self, clients: int, load: Callable[[int], Any], sizes: Sequence[int] | None = None) -> None:
        self.clients = integer("Lazy: clients", clients, at_least=1)
        if not callable(load):
            raise ValueError(f"Lazy: load must be a function client id -> data, got {load!r}")
        self.load = load
        self.sizes = None if sizes is None else [integer(f"Lazy: sizes[{i}]", n, 1) for i, n in enumerate(sizes)]
        if self.sizes is not None and len(self.sizes) != clients:
            raise ValueError(f"Lazy: sizes must have a number for each of the {clients} clients, got {len(self.sizes)}")

    def __len__(self) -> int:
        return self.clients


class LazySizes(Sequence[int]):
    """What is known of sizes: those that were told, or those of the clients that have been loaded."""

    def __init__(self, clients: int, known: dict[int, int]) -> None:
        self.clients, self.known = clients, known

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> int:  # type: ignore[override]
        if not 0 <= client < self.clients:
            raise IndexError(client)
        return self.known[client]


class LazyClients(BatchedClients):
    """The clients of a `Lazy`. Nothing of a client is kept but its number of samples and a digest, by which other data are noticed."""

    def __init__(
        self, lazy: Lazy, whole: bool, collate: Collate | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Loads client 0. Raises ValueError, naming the client, for data that cannot be read."""
        self.lazy, self.whole, self.collate, self.dtype, self.device = lazy, whole, collate, dtype, device
        self.told = lazy.sizes is not None
        self._known = dict(enumerate(lazy.sizes or ()))
        self.sizes = LazySizes(len(lazy), self._known)
        self.draws, self._digests = False, dict[int, bytes]()
        self._reads_draw: bool | None = None  # looked for in client 0
        self._first: Mapping[str, str] | None = None
        first = self._loaded(0)
        self.draws, self._reads_draw = self.draws or first.draws, first.draws
        self._first = first.kinds

    def __len__(self) -> int:
        return len(self.lazy)

    @property
    def known_sizes(self) -> Mapping[int, int]:
        return self._known

    def digest(self) -> bytes:
        return hashed(len(self), [str(self.lazy.sizes), self._digests[0].hex()])

    def __getitem__(self, client: int) -> Samples:  # type: ignore[override]
        own = self._loaded(client)
        if self._known.setdefault(client, len(own)) != len(own):
            raise ValueError(
                f"client {client} has {len(own)} samples, {'sizes says' if self.told else 'it had'} {self._known[client]}"
            )
        if self._digests.setdefault(client, digest := own.digest()) != digest:
            raise ValueError(
                f"client {client}: load({client}) gives other data than at its first call, on which the bits of a run depend; it must be a "
                "function of the client alone"
            )
        return own

    def _loaded(self, client: int) -> Samples:
        who, looking = f"client {client}", self._reads_draw is None
        with seeded(seeds.derive("load", client)) if looking or self.draws else nullcontext():
            before = generators() if looking else b""
            try:
                given = self.lazy.load(client)
            except Exception as error:
                raise ValueError(f"{who}: load({client}) failed: {type(error).__name__}: {error}") from error
            self.draws = self.draws or (looking and generators() != before)
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
