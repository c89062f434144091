"""Backups: where the unperturbed weights of a bucket are while its parameters are perturbed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

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
    PARAMS = "reads and writes the parameters' own memory, which was not perturbed, or was swapped out meanwhile"
    BACKUP = "reads and writes the backup; the perturbation that follows writes the parameters"


class WeightState(Enum):
    """The state of the weights. A step that does not perturb has the same states, and its weights never move."""

    ORIGINAL = "the user's own"
    PERTURBING = "on their way to the perturbed point; each parameter may or may not be there"
    PERTURBED = "at the perturbed point; the originals are saved"


class Backup:
    """The unperturbed weights of a bucket while its parameters are perturbed.

    It is a copy in the weights' dtype, which the perturbation makes, or a master copy (`is_master`): the float32 copy
    of half-precision weights, which counts in every phase, and which fused updates read and write. If parameters may
    have other memory for their perturbed weights (`can_swap`), the unperturbed weights may stay in the parameters' own
    memory. A copy is then allocated when it is needed.
    """

    def __init__(
        self,
        params: list[Tensor],
        aliases: list[Tensor],
        dtype: torch.dtype,
        arena: Arena,
        kernels: Kernels,
        exclusive: bool,
    ) -> None:
        """
        Args:
            params: the bucket's list itself, since another one would be another reference to each parameter.
            aliases: the same parameters, detached.
            dtype: dtype of the backup, float32 for a master copy.
            arena: arena in which the backup is a field.
            kernels: kernels of the bucket.
            exclusive: nothing else refers to the memory of the weights, so that it can be swapped, and so that version
                counters show if the weights differ from a master copy.
        """
        self._params, self._aliases, self._dtype, self._arena, self._kernels = params, aliases, dtype, arena, kernels
        self._has_dtensors = any(map(is_dtensor, params))
        self.is_master = dtype != params[0].dtype
        self.can_swap = exclusive and not self.is_master
        self.active_swap: StorageSwap | None = None  # parameters that have other memory in this step
        self.target = Target.RESTORED
        self.needs_save = True  # the perturbation has to save the weights
        self._notes_versions = exclusive and self.is_master
        self._versions: list[int] | None = None  # versions of the weights after the last update
        if self.is_master:
            arena.layout.gather(aliases, self.weights[0])
        elif not exclusive:
            arena.field("backup", dtype)

    @property
    def weights(self) -> Tensor:
        """The backup of all parameters, `[1, row_size]`."""
        return self._arena.field("backup", self._dtype)

    # --- a step ---

    def begin_step(self, has_weights: bool = False) -> None:
        """Prepare for a perturbation. With `has_weights` the backup has the weights already."""
        self.target, self.needs_save, self.active_swap = Target.RESTORED, not has_weights, None
        if self._notes_versions and self.needs_save and not torch.compiler.is_compiling():
            self.needs_save = self._versions != self.versions()

    def begin_update(self, target: Target) -> None:
        """Prepare for an update that is not made from the backup into the parameters. With a master copy nothing
        changes, because every update reads and writes it."""
        if not self.is_master:
            self.target = target

    def operands(self, selection: Selection) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return the operands `params` and `backup` of an update."""
        if self.target is Target.BACKUP:
            return selection.views(self.weights), None
        return selection.tensors, self.weights if self.target is Target.RESTORED else None

    def note_update(self) -> None:
        """Note that an update was made."""
        if self._notes_versions:
            self._versions = self.versions()

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
        if self.target is Target.PARAMS:
            return [self._aliases[i] for i in selection.slots]
        return selection.views(self.weights)

    def versions(self) -> list[int]:
        """Return the version counters of the weights, which writes increment."""
        if self._has_dtensors:  # torch's own writes count in the DTensor
            return [p._version + to_local(p)._version for p in self._params]
        return [p._version for p in self._params]
