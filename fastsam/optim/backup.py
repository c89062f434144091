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
from fastsam.optim.storage_swap import StorageSwap, grad_storage_reusable
from fastsam_kernels.constants import compute_dtype


class Target(Enum):
    """Memory of the weights that an update reads and writes."""

    RESTORED = "reads the backup and writes the parameters"
    PARAMS = "reads and writes the parameters"
    BACKUP = "reads and writes the backup; the perturbation that follows writes the parameters"


class CopyBackup:
    """Copy of the unperturbed weights in their dtype, which a perturbation makes."""

    is_master: ClassVar[bool] = False  # a float32 copy that counts in every phase
    can_swap: ClassVar[bool] = False  # parameters may get other memory for their perturbed weights

    def __init__(self, params: list[Tensor], dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        """params: the bucket's list itself, since another one would be another reference to each parameter."""
        self._params, self._dtype, self._arena, self._kernels = params, dtype, arena, kernels
        self._sharded = any(map(is_dtensor, params))
        self.target = Target.RESTORED
        self.needs_save = True  # the perturbation has to save the weights
        self._allocate()

    def _allocate(self) -> None:
        self._arena.field("backup", self._dtype)

    def follow(self, aliases: list[Tensor]) -> None:
        """Take over aliases of the parameters, which have other memory now."""
        self._aliases = aliases

    @property
    def weights(self) -> Tensor:
        """The backup of all parameters, `[1, row_size]`."""
        return self._arena.field("backup", self._dtype)

    @property
    def is_swapped(self) -> bool:
        """True while parameters have other memory."""
        return False

    # --- a step ---

    def begin_step(self, has_weights: bool = False) -> None:
        """Prepare for a perturbation. has_weights: the backup has the weights already."""
        self.target, self.needs_save = Target.RESTORED, not has_weights

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

    # --- other memory for perturbed weights (`SwapBackup`) ---

    def swap_back(self) -> None:
        """Give parameters their own memory back, unless they were moved elsewhere."""

    def swap_back_one(self, slot: int) -> bool:
        """Give one parameter its own memory back, for its update. Return False if the parameter was not swapped, or was
        moved."""
        return False

    # --- states ---

    def saved(self, selection: Selection) -> list[Tensor]:
        """Return the unperturbed weights of these parameters, or their master copies."""
        if self.target is Target.PARAMS and not self.is_master:
            return [self._aliases[i] for i in selection.slots]
        return selection.views(self.weights)

    def load(self, selection: Selection, weights: Tensor) -> None:
        """Take over the weights of one parameter from a saved state."""
        selection.views(self.weights)[0].copy_(weights)

    def versions(self) -> list[int]:
        """Return the version counters of the weights, which writes increment."""
        if self._sharded:  # torch's own writes count in the DTensor
            return [p._version + to_local(p)._version for p in self._params]
        return [p._version for p in self._params]


class MasterBackup(CopyBackup):
    """Float32 master copy of half-precision weights, which fused updates read and write."""

    is_master = True

    def __init__(
        self, params: list[Tensor], dtype: torch.dtype, arena: Arena, kernels: Kernels, trusting: bool
    ) -> None:
        """trusting: writes of the weights are seen by their version counters, so that no comparison with the masters is
        needed."""
        self._trusting = trusting
        self._versions: list[int] | None = None  # versions of the weights after the last update
        super().__init__(params, dtype, arena, kernels)

    def follow(self, aliases: list[Tensor]) -> None:
        super().follow(aliases)
        self._versions = None

    def begin_step(self, has_weights: bool = False) -> None:
        super().begin_step(has_weights)
        if self.needs_save and self._trusting and not torch.compiler.is_compiling():
            self.needs_save = self._versions != self.versions()

    def begin_update(self, target: Target) -> None:
        """Stay with the masters, which every update reads and writes."""

    def note_update(self) -> None:
        if self._trusting:
            self._versions = self.versions()


class SwapBackup(CopyBackup):
    """Unperturbed weights in the parameters' own memory, while perturbed weights use the memory of the first gradients,
    or a spare field."""

    can_swap = True
    _swap: StorageSwap | None = None

    def _allocate(self) -> None:
        """Allocate nothing: a step that swaps may never need a copy."""

    @property
    def is_swapped(self) -> bool:
        return self._swap is not None

    def begin_step(self, has_weights: bool = False) -> None:
        super().begin_step(has_weights)
        self._swap = None

    def swap(self, selection: Selection, grads: Sequence[Tensor], donate: bool) -> None:
        """Choose the memory of the perturbed weights: the gradients' memory, if the caller clears the gradients next
        (`donate`) and nothing else refers to it."""
        assert selection.swap is not None
        donated = donate and grad_storage_reusable(self._params, selection.slots, grads)
        selection.swap.set_targets(grads if donated else selection.views(self.weights), donated)
        self._swap = selection.swap

    def perturbed(self) -> list[Tensor]:
        """Return the memory that `swap` chose."""
        assert self._swap is not None
        return self._swap.targets

    def swap_in(self) -> None:
        """Give the parameters the memory of their perturbed weights."""
        assert self._swap is not None
        self._swap.swap_in()

    def swap_back(self) -> None:
        if self._swap is not None:
            self._swap.swap_back()
            self._swap = None

    def swap_back_one(self, slot: int) -> bool:
        return self._swap is not None and self._swap.swap_back_one(slot)


def make_backup(
    params: list[Tensor], dtype: torch.dtype, fused: bool, exclusive: bool, arena: Arena, kernels: Kernels
) -> CopyBackup:
    """Return the backup of parameters of this dtype.

    `fused` is True if the update is a kernel, and `exclusive` if nothing else refers to the memory of the parameters
    during a step (`assume_no_alias`).
    """
    compute = compute_dtype(dtype)
    if fused and dtype != compute:
        return MasterBackup(params, compute, arena, kernels, exclusive)
    return (SwapBackup if exclusive else CopyBackup)(params, dtype, arena, kernels)
