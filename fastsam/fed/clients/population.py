"""The clients' data and the test set, as training reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import groupby

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.batched import BatchedClients
from fastsam.fed.clients.packed_samples import PackedSamples
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.samples import IGNORED, ClientDataset, as_samples

_TOGETHER = 4096  # clients whose samples are copied to be hashed in one piece
Loss = Callable[[Tensor, Tensor], Tensor]  # loss of outputs and labels
# (x [n, ...], generator) -> x' of the same shape, type and device; x is left as it is.
Augment = Callable[[Tensor, torch.Generator], Tensor]


def augmented(augment: Augment, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the augmented batch. Raises ValueError if it does not have the shape and dtype of `x`."""
    made = augment(x, generator)
    if not isinstance(made, Tensor) or (made.dtype, made.shape, made.device) != (x.dtype, x.shape, x.device):
        came = f"{made.dtype} {list(made.shape)} on {made.device}" if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(
            f"augment must return a batch with the shape and dtype of its input, {x.dtype} {list(x.shape)}, got {came}"
        )
    return made


@dataclass(frozen=True)
class Population:
    """All clients and the test set, on one device.

    Attributes:
        clients: pairs (x, y), empty if samples come in batches.
        test: the test set as a pair, or None.
        priors: class distribution `[clients, classes]` of each client, if the split has it.
        augment: makes training inputs from stored ones, or None.
        store: memory with the samples of all clients, or None.
        samples: the clients if samples come in batches; `test_samples` the test set, `place` the device.
        test_sizes: number of test samples of each client, in order, if clients have separate test sets.
    """

    clients: Sequence[Pair]
    test: Pair | None
    classes: int | None
    priors: np.ndarray | None
    augment: Augment | None = None
    store: PackedSamples | None = None
    samples: BatchedClients | None = None
    test_samples: ClientDataset | None = None
    place: torch.device | None = None
    test_sizes: Sequence[int] | None = None

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Samples of each client."""
        if self.store is not None:
            return self.store.sizes
        return [len(y) for _, y in self.clients] if self.samples is None else self.samples.sizes

    @property
    def known_sizes(self) -> Mapping[int, int]:
        """Number of samples by client, for the clients whose size is known before they are loaded."""
        return dict(enumerate(self.sizes)) if self.samples is None else self.samples.known_sizes

    @cached_property
    def sized(self) -> bool:
        """True if the size of every client is known before the first round."""
        return self.samples is None or len(self.samples.known_sizes) == len(self.samples)

    @property
    def device(self) -> torch.device:
        """The device of training."""
        return self.clients[0][1].device if self.place is None else self.place

    @property
    def labels(self) -> Iterable[Tensor] | None:
        """y of each client, or None if labels are only in batches."""
        return (y for _, y in self.clients) if self.samples is None else self.samples.labels

    def labels_together(self) -> tuple[Tensor, Sequence[int]] | None:
        """y of all clients in one flat tensor, and the number of labels of each client; None if labels are only in
        batches."""
        if self.store is not None:
            y = self.store.labels()
            each = y[0].numel()
            return y.flatten(), [n * each for n in self.sizes]
        own = self.labels
        if own is None:
            return None
        parts = [y.flatten() for y in own]
        return torch.cat(parts), [len(y) for y in parts]

    @property
    def test_labels(self) -> Tensor | None:
        """y of the test set, or None if there is none or if it is only in batches."""
        if self.test_samples is not None:
            return self.test_samples.labels
        return None if self.test is None else self.test[1]

    @property
    def batched(self) -> str:
        """The reason why samples come in batches and not as pairs of tensors, or "" if they are pairs."""
        return (
            ""
            if self.samples is None
            else (
                "clients' samples are no pairs of tensors of one shape with a loss of outputs and labels: they come "
                "batch by batch"
            )
        )

    def largest_client(self) -> int:
        """Return the client with most samples, the first one of several."""
        sizes = self.known_sizes
        return max(sizes, key=lambda i: (sizes[i], -i)) if sizes else 0

    def data_of(self, client: int) -> ClientDataset:
        """Return the samples of a client."""
        return as_samples(self.clients[client]) if self.samples is None else self.samples[client]

    @property
    def test_data(self) -> ClientDataset | None:
        """The test set as samples, or None."""
        return as_samples(self.test) if self.test is not None else self.test_samples

    def loss_of(self, loss: Loss | BatchLoss) -> Loss | BatchLoss:
        """Return the loss as steps take it: of a batch if samples come in batches."""
        return PairLoss(loss) if self.samples is not None and not isinstance(loss, BatchLoss) else loss

    @property
    def reads_draw(self) -> bool:
        """True if reading a batch draws random numbers."""
        return self.samples is not None and self.samples.draws

    @property
    def prefetches(self) -> bool:
        """True if clients are loaded before they train."""
        return self.samples is not None and self.samples.prefetches

    @property
    def test_size(self) -> int:
        """Number of samples of the test set, 0 without one."""
        if self.test_samples is not None:
            return len(self.test_samples)
        return 0 if self.test is None else len(self.test[1])

    def about_ignored(self, client: int) -> str:
        """Return a note about the labels of an excluded client."""
        return ignored_labels(self.clients[client][1]) if self.samples is None else self.samples.about_ignored(client)

    def fingerprint(self) -> str:
        """Return a hash by which the same data are recognized: of all samples in memory, or of the number of samples
        and
        the first sample if they are read in batches."""
        digest = blake2b(digest_size=16)
        for own in (self.samples, self.test_samples):
            digest.update(b"" if own is None else own.digest())
        if self.store is not None:
            _add_store(digest, self.store)
        for pair in [*(self.clients if self.store is None else ()), *([self.test] if self.test else [])]:
            for tensor in pair:
                digest.update(_kind(tensor.dtype, tensor.shape))
                digest.update(_raw(tensor))
        if self.test_sizes is not None:
            digest.update(repr(list(self.test_sizes)).encode())
        return digest.hexdigest()


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return repr((dtype, tuple(shape))).encode()


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _add_store(digest: blake2b, store: PackedSamples) -> None:
    """Add to the digest what the clients' tensors would add one by one. Neighbouring clients of one size are added at
    once."""
    both = [(np.frombuffer(_raw(t), np.uint8), t[0].nbytes, t) for t in (store.x, store.y)]
    at = 0
    for n, alike in groupby(store.sizes):
        count = sum(1 for _ in alike)
        step = (store.offsets[at + 1] - store.offsets[at]) if count > 1 else n
        for first in range(at, at + count, _TOGETHER):
            some = min(_TOGETHER, at + count - first)
            parts = []
            for raw, row, t in both:
                kind = np.frombuffer(_kind(t.dtype, (n, *t.shape[1:])), np.uint8)
                own = as_strided(raw[store.offsets[first] * row :], (some, n * row), (step * row, 1), writeable=False)
                parts += [np.broadcast_to(kind, (some, len(kind))), own]
            digest.update(np.concatenate(parts, axis=1).data)
        at += count


def check_labels(population: Population, classes: int, ignored: int = IGNORED) -> None:
    """Raises ValueError for a label outside 0..classes-1 that is not `ignored` by the loss, and for a client of nothing
    but ignored labels.

    The test set must have none of them where a sample has one label: accuracies are of all its samples.
    """
    store = population.store
    # The padding between two clients holds zeros, which are labels too.
    good = store is not None and bool(((store.y >= 0) & (store.y < classes) & (store.y != ignored)).all())
    for i, y in enumerate(() if good else population.labels or ()):
        _check_range(y, f"client {i}", classes, ignored)
        if bool((y == ignored).all()):
            raise ValueError(
                f"client {i}: all labels are {ignored}, which the loss ignores; leave it out or give it labels"
            )
    labels = population.test_labels
    if labels is None:
        return
    _check_range(labels, "the test set", classes, ignored)
    if labels.dim() == 1 and bool((labels == ignored).any()):
        raise ValueError(f"the test set: labels are {ignored}, which the loss ignores; leave those samples out")


def _check_range(y: Tensor, who: str, classes: int, ignored: int) -> None:
    bad = y[((y < 0) | (y >= classes)) & (y != ignored)]
    if bad.numel():
        raise ValueError(
            f"{who}: labels must be in 0..{classes - 1} (the model has {classes} outputs), got {int(bad.flatten()[0])}"
        )


def ignored_labels(y: Tensor) -> str:
    """Return a note if a batch of the labels `y` may have only labels that torch's losses ignore. Its mean is NaN."""
    count = 0 if y.is_floating_point() else int((y == IGNORED).sum())
    if not count:
        return ""
    return f" ({count} of its {y.numel()} labels are {IGNORED}, and a batch of nothing else has no loss)"
