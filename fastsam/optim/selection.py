"""Some of a bucket's parameters, as the operands of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastsam.optim.sharded import to_local
from fastsam.optim.storage_swap import StorageSwap, worth_swapping

if TYPE_CHECKING:
    from fastsam.optim.bucket import Bucket


class Selection:
    """Some of a bucket's parameters as operands of a call: one object per set of slots, compared by identity."""

    def __init__(self, bucket: Bucket, slots: tuple[int, ...]) -> None:
        """Select the parameters with the indices `slots`. The bucket is not kept, because it keeps its selections."""
        self.slots, self._params = slots, bucket.params
        layout = bucket.layout
        self.table = layout.table if len(slots) == len(bucket.params) else layout.subtable(slots)
        self._segments = [layout.segments[i] for i in slots]
        self._tensors = [bucket.tensors[i] for i in slots]
        aliases = [bucket.aliases[i] for i in slots]
        # Parameters with gaps in memory, and the dense tensors that stand for them in `tensors`.
        self.indirect = [(alias, t) for alias, t in zip(aliases, self._tensors, strict=True) if alias is not t]
        self.direct_calls: dict[Any, Any] = {}  # direct calls of the kernels, by target of the backup
        # views of the vector along which a variant of one pass perturbs
        self.direction_views: list[Tensor] | None = None
        self.swap: StorageSwap | None = None  # None: the parameters stay in their memory
        if bucket.backup.can_swap and slots and worth_swapping(self._tensors):
            self.swap = StorageSwap(bucket.params, slots, aliases)

    def views(self, field: Tensor) -> list[Tensor]:
        """Return what a field of one row has of these parameters."""
        # from the start of its memory on; a row's own `views` would ask, which no compiled step may
        return [field.as_strided(s.shape, s.stride, s.offset) for s in self._segments]

    @property
    def tensors(self) -> list[Tensor]:
        """The weights that a call reads and writes."""
        if torch.compiler.is_compiling() and not self.indirect:
            # Aliases from outside would be additional inputs of a compiled step.
            return [to_local(self._params[i]).detach() for i in self.slots]
        return self._tensors

    def load(self) -> None:
        for parameter, stand_in in self.indirect:
            stand_in.copy_(parameter)

    def store(self) -> None:
        for parameter, stand_in in self.indirect:
            parameter.copy_(stand_in)
