"""The clients' data and the test set, as training reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.clients.all_clients import Clients, hash_pair
from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.samples import IGNORED, ClientDataset, PairSamples

Loss = Callable[[Tensor, Tensor], Tensor]  # loss of outputs and labels
# (x [n, ...], generator) -> x' of the same shape, type and device; x is left as it is.
Augment = Callable[[Tensor, torch.Generator], Tensor]


def apply_augment(augment: Augment, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the augmented batch. Raises ValueError if it does not have the shape and dtype of `x`."""
    new = augment(x, generator)
    if not isinstance(new, Tensor) or (new.dtype, new.shape, new.device) != (x.dtype, x.shape, x.device):
        kind = f"{new.dtype} {list(new.shape)} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
        raise ValueError(
            f"augment must return a batch with the shape and dtype of its input, {x.dtype} {list(x.shape)}, got {kind}"
        )
    return new


@dataclass(frozen=True)
class Population:
    """All clients and the test set, on one device.

    Attributes:
        priors: class distribution `[clients, classes]` of each client, if the split has it.
        augment: makes training inputs from stored ones, or None.
        test_sizes: number of test samples of each client, in order, if clients have separate test sets.
    """

    clients: Clients
    device: torch.device
    test: ClientDataset | None = None
    classes: int | None = None
    priors: np.ndarray | None = None
    augment: Augment | None = None
    test_sizes: Sequence[int] | None = None

    @property
    def test_labels(self) -> Tensor | None:
        """y of the test set, or None if there is none or if it is only in batches."""
        return None if self.test is None else self.test.labels

    @property
    def test_size(self) -> int:
        """Number of samples of the test set, 0 without one."""
        return 0 if self.test is None else len(self.test)

    @property
    def batch_reason(self) -> str:
        """The reason why samples come in batches and not as pairs of tensors, or "" if they are pairs."""
        why = "clients' samples are no pairs of tensors of one shape with a loss of outputs and labels"
        return f"{why}: they come batch by batch" if self.clients.is_batched else ""

    def largest_client(self) -> int:
        """Return the client with most samples, the first one of several."""
        sizes = self.clients.known_sizes
        return max(sizes, key=lambda i: (sizes[i], -i)) if sizes else 0

    def loss_of(self, loss: Loss | BatchLoss) -> Loss | BatchLoss:
        """Return the loss as steps take it: of a batch if samples come in batches."""
        return PairLoss(loss) if self.clients.is_batched and not isinstance(loss, BatchLoss) else loss

    def fingerprint(self) -> str:
        """Return a hash by which the same data are recognized: of all samples in memory, or of the number of samples
        and the first sample if they are read in batches."""
        digest = blake2b(digest_size=16)
        self.clients.hash(digest)
        if isinstance(self.test, PairSamples):
            hash_pair(digest, self.test.tree)
        elif self.test is not None:
            digest.update(self.test.digest())
        if self.test_sizes is not None:
            digest.update(repr(list(self.test_sizes)).encode())
        return digest.hexdigest()


def check_labels(population: Population, classes: int, ignore_index: int = IGNORED) -> None:
    """Raise ValueError for a label outside 0..classes-1 other than `ignore_index`, and for a client or a test set that
    has only ignored labels."""
    joint = population.clients.labels_together()
    good = joint is not None and bool(((joint[0] >= 0) & (joint[0] < classes) & (joint[0] != ignore_index)).all())
    for i, y in enumerate(() if good else population.clients.labels or ()):
        _check_range(y, f"client {i}", classes, ignore_index)
        if bool((y == ignore_index).all()):
            raise ValueError(
                f"client {i}: all labels are {ignore_index}, which the loss ignores; leave it out or give it labels"
            )
    labels = population.test_labels
    if labels is None:
        return
    _check_range(labels, "the test set", classes, ignore_index)
    if bool((labels == ignore_index).all()):
        raise ValueError(
            f"the test set: all labels are {ignore_index}, which the loss ignores; leave it out or give it labels"
        )


def _check_range(y: Tensor, label: str, classes: int, ignore_index: int) -> None:
    bad = y[((y < 0) | (y >= classes)) & (y != ignore_index)]
    if bad.numel():
        raise ValueError(
            f"{label}: labels must be in 0..{classes - 1} (the model has {classes} outputs), got "
            f"{int(bad.flatten()[0])}"
        )
