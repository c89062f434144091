"""Some of a bucket's parameters, as the operands of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.arena import Layout
from fastsam.optim.sharded import to_local
from fastsam.optim.storage_swap import StorageSwap, worth_swapping


class Selection:
    """Some of a bucket's parameters as operands of a call: one object per set of slots, compared by identity."""

    def __init__(
        self,
        slots: tuple[int, ...],
        params: Sequence[Tensor],
        aliases: Sequence[Tensor],
        tensors: Sequence[Tensor],
        layout: Layout,
        can_swap: bool,
    ) -> None:
        """
        Args:
            slots: indices of the parameters in the bucket.
            params, aliases, tensors: all parameters of the bucket, the same detached, and dense.
            can_swap: True if parameters may get other memory for their perturbed weights.
        """
        self.slots, self._params = slots, params
        self.table = layout.table if len(slots) == len(params) else layout.subtable(slots)
        self._segments = [layout.segments[i] for i in slots]
        self._tensors = [tensors[i] for i in slots]
        aliases = [aliases[i] for i in slots]
        # Parameters with gaps in memory, and the dense tensors that stand for them in `tensors`.
        self.indirect = [(alias, t) for alias, t in zip(aliases, self._tensors, strict=True) if alias is not t]
        self.direct_calls: dict[Any, Any] = {}  # direct calls of the kernels, by target of the backup
        self._field_views: dict[Tensor, list[Tensor]] = {}  # views of the arena's fields
        self.swap: StorageSwap | None = None  # None: the parameters stay in their memory
        if can_swap and slots and worth_swapping(self._tensors):
            self.swap = StorageSwap(params, slots, aliases)

    def views(self, field: Tensor) -> list[Tensor]:
        """Return what a vector `[1, row_size]` has of these parameters."""
        # from the start of its memory on; a row's own `views` would ask, which no compiled step may
        return [field.as_strided(s.shape, s.stride, s.offset) for s in self._segments]

    def field_views(self, field: Tensor) -> list[Tensor]:
        """Return the same for a field of the arena, and the same list again."""
        if torch.compiler.is_compiling():  # views from outside would be additional inputs
            return self.views(field)
        if field not in self._field_views:
            self._field_views[field] = self.views(field)
        return self._field_views[field]

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
