"""Compression of the clients' deltas with error feedback (`compression=fed.TopK(share)`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Round
from fastsam.fed.common.checks import number
from fastsam.fed.common.option import NamedOptions, made_of, option
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.update.model_copy import Replica

DELTA = "delta"  # the upload that is compressed
ERROR = "compression error"  # the name of the error in a client's state
_INDEX_BYTES = 4  # size of the index of an element that is sent


@dataclass(frozen=True)
class TopK(NamedOptions):
    """Send only the largest elements of a delta, and add what was not sent to the client's next delta.

    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Algorithm 1, with the delta of the local
    steps in place of a gradient:

        v = delta + e,   sent = the k elements of v with the largest absolute values,   e <- v - sent

    Args:
        share: k in units of the number of parameters that a client sends, in (0, 1]; k is rounded up. Local parameters
            are never sent.
    """

    share: float = option(0.01, "share of the elements of a delta that a client sends")

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", number("share", self.share, greater_than=0, at_most=1))


def compression_of(value: TopK | Mapping[str, Any] | None) -> TopK | None:
    """Return the compression of a run, or None. Raises ValueError as `made_of` does."""
    return None if value is None else made_of(TopK, value, "compression")


class Compress(Stage):
    """Replace the deltas that are sent by their largest elements. The error is kept in the clients' states.

    Args:
        numel: number of parameters that a client sends.
        algorithm: name for messages.
    """

    def __init__(self, options: TopK, numel: int, algorithm: str) -> None:
        self.options, self.numel, self.algorithm = options, numel, algorithm
        self.k = math.ceil(options.share * numel)
        self._sends_whole_delta = False  # under another name, which is not compressed (FedDyn)

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Add the last error, keep the k largest elements of each row, and store the new error.

        Raises ValueError if the clients do not send a delta.
        """
        if DELTA not in uploads.mean:
            raise ValueError(
                f"compression=TopK(share={self.options.share:g}) needs clients that send their delta, but "
                f"finish of {self.algorithm} returned an Upload without mean[{DELTA!r}]. Name the delta so, or "
                "leave compression out"
            )
        delta, error = uploads.mean[DELTA], uploads.client.get(ERROR)
        self._sends_whole_delta = any(x is delta for x in uploads.sum.values())
        v = delta if error is None else delta + error
        values = largest(v, self.k)
        uploads.mean[DELTA], uploads.state[ERROR] = values, v - values

    def traffic(self, model: Replica) -> tuple[int, int]:
        """Return the bytes that are added to a client's download and upload: k elements more, a delta's values less."""
        itemsize = model.parameters[0].dtype.itemsize
        replaced = 0 if self._sends_whole_delta else self.numel * itemsize
        return 0, self.k * (itemsize + _INDEX_BYTES) - replaced


def largest(rows: Tensor, k: int) -> Tensor:
    """Return rows `[n, row_size]` with the k elements of each that have the largest absolute values, and zeros."""
    index = rows.abs().topk(min(k, rows.shape[1]), dim=1).indices
    return torch.zeros_like(rows).scatter_(1, index, rows.gather(1, index))
