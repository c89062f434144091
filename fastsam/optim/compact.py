"""A compact master copy of bfloat16 weights: the weight itself and 16 bits of correction, instead of 32 bits beside it.

    low = min(bits(w) - (bits(z) << 16), 2^15 - 1)        w the float32 master, z its rounding to nearest even: the
    weight, in bfloat16 w   = the float32 number of the bits (bits(z) << 16) + low

Neighbours in bfloat16 are 2^16 places apart in float32, so a master is at most 2^15 places from its rounding. 16 bits
count from -2^15 to 2^15 - 1: one place is missing, the tie on the outer side of an even z, and a master there becomes
its neighbour towards zero.

Kernels see float32 masters as ever, of a stretch of a parameter at a time, in memory that all stretches share. Between
the two passes, when the weights are elsewhere, `origin` has them: 2 bytes each, which go with the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.bucket import Bucket
from fastsam.optim.mixing import silent
from fastsam.optim.rules import op_calls, rule_of
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import is_sharded
from fastsam.optim.update import FusedUpdate, Part
from fastsam.optim.variants.sam import SAM, Ahead

LOW = "low_bits"
MOST = 2**15 - 1
# Elements of a stretch: at most, so that little is converted at a time, and for each thread of a CPU, so that it stays
# in its cache.
LONGEST, FOR_A_THREAD = 2**22, 2**18
ADAPTIVE = "adaptive=True, whose norm reads all masters at once"


def asked(master: str, momentum_dtype: torch.dtype | None) -> torch.dtype | None:
    """The momenta's dtype beside compact masters; None where these are not asked for. Raises ValueError for what is no
    such option."""
    if master not in ("full", "compact"):
        raise ValueError(f"master must be 'full' or 'compact', got {master!r}")
    if momentum_dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"momentum_dtype must be torch.float32 or torch.bfloat16, got {momentum_dtype!r}")
    if master == "full" and momentum_dtype is not None:
        raise ValueError("momentum_dtype goes with master='compact'; give both, or leave it out")
    return None if master == "full" else momentum_dtype or torch.float32


def refuse(variant: SAM, plain: bool, stochastic_rounding: bool, exclusive: bool) -> None:
    """Raises ValueError for what compact masters do not serve. plain: the variant does what SAM does, in every step."""
    problem = None
    if stochastic_rounding:
        problem = "stochastic_rounding=True, whose bits depend on a weight's place among all"
    elif exclusive:
        problem = "exclusive=True: there is no comparison that it could spare"
    elif not plain or variant.ahead is not Ahead.NONE:
        problem = f"{variant}: it serves SAM alone, with rho for its radius, in every step"
    elif variant.adaptive:
        problem = ADAPTIVE
    if problem is not None:
        raise ValueError(f"master='compact' with {problem}; leave one of them out")


def check(base: Optimizer, params: Sequence[Tensor]) -> None:
    """Raises ValueError for a base optimizer and for parameters that compact masters do not serve."""
    if (rule := rule_of(base)) is None or rule.name != "sgd":
        raise ValueError(f"master='compact' serves torch.optim.SGD, got {type(base).__name__}; leave it out")
    for number, p in enumerate(params):
        if is_sharded(p) or p.dtype != torch.bfloat16:
            found = "a DTensor" if is_sharded(p) else p.dtype
            raise ValueError(f"master='compact' serves bfloat16, and parameter {number} is {found}; leave it out")


class Stretch(NamedTuple):
    """Elements of one parameter that are worked on in one go."""

    which: int  # of the selection's tensors
    start: int  # the first of them, in the tensor's own order
    at: int  # where that is in the flat index space
    table: Tensor
    z: Tensor

    def of(self, field: Tensor) -> Tensor:
        """What a field of one row has of them."""
        return field[0, self.at : self.at + len(self.z)]

    def cut(self, tensors: Sequence[Tensor]) -> Tensor:
        """What tensors, one per parameter of the selection, have of them."""
        return _flat(tensors[self.which], self.start, len(self.z))


class CompactBucket(Bucket):
    """`origin` is there from a perturbation to the update, and has the weights as they were, in their own dtype."""

    def __init__(self, *operands: Any, momentum: torch.dtype) -> None:
        self._momentum = momentum
        self._origin: Tensor | None = None
        super().__init__(*operands)
        size = FOR_A_THREAD * torch.get_num_threads() if self.device.type == "cpu" else LONGEST
        self._size = min(size, LONGEST, self.layout.stride)
        self._scratch = torch.empty(3, self._size, dtype=self.compute, device=self.device)

    @property
    def origin(self) -> Tensor:
        """`[1, stride]`: the saved weights."""
        if self._origin is None:
            self._origin = torch.empty(1, self.layout.stride, dtype=self.dtype, device=self.device)
        return self._origin

    @property
    def low(self) -> Tensor:
        """int16 `[1, stride]`: the corrections."""
        return self.arena.field(LOW, torch.int16)

    def field(self, name: str) -> Tensor:
        """See `Bucket.field`; momenta have a dtype of their own."""
        return self.arena.field(name, self._momentum)

    def _begin_masters(self) -> None:
        """Masters that are the weights: corrections of zero, which they are at first."""

    def _attach(self) -> None:
        super()._attach()
        self._stretches: dict[Selection, list[Stretch]] = {}
        self._saved: list[Stretch] = []  # in this step, before they were written

    def stretches(self, selection: Selection) -> list[Stretch]:
        """These parameters, cut."""
        if selection not in self._stretches:
            found = []
            for which, (offset, length, group, slot) in enumerate(selection.table.tolist()):
                for start in range(0, length, self._size):
                    size = min(self._size, length - start)
                    table = torch.tensor([[0, size, group, slot]], dtype=torch.int64, device="cpu")
                    z = _flat(selection.z[which], start, size)
                    found.append(Stretch(which, start, offset + start, table, z))
            self._stretches[selection] = found  # all of them, where an interrupt comes
        return self._stretches[selection]

    def scratch(self, stretch: Stretch) -> tuple[Tensor, ...]:
        """Room for three fields of a stretch, in float32: masters, what is compared with them, momenta."""
        return self._scratch[:, : len(stretch.z)].unbind()

    def raw_calls(self, selection: Selection) -> None:
        """None: there is no field of masters that they could be made for."""

    # --- the calls ---

    def begin(self, saved: bool = False) -> None:
        """See `Bucket.begin`."""
        super().begin(saved)
        self._saved = []

    def norm_(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        sumsq: Tensor,
        adaptive: bool,
        accumulate: bool,
        onward: bool = False,
    ) -> None:
        """See `Bucket.norm_`. Raises ValueError for adaptive groups."""
        if adaptive:
            raise ValueError(f"master='compact' with {ADAPTIVE}; leave one of them out")
        super().norm_(selection, grads, sumsq, adaptive, accumulate, onward)

    def perturb_(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None = None
    ) -> None:
        """See `Bucket.perturb_`."""
        selection.load()
        for stretch in self.stretches(selection):
            w = self.scratch(stretch)[0]
            self._save_(stretch)
            for call in joining(w, stretch.of(self.origin), stretch.of(self.low)):
                call()
            g = stretch.cut(grads)
            self.kernels.perturb_([stretch.z], w[None], [g], stretch.table, self.hyper, sumsq, False)
        selection.store()
        self.held = selection

    def save_(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """See `Bucket.save_`."""
        selection.load()
        for stretch in self.stretches(selection):
            self._save_(stretch)

    def _save_(self, stretch: Stretch) -> None:
        high = stretch.of(self.origin).copy_(stretch.z)
        self._saved.append(stretch)
        settle_(stretch.of(self.low), high)

    def unperturb_(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None = None
    ) -> None:
        """See `Bucket.unperturb_`."""
        for stretch in self._saved:
            stretch.z.copy_(stretch.of(self.origin))
        if self._saved:
            selection.store()
        self.held = self.select(())

    def note_versions(self) -> None:
        """After an update: nothing is saved."""
        self._origin = None

    # --- masters, whole ---

    def saved(self, slot: int, perturbed: bool) -> Tensor:
        """See `Bucket.saved`."""
        held = perturbed and slot in self.held.slots
        high, low = self._one(self.origin, slot) if held else self.aliases[slot], self._one(self.low, slot).clone()
        settle_(low, high)
        w = torch.empty_like(low, dtype=self.compute)
        for call in joining(w, high, low):
            call()
        return w

    def take_(self, slot: int, weights: Tensor, perturbed: bool) -> None:
        """See `Bucket.take_`. A parameter that is not their rounding, because somebody wrote it, has a master of its
        own value."""
        low = self._one(self.low, slot)
        w, rounded = torch.empty_like(low, dtype=self.compute).copy_(weights), self.aliases[slot]
        if perturbed:
            rounded = self._one(self.origin, slot).copy_(w)
        apart = w.view(torch.int32) - torch.empty_like(w).copy_(rounded).view(torch.int32)
        low.copy_(torch.where(apart.abs() <= MOST + 1, apart.clamp_max(MOST), 0))


class CompactUpdate(FusedUpdate):
    """The update, stretch by stretch."""

    bucket: CompactBucket

    def _calls(
        self,
        part: Part,
        grads: Sequence[Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        g1: Sequence[Tensor] | None,
    ) -> list[partial[Any]]:
        bucket, calls = self.bucket, list[partial[Any]]()
        options = {"steps": None, "g1": g1, "grad_scale": grad_scale, "found_inf": found_inf, "first": part.first}
        momenta = bucket.field(part.kind.fields[0]) if part.kind.fields else None
        for stretch in bucket.stretches(part.selection):
            w, other, m = bucket.scratch(stretch)
            low, kept = stretch.of(bucket.low), None if momenta is None else stretch.of(momenta)
            state = m if kept is not None and kept.dtype != m.dtype else kept
            operands = [stretch.z], w[None], [stretch.cut(grads)], stretch.table, bucket.hyper, self.rule.name
            calls += joining(w, stretch.of(bucket.origin), low)
            calls += [silent(m.copy_, kept)] if state is m else []
            calls += op_calls(bucket, (*operands, [None if state is None else state[None]]), {**options, "keep": True})
            calls += splitting(low, w, stretch.z, other)
            calls += [silent(kept.copy_, m)] if state is m and kept is not None else []
        return calls

    def _written(self) -> dict[str, Tensor]:
        bucket = self.bucket
        return {LOW: bucket.low, **{name: bucket.field(name) for name in self.rule.state if name in bucket.arena}}


def joining(w: Tensor, high: Tensor, low: Tensor) -> list[partial[Any]]:
    """Calls that make masters of weights and corrections."""
    return [silent(w.copy_, high), silent(w.view(torch.int32).add_, low)]


def splitting(low: Tensor, w: Tensor, z: Tensor, other: Tensor) -> list[partial[Any]]:
    """Calls that make corrections of masters and weights, their roundings. Masters are lost; `other` is room for as
    many."""
    apart = w.view(torch.int32)
    calls = [silent(other.copy_, z), silent(apart.sub_, other.view(torch.int32))]
    return [*calls, silent(apart.clamp_max_, MOST), silent(low.copy_, apart)]


def settle_(low: Tensor, high: Tensor) -> None:
    """Corrections for weights that somebody may have written. With any weight they give a number that is at most half a
    place from it, but for zeros, which have no places on an inner side: there the correction becomes 0."""
    least = high.view(torch.int16).bitwise_and(MOST).clamp_max_(1).mul_(-MOST - 1)  # 0 for zeros, else -2^15
    torch.maximum(low, least, out=low)


def _flat(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset() + start)
