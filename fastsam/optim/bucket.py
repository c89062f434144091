"""The parameters of one dtype: where they lie in the flat index space, what is saved of them, and the kernels' calls on
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.arena import Arena, Layout, is_dense
from fastsam.backends import Kernels
from fastsam.ops import bind
from fastsam.optim.exclusive import Exchange, lendable
from fastsam.optim.gradients import present
from fastsam.optim.parameters import has_memory
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import Axes, axes_of, gradient_of, is_sharded, local
from fastsam_kernels.conventions import compute_dtype

FIRST, MEMORY, NEXT = "first_gradient", "sam_memory", "sam_memory_next"  # fields, and keys of saved states
GRADIENT, ROUNDED = "gathered_gradient", "rounded_direction"

_is_contiguous = torch.Tensor.is_contiguous


class Bucket:
    """Slots are counted in the order of the parameters; `numbers` are the parameters' numbers over all buckets, for
    messages.

    `backup` keeps the unperturbed weights of the parameters `held`. With `masters` (half-precision weights, fused
    update) it is their float32 master copy, in every phase. In a step that is made `in_place` the parameters' own
    memory keeps the unperturbed weights, and the perturbed ones have the first gradient's memory or, where that is not
    to be had, that of `backup`. A step `in_saved` weights updates `backup` alone, and leaves the parameters to a
    perturbation that follows.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        numbers: Sequence[int],
        groups: Sequence[int],
        kernels: Kernels,
        hparams: Tensor,
        fused: bool,
        exclusive: bool = False,
    ) -> None:
        self.params, self.numbers, self.groups = list(params), list(numbers), list(groups)
        self.kernels, self.hparams = kernels, hparams
        self.dtype, self.device = params[0].dtype, params[0].device
        self.axes, self.sharded = axes_of(params[0]), any(map(is_sharded, params))
        self.compute = compute_dtype(self.dtype)
        self.masters = fused and self.dtype != self.compute
        self._attach()
        self.layout = Layout.of(self.tensors, groups)
        self.arena = Arena(self.layout, device=self.device)
        # The owner's promise: masters need no comparison, and parameters may have other memory for a while.
        self._trusting, self.exchanges = exclusive and self.masters, exclusive and not self.masters
        if self.masters:
            self.layout.gather(self.aliases, self.backup[0])
        elif not exclusive:  # a step that exchanges memory may never need it
            self.arena.field("backup", self.dtype)
        self.steps = torch.zeros(1, len(self.params), dtype=torch.float32, device=self.device)
        self._no_norm = torch.zeros(1, dtype=torch.float64, device=self.device)
        self.held: Selection = self.select(())
        self.in_place = self.in_saved = False
        self._away: Exchange | None = None  # of parameters that have other memory, or are on their way
        self._versions: list[int] | None = None  # of the weights after the last update
        self._save = True

    @property
    def backup(self) -> Tensor:
        """`[1, row_size]`: the saved weights or masters."""
        return self.arena.field("backup", self.compute if self.masters else self.dtype)

    # --- where the parameters are ---

    def _attach(self) -> None:
        """Takes the parameters' memory. Kernels get detached aliases: what requires no gradient skips autograd's
        dispatch."""
        self.aliases = [local(p).detach() for p in self.params]
        self.tensors = [
            p if is_dense(p) else torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.aliases
        ]
        self._strides = [t.stride() for t in self.tensors]
        self._contiguous = all(t.is_contiguous() for t in self.tensors)
        self._all = tuple(range(len(self.tensors)))
        self._selections: dict[tuple[int, ...], Selection] = {}
        self._whole: Selection | None = None

    def moved(self) -> None:
        """Follows parameters that have other memory of the same kind (`fits`)."""
        held = self.held.slots
        self._versions = None
        self._attach()
        self.held = self.select(held)

    def fits(self) -> bool:
        """True when the parameters are of the kind that the layout was made for."""
        kinds = zip(map(local, self.params), self.layout.segments, self.tensors, strict=True)
        return all(axes_of(p) == self.axes for p in self.params) and all(
            p.dtype == self.dtype
            and p.device == self.device
            and p.shape == s.shape
            and (p.stride() == s.stride if is_dense(p) else t.is_contiguous())
            for p, s, t in kinds
        )

    def select(self, slots: tuple[int, ...]) -> Selection:
        """The parameters in `slots`; the same object as long as they stay where they are."""
        found = self._selections.get(slots)
        if found is None:
            found = self._selections[slots] = Selection(
                slots, self.params, self.aliases, self.tensors, self.layout, self.exchanges, self._backup_views
            )
        return found

    def _backup_views(self, selection: Selection) -> list[Tensor]:
        return self.views(self.backup, selection)

    @property
    def whole(self) -> Selection:
        """All parameters."""
        if self._whole is None:
            self._whole = self.select(self._all)
        return self._whole

    def gather(self) -> tuple[Selection, list[Tensor]]:
        """The parameters that have a gradient, and these gradients, each in its parameter's order of elements.

        Raises RuntimeError for a gradient that the kernels cannot read.
        """
        found = list(map(gradient_of, self.params)) if self.sharded else [p.grad for p in self.params]
        slots = tuple(i for i, g in enumerate(found) if g is not None)
        grads = [g for g in found if g is not None]
        if not self._readable(slots, grads):
            slots, grads = present(found, self.tensors, self.numbers)
        return self.whole if len(slots) == len(found) else self.select(slots), grads

    def _readable(self, slots: tuple[int, ...], grads: list[Any]) -> bool:
        """Return True if kernels can read these gradients of the parameters in `slots` where they are."""
        try:  # a sparse gradient has no such properties
            if self._contiguous:
                ordered = all(map(_is_contiguous, grads))
            else:
                ordered = [g.stride() for g in grads] == [self._strides[i] for i in slots]
            alike = ordered and [g.dtype for g in grads].count(self.dtype) == len(grads)
            return alike and (torch.compiler.is_compiling() or self._bare(slots, grads))
        except (AttributeError, RuntimeError, TypeError):
            return False

    def raw_calls(self, selection: Selection) -> Any:
        """The shorter way to the kernels on these weights (`fastsam_kernels.raw_calls`), where the backend has one and
        nobody watches torch's calls; else None."""
        if torch.compiler.is_compiling() or selection.indirect or not selection.slots:
            return None
        apart = self.in_place and self.exchanges
        name = "raw_calls_in_place" if apart else "raw_calls_saved" if self.in_saved else "raw_calls"
        found = getattr(selection, name)
        if found is None:
            make = getattr(self.kernels, "raw_calls", None)
            if make is None:
                return None
            tensors = self.views(self.backup, selection) if self.in_saved else selection.tensors
            found = make(tensors, None if apart else self.backup, selection.table, self.hparams)
            setattr(selection, name, found)
        return None if found is None or found.watched() else found

    def _bare(self, slots: tuple[int, ...], grads: Sequence[Tensor]) -> bool:
        """Return True for tensors of torch's own class in the shape of their parameters, without a pending sign: their
        elements are what lies at their address."""
        shapes = [g.shape for g in grads] == [self.tensors[i].shape for i in slots]
        # The imaginary part of a conjugate has a pending sign; it is dense only with one element.
        signs = not any(g.is_neg() for g in grads if g.numel() == 1)
        return shapes and signs and list(map(type, grads)).count(Tensor) == len(grads)

    def field(self, name: str) -> Tensor:
        """A field of the update's state, `[1, row_size]` in the dtype of the arithmetic; zeros at first."""
        return self.arena.field(name, self.compute)

    # --- first gradients that the update reads ---

    def keep_first_(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """Copies these gradients, which their owner may overwrite in the second pass; zeros for the other
        parameters."""
        kept = self.arena.field(FIRST, self.dtype)
        if selection is not self.whole:
            kept.zero_()
        if grads:
            torch._foreach_copy_(self.first(selection), list(grads))

    def first(self, selection: Selection) -> list[Tensor]:
        """The gradients that `keep_first_` kept."""
        return self.views(self.arena.field(FIRST, self.dtype), selection)

    def views(self, field: Tensor, selection: Selection) -> list[Tensor]:
        """What a field of one row has of these parameters."""
        # from the start of its memory on; a row's own `views` would ask, which no compiled step may
        segments = [self.layout.segments[i] for i in selection.slots]
        return [field.as_strided(s.shape, s.stride, s.offset) for s in segments]

    # --- a direction that is another than the gradient ---

    @torch.no_grad()
    def direction_(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        choose: Callable[[Tensor, Tensor, Tensor], Tensor],
        factor: Tensor | None,
    ) -> list[Tensor]:
        """What to perturb these parameters along: `choose(g, memory, after)`, see `SAM.direction`. The others' memory
        stays. factor: None for 1."""
        memory, after = self.field(MEMORY), self.field(NEXT)
        g = self._gathered(selection, grads)
        if factor is not None:
            g.mul_(factor)
        found = choose(g, memory, after)
        if selection is not self.whole and (others := self._others(selection)).slots:
            torch._foreach_copy_(self.views(after, others), self.views(memory, others))
        return self._rounded(found, selection)

    def _gathered(self, selection: Selection, grads: Sequence[Tensor]) -> Tensor:
        """These gradients as one vector, zero elsewhere."""
        g = self.field(GRADIENT)
        if selection is not self.whole:
            g.zero_()
        if grads:
            torch._foreach_copy_(self.views(g, selection), list(grads))
        return g

    def _rounded(self, vector: Tensor, selection: Selection) -> list[Tensor]:
        """What a vector in the dtype of the arithmetic has of these parameters, in theirs."""
        if self.dtype != self.compute:
            vector = self.arena.field(ROUNDED, self.dtype).copy_(vector)
        return self.views(vector, selection)

    def _others(self, selection: Selection) -> Selection:
        return self.select(tuple(i for i in self._all if i not in selection.slots))

    # --- what an exclusive owner allows ---

    def begin(self, saved: bool = False) -> None:
        """Before a perturbation: whether masters have to be compared with the weights, which somebody may have written.
        saved: `backup` has the weights already."""
        self.in_place = self.in_saved = False
        self._away = None
        self._save = not saved and (
            not self._trusting or torch.compiler.is_compiling() or self._versions != self.versions_now()
        )

    def note_versions(self) -> None:
        """After an update: weights and masters are in line."""
        if self._trusting:
            self._versions = self.versions_now()

    def versions_now(self) -> list[int]:
        """The version counters of the weights, which writes bump."""
        if self.sharded:  # torch's own writes count in the DTensor
            return [p._version + local(p)._version for p in self.params]
        return [p._version for p in self.params]

    @property
    def updates_whole(self) -> bool:
        """Whether an interrupt finds an update made or not made, because no line of Python is a part of it."""
        return not torch.compiler.is_compiling() and hasattr(self.kernels, "update_calls")

    def leave(self, selection: Selection, grads: Sequence[Tensor], lent: bool) -> Any:
        """Where these parameters may exchange their memory: says that they are about to, and returns the `raw_calls`
        that do; else None. Where it is interrupted, `come_home` ends it. lent: the caller needs these gradients no
        more, whose memory then is taken, and they from the parameters.
        """
        if selection.exchange is None or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None  # nobody exchanges memory when a graph is replayed
        self.in_place = True
        raw = self.raw_calls(selection)
        self.in_place = raw is not None
        if raw is not None:
            taken = lent and lendable(self.params, selection.slots, grads)
            selection.exchange.take(grads if taken else selection.apart, taken)
            self._away = selection.exchange
        return raw

    @property
    def away(self) -> bool:
        """Whether parameters have other memory now."""
        return self._away is not None

    def bring(self, slot: int) -> bool:
        """Gives one parameter its own memory back, for its update. False where it has it, or where somebody moved
        it."""
        return self._away is not None and self._away.bring(slot)

    def come_home(self) -> None:
        """Gives parameters their own memory back, but for those that somebody moved elsewhere."""
        if self._away is not None:
            self._away.come_home()
            self._away = None

    # --- the calls ---

    def norm_(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        sumsq: Tensor,
        adaptive: bool,
        accumulate: bool,
    ) -> None:
        """Adds these gradients (in adaptive groups scaled by their weights) to the squared norm of the model."""
        selection.load()
        weights = selection.tensors if adaptive else []
        if adaptive and self.masters:
            # T = |w| + eta is of the master copy, as the perturbation's is; first it takes over what was written to the
            # weights.
            if self._save:
                self.save_(selection, grads)
            masters = self.layout.views(self.backup[0])
            grads, weights = [g.to(self.compute) for g in grads], [masters[i] for i in selection.slots]
        self.kernels.norm_(sumsq, grads, weights, selection.table, self.hparams, accumulate)

    def perturb_(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None = None
    ) -> None:
        """Moves the weights to the perturbed point, and saves where they were. `seed`: rounds stochastically."""
        selection.load()
        self.kernels.perturb_(
            selection.tensors, self.backup, grads, selection.table, self.hparams, sumsq, self._save, seed
        )
        selection.store()
        self.held = selection

    def norm_perturb_(
        self, raw: Any, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, adaptive: bool
    ) -> None:
        """`norm_` and `perturb_` by the shorter way. Parameters that `leave` named get other memory for the perturbed
        weights."""
        self.held = selection
        if not self.in_place:
            raw.norm_perturb_(grads, sumsq, adaptive, self._save)
            return
        assert self._away is not None
        raw.norm_perturb_apart_(self._away.apart, grads, sumsq, adaptive)
        self._away.leave()

    def save_(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """Saves the weights and leaves them: a perturbation whose norm is zero."""
        selection.load()
        self.kernels.perturb_(selection.tensors, self.backup, grads, selection.table, self.hparams, self._no_norm, True)

    def restore_(self, selection: Selection) -> None:
        """Puts saved weights back, bit for bit."""
        if self.in_place:
            self.come_home()
        elif selection.slots:
            self.kernels.restore_(selection.tensors, self.backup, selection.table)
            selection.store()

    def restore_fitting_(self) -> None:
        """`restore_` where some parameters are not what they were: those that have their shape and their memory get
        their saved weights back."""
        if self.in_place:
            self.come_home()
            return
        saved = self.layout.views(self.backup[0])
        for i in self.held.slots:
            p = local(self.params[i]).detach()
            if p.shape == saved[i].shape and has_memory(p):
                p.copy_(saved[i])

    def unperturb_(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None = None
    ) -> None:
        """Takes back a perturbation that was interrupted: it may have happened to all, some or none of the parameters.

        Where it has not, `backup` holds older weights. The perturbed point is a function of `backup`, so it is computed
        again: weights that are there bit for bit have been perturbed, all others are untouched.
        """
        if self.in_place:
            self.come_home()
            return
        self.restore_(self.select(self.perturbed_slots(selection, grads, sumsq, seed)))
        self.held = self.select(())

    def perturbed_slots(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None
    ) -> tuple[int, ...]:
        """Which of these parameters are, bit for bit, where this perturbation of the saved weights takes them."""
        again = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in selection.tensors]
        self.kernels.perturb_(again, self.backup, grads, selection.table, self.hparams, sumsq, False, seed)
        return tuple(i for i, t in zip(selection.slots, again, strict=True) if same_bits(self.aliases[i], t))

    def saved(self, slot: int) -> Tensor:
        """A parameter's master copy, or where there is none the weights that a step has saved."""
        if self.in_place and not self.masters:
            return self.aliases[slot]
        return self._one(self.backup, slot)

    def take_(self, slot: int, weights: Tensor) -> None:
        """Takes over what `saved` gave, of a bucket that may have had another dtype."""
        self._one(self.backup, slot).copy_(weights)

    def _one(self, field: Tensor, slot: int) -> Tensor:
        segment = self.layout.segments[slot]
        return field.as_strided(segment.shape, segment.stride, segment.offset)

    def saved_slots(self) -> tuple[int, ...]:
        """Which of the parameters that are held are, bit for bit, the saved weights."""
        saved = self.layout.views(self.backup[0])
        return tuple(i for i in self.held.slots if same_bits(self.aliases[i], saved[i].to(self.dtype)))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are equal, NaN and the signs of zeros included."""
    integers = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def buckets_of(
    groups: Sequence[dict[str, Any]],
    left_out: Sequence[Tensor],
    backend: str,
    device: torch.device,
    hparams: Tensor,
    fused: bool,
    exclusive: bool,
) -> list[Bucket]:
    """The parameters by dtype and by the ranks that share their elements, in order, without those in `left_out`."""
    absent = set(map(id, left_out))
    members: dict[tuple[torch.dtype, Axes], list[tuple[Tensor, int, int]]] = {}
    number = 0
    for group_number, group in enumerate(groups):
        for p in group["params"]:
            if id(p) not in absent:
                members.setdefault((p.dtype, axes_of(p)), []).append((p, number, group_number))
            number += 1
    buckets = []
    for (dtype, _), found in members.items():
        params, numbers, group_numbers = zip(*found, strict=True)
        kernels = bind(backend, device, dtype)
        buckets.append(Bucket(params, numbers, group_numbers, kernels, hparams, fused, exclusive))
    return buckets
