"""Backups: where the unperturbed weights of a bucket are while its parameters are perturbed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.arena import Arena
from fastsam.backends import Kernels
from fastsam.optim.parameters import has_memory
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import is_dtensor, to_local
from fastsam.optim.storage_swap import StorageSwap


class Target(Enum):
    """Memory of the weights that an update reads and writes."""

    RESTORED = "reads the backup and writes the parameters"
    PARAMS = "reads and writes the parameters"
    BACKUP = "reads and writes the backup; the perturbation that follows writes the parameters"


class CopyBackup:
    """Copy of the unperturbed weights in their dtype, which a perturbation makes.

    If parameters may have other memory for their perturbed weights (`can_swap`), the unperturbed weights may stay in
    the parameters' own memory. A copy is then allocated when it is needed.
    """

    is_master: ClassVar[bool] = False  # a float32 copy that counts in every phase

    def __init__(
        self,
        params: list[Tensor],
        aliases: list[Tensor],
        dtype: torch.dtype,
        arena: Arena,
        kernels: Kernels,
        can_swap: bool,
    ) -> None:
        """params: the bucket's list itself, since another one would be another reference to each parameter."""
        self._params, self._aliases, self._dtype, self._arena, self._kernels = params, aliases, dtype, arena, kernels
        self._has_dtensors = any(map(is_dtensor, params))
        self.can_swap = can_swap
        self.active_swap: StorageSwap | None = None  # parameters that have other memory in this step
        self.target = Target.RESTORED
        self.needs_save = True  # the perturbation has to save the weights
        if not can_swap:
            arena.field("backup", dtype)

    @property
    def weights(self) -> Tensor:
        """The backup of all parameters, `[1, row_size]`."""
        return self._arena.field("backup", self._dtype)

    # --- a step ---

    def begin_step(self, has_weights: bool = False) -> None:
        """Prepare for a perturbation. has_weights: the backup has the weights already."""
        self.target, self.needs_save, self.active_swap = Target.RESTORED, not has_weights, None

    def begin_update(self, target: Target) -> None:
        """Prepare for an update that is not made from the backup into the parameters."""
        self.target = target

    def operands(self, selection: Selection) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return the operands `params` and `backup` of an update."""
        if self.target is Target.BACKUP:
            return selection.views(self.weights), None
        return selection.tensors, self.weights if self.target is Target.RESTORED else None

    def note_update(self) -> None:
        """Note that an update was made."""

    def restore(self, selection: Selection) -> None:
        """Put the unperturbed weights back, bit for bit."""
        if self.target is Target.PARAMS:
            self.swap_back()
        elif selection.slots:
            self._kernels.restore_(selection.tensors, self.weights, selection.table)
            selection.store()

    def restore_fitting(self, selection: Selection) -> None:
        """Restore the parameters of the selection whose shape and memory did not change."""
        if self.target is Target.PARAMS:
            self.swap_back()
            return
        for i, weights in zip(selection.slots, selection.views(self.weights), strict=True):
            p = to_local(self._params[i]).detach()
            if p.shape == weights.shape and has_memory(p):
                p.copy_(weights)

    def swap_back(self) -> None:
        """Give parameters their own memory back, unless they were moved elsewhere."""
        if self.active_swap is not None:
            self.active_swap.swap_back()
            self.active_swap = None

    # --- states ---

    def unperturbed_weights(self, selection: Selection) -> list[Tensor]:
        """Return the unperturbed weights of these parameters, or their master copies."""
        if self.target is Target.PARAMS and not self.is_master:
            return [self._aliases[i] for i in selection.slots]
        return selection.views(self.weights)

    def versions(self) -> list[int]:
        """Return the version counters of the weights, which writes increment."""
        if self._has_dtensors:  # torch's own writes count in the DTensor
            return [p._version + to_local(p)._version for p in self._params]
        return [p._version for p in self._params]


class MasterBackup(CopyBackup):
    """Float32 master copy of half-precision weights, which fused updates read and write."""

    is_master = True

    def __init__(
        self,
        params: list[Tensor],
        aliases: list[Tensor],
        dtype: torch.dtype,
        arena: Arena,
        kernels: Kernels,
        trusts_versions: bool,
    ) -> None:
        """trusts_versions: writes of the weights are seen by their version counters, so that no comparison with the
        masters is needed."""
        super().__init__(params, aliases, dtype, arena, kernels, can_swap=False)
        self._trusts_versions = trusts_versions
        self._versions: list[int] | None = None  # versions of the weights after the last update
        arena.layout.gather(aliases, self.weights[0])

    def begin_step(self, has_weights: bool = False) -> None:
        super().begin_step(has_weights)
        if self.needs_save and self._trusts_versions and not torch.compiler.is_compiling():
            self.needs_save = self._versions != self.versions()

    def begin_update(self, target: Target) -> None:
        """Stay with the masters, which every update reads and writes."""

    def note_update(self) -> None:
        if self._trusts_versions:
            self._versions = self.versions()
