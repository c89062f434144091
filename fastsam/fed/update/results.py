"""The results of the local steps of clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A row before one of its local steps: its unperturbed weights and, for a step with two back-propagations, that
    step's eps. `[row_size]`."""

    w: Tensor
    eps: Tensor | None = None


@dataclass(frozen=True)
class ClientResults:
    """The results of the local steps of n clients. The receiver may keep and change its tensors. A field that is None
    is None for all n clients.

    Attributes:
        client_ids: ids of the n clients.
        delta: `[n, row_size]`, `w_K - w^t`, or `w_K - start` with a `Step.start`, in the dtype of the weights.
        num_steps: number of local steps of each client, mostly `epochs * ceil(num_samples / batch_size)`.
        backward_passes: number of backward passes of each client, including passes before its first step.
        losses: `[n]` float64, the sums over the batches of (batch size) * (loss at the first gradient's weights).
        num_samples: number of samples in these batches.
        buffers: changes of the model's buffers, flat float64, `[n, ...]`.
        outputs: the outputs of the step (`Step.outputs`) by name: vectors `[n, row_size]`, numbers `[n, 1]`.
        squares: `[n]` float64, the squared norms of the deltas, or None if they are not computed yet.
        snapshots: copies of each client's row, by local step.
        extra: tensors `[n, ...]` that `Algorithm.train_client` returned, by name.
        start: `[n, row_size]`, weights at the start, or None if that is the global model. It is only read.
        optimizer_state: fields of the local optimizer at the end, by name, each `[n, ...]`, or None if the step has no
            `state`.
    """

    client_ids: Sequence[int]
    delta: Tensor
    num_steps: Sequence[int]
    backward_passes: Sequence[int]
    losses: Tensor
    num_samples: Sequence[int]
    buffers: Tensor | None = None
    squares: Tensor | None = None
    snapshots: Sequence[Mapping[int, Snapshot]] | None = None
    start: Tensor | None = None
    optimizer_state: Mapping[str, Tensor] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)

    def column(self, numbers: Iterable[float]) -> Tensor:
        """Return one number for each client as `[n, 1]`, in the dtype of the weights. It multiplies or divides the
        clients' rows."""
        rows = self.delta
        return torch.tensor(list(numbers), dtype=torch.float64).to(rows.device, rows.dtype)[:, None]

    def take(self, places: Sequence[int]) -> ClientResults:
        """Return the results of some clients, by their indices, in new memory."""

        def select(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.stack([value[i] for i in places])
            if isinstance(value, Mapping):
                return {name: select(x) for name, x in value.items()}
            return None if value is None else [value[i] for i in places]

        return ClientResults(**{f.name: select(getattr(self, f.name)) for f in fields(self)})
