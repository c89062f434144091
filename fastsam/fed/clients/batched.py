"""All clients of a run whose samples come in batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from fastsam.fed.clients.batch_loss import parted
from fastsam.fed.clients.samples import ClientDataset


class BatchedClients(Sequence[ClientDataset]):
    """Client i is `clients[i]`.

    Attributes:
        sizes: number of samples of each client.
        known_sizes: the sizes that are known before the clients are loaded, by client.
        draws: reading a batch draws random numbers.
        labels: y of each client, if they are in memory.
    """

    sizes: Sequence[int]
    draws: bool
    labels: list[Tensor] | None = None

    @property
    @abstractmethod
    def known_sizes(self) -> Mapping[int, int]: ...

    @property
    def prefetches(self) -> bool:
        """True if clients can be loaded before they are needed."""
        return False

    def prefetch(self, clients: Sequence[int], together: int) -> None:
        """Announce the clients that will train, in this order, `together` at once."""

    @abstractmethod
    def digest(self) -> bytes:
        """A hash by which they are known again."""

    def about_ignored(self, client: int) -> str:
        """Return a note about a client's labels, for a loss that is not finite."""
        return ""

    @abstractmethod
    def __getitem__(self, client: int) -> ClientDataset: ...  # type: ignore[override]


class InMemoryClients(BatchedClients):
    """Clients that are there from the start."""

    def __init__(self, clients: Sequence[ClientDataset]) -> None:
        self.clients, self.sizes = list(clients), [len(own) for own in clients]
        self.draws = any(own.draws for own in clients)
        labels = [y for own in clients if (y := own.labels) is not None]
        self.labels = labels if len(labels) == len(clients) else None

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: int) -> ClientDataset:  # type: ignore[override]
        return self.clients[client]

    @property
    def known_sizes(self) -> Mapping[int, int]:
        return dict(enumerate(self.sizes))

    def digest(self) -> bytes:
        made = blake2b(digest_size=16)
        for own in self.clients:
            made.update(own.digest())
        return made.digest()

    def about_ignored(self, client: int) -> str:
        return self.clients[client].ignored()


def check_kind(own: ClientDataset, who: str, first: Mapping[str, str] | None, whole: bool) -> None:
    """Raise ValueError if the loss cannot split the samples into x and y, or if their structure differs from client
    0's samples.

    Args:
        own: samples of a client.
        who: name of the client, for messages.
        first: the `kinds` of client 0, or None.
        whole: the loss takes any batch.
    """
    if not whole:
        try:
            parted(own.take(torch.zeros(1, dtype=torch.int64), 0))
        except ValueError as error:
            raise ValueError(
                f"{who} must be a pair (x, y) of tensors or arrays, or have samples (x, y): {error}"
            ) from None
    if first is not None and own.kinds != first:
        raise ValueError(
            f"{who}: a batch has {_words(own.kinds)}, a batch of client 0 {_words(first)}. Clients' samples must "
            "be built alike"
        )


def _words(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{path or 'a tensor'} ({kind})" for path, kind in kinds.items()) or "nothing"
