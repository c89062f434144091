"""The two passes of an optimizer's step in Triton, prepared once. They launch the kernels of the ops: the same bits.

A step whose gradients have the addresses of the last step's makes three launches and compares addresses, nothing else.
New addresses are uploaded, once per pass. Callers must have checked their operands, see `direct_calls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .rule import UpdateOptions
from .triton_chunks import Operand
from .triton_common import INTERPRETED
from .triton_launch import avoids_triton
from .triton_norm import norm_call
from .triton_op import Call, compute_type, increment_version
from .triton_perturb import perturb_call
from .triton_tables import DTYPES, Addresses, addresses_of, are_aligned, chunk_table_of, pack, place_of, upload_words
from .triton_update import update_call, update_operands

_address = torch.Tensor.data_ptr


class GradientTable:
    """The addresses of a pass's gradients on the device. They are overwritten if the gradients move.

    Launches that read the older addresses come before in stream order: they belong to earlier passes over the same
    weights.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        table = torch.zeros(2, len(params), dtype=torch.int64, device=params[0].device)  # addresses, strides of rows
        self._addresses, self._operand = table[0], Operand(table, 0, DTYPES[params[0].dtype])
        self._last: list[int] = []
        self.is_aligned = False

    def set(self, grads: Sequence[Tensor]) -> None:
        """Store the addresses of the gradients. Raises FreedError if a gradient has no memory."""
        addresses = addresses_of(grads)
        if addresses != self._last:
            self._last = []  # for an interrupt before the upload
            words = pack(addresses)
            self.is_aligned = are_aligned(words)
            upload_words(words, self._addresses)
            self._last = addresses

    @property
    def addresses(self) -> Addresses:
        """The operand of a call. It is valid while `is_aligned` stays the same."""
        return Addresses(self._operand, self.is_aligned)


class TritonCalls:
    """The two passes of a step on operands that were checked once. It has the methods of `direct_calls.DirectCalls`.

    Memory is allocated in the first pass, which is not in a graph's capture (`is_watched`).
    """

    REPEATS = True  # the calls of an update can be repeated with other gradients

    def __init__(self, params: Sequence[Tensor], backup: Tensor, table: Tensor, hparams: Tensor) -> None:
        """See `direct_calls.DirectCalls`."""
        self._params, self._backup, self._table, self._hparams = params, backup, table, hparams
        self._device, self._compute = hparams.device, compute_type(params)
        self._perturb_key: tuple[Any, ...] = ()  # all on which the launches of a perturbation depend
        self._update_key: tuple[Any, ...] = ()
        self._perturb_launches: list[partial[None]] = []
        self._update_launches: list[partial[None]] = []
        self._refs: dict[str, Any] = {}  # keeps the memory allocated that the launches read and write

    @cached_property
    def _first_grads(self) -> GradientTable:
        return GradientTable(self._params)

    @cached_property
    def _second_grads(self) -> GradientTable:
        return GradientTable(self._params)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Memory of the norm: a partial sum of each chunk, and a ticket."""
        chunks = chunk_table_of(self._table, place_of(self._device)).n_chunks
        partials = torch.empty(chunks, dtype=torch.float64, device=self._device)
        return partials, torch.zeros(1, dtype=torch.int32, device=self._device)

    def is_watched(self) -> bool:
        """Return True if the ops have to be called: in a graph's capture, whose tables must never be overwritten, on
        another device than the current one, and if Triton's own function launches."""
        return not INTERPRETED and (not avoids_triton(self._device) or place_of(self._device).is_capturing)

    def norm_perturb_(self, grads: Sequence[Tensor], sumsq: Tensor, adaptive: bool, save: bool = True) -> None:
        """See `direct_calls.DirectCalls.norm_perturb_`."""
        self._first_grads.set(grads)
        key = _address(sumsq), adaptive, save, self._first_grads.is_aligned, place_of(self._device).stream
        if key != self._perturb_key:
            self._perturb_key = ()  # for an interrupt in the next line
            self._perturb_launches = self._make_perturb_launches(sumsq, adaptive, save)
            self._perturb_key = key
        for launch in self._perturb_launches:
            launch()
        increment_version(self._params)

    def _make_perturb_launches(self, sumsq: Tensor, adaptive: bool, save: bool) -> list[partial[None]]:
        addresses, operands = self._first_grads.addresses, (self._table, 1, self._device, self._hparams)
        norm = Call(*operands, grads=addresses, weights=self._params if adaptive else None)
        perturbation = Call(*operands, weights=self._params, grads=addresses, backup=self._backup)
        self._refs["perturb"] = norm, perturbation
        return [
            norm_call(norm, sumsq, *self._sums, self._compute),
            perturb_call(perturbation, sumsq, save, self._compute),
        ]

    def update(
        self, rule: str, state: Sequence[Tensor | None], grads: Sequence[Tensor], in_place: bool = False, **options: Any
    ) -> list[partial[None]]:
        """See `direct_calls.DirectCalls.update`."""
        self._update_launches = []  # for an interrupt before the last line
        self._second_grads.set(grads)
        addresses, x = self._second_grads.addresses, UpdateOptions(**options)
        operands = update_operands(self._params, None if in_place else self._backup, addresses, state, x)
        call = self._refs["update"] = Call(self._table, 1, self._device, self._hparams, **operands)
        launch = update_call(call, rule, state, x, self._compute)
        self._update_key = self._second_grads.is_aligned, place_of(self._device).stream
        self._update_launches = [launch, partial(increment_version, self._params)]
        return self._update_launches

    def renew(self, calls: list[partial[None]], grads: Sequence[Tensor]) -> bool:
        """See `direct_calls.DirectCalls.renew`."""
        if calls is not self._update_launches:
            return False
        self._second_grads.set(grads)
        return self._update_key == (self._second_grads.is_aligned, place_of(self._device).stream)


def direct_calls(params: Sequence[Tensor], backup: Tensor | None, table: Tensor, hparams: Tensor) -> TritonCalls | None:
    """Return the two passes of a step on these operands, or None if they need the ops: without a backup, or without
    an element."""
    if backup is None or not any(w.numel() for w in params):
        return None
    return TritonCalls(params, backup, table, hparams)
