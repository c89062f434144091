"""Some of a bucket's parameters, as the operands of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastsam.arena import Layout
from fastsam.optim.exclusive import Exchange, pays
from fastsam.optim.sharded import local


class Selection:
    """Some of a bucket's parameters, as a call takes them; one object per set of slots, compared by identity."""

    def __init__(
        self,
        slots: tuple[int, ...],
        params: Sequence[Tensor],
        aliases: Sequence[Tensor],
        tensors: Sequence[Tensor],
        layout: Layout,
        exchanges: bool,
        backup_views: Callable[[Selection], list[Tensor]],
    ) -> None:
        """Args:
        slots: which of the bucket's parameters.
        params, aliases, tensors: all parameters of the bucket, the same detached, and dense.
        layout: of the bucket.
        exchanges: True if parameters may exchange their memory with gradients.
        backup_views: function of a selection that returns its views of the backup.
        """
        self.slots, self._params, self._backup_views = slots, params, backup_views
        self.table = layout.table if len(slots) == len(params) else layout.subtable(slots)
        self._tensors = [tensors[i] for i in slots]
        aliases = [aliases[i] for i in slots]
        # Parameters with gaps in memory, and the dense tensors that stand for them in `tensors`.
        self.indirect = [(alias, t) for alias, t in zip(aliases, self._tensors, strict=True) if alias is not t]
        self.raw_calls: Any = None  # the backend's shorter way to its kernels, once it was asked for
        self.raw_calls_saved: Any = None  # the same on the saved weights
        self.raw_calls_in_place: Any = None  # the same without saved weights
        self.along: list[Tensor] | None = None  # views of the vector that a variant of one pass perturbs along
        self.exchange: Exchange | None = None  # None: the parameters stay in their memory
        if exchanges and slots and pays(self._tensors):
            self.exchange = Exchange(params, slots, aliases)

    @cached_property
    def apart(self) -> list[Tensor]:
        """What `backup` has of these parameters: memory for their perturbed weights where their gradients' is not to be
        had."""
        return self._backup_views(self)

    @property
    def tensors(self) -> list[Tensor]:
        """The weights that a call reads and writes."""
        if torch.compiler.is_compiling() and not self.indirect:
            # Aliases made outside would be inputs of their own to a compiled step.
            return [local(self._params[i]).detach() for i in self.slots]
        return self._tensors

    def load(self) -> None:
        for parameter, stand_in in self.indirect:
            stand_in.copy_(parameter)

    def store(self) -> None:
        for parameter, stand_in in self.indirect:
            parameter.copy_(stand_in)
