"""The parameters of one dtype: their layout, their backup, and the calls of the kernels on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.arena import Arena, Layout, is_dense
from fastsam.backends import Kernels
from fastsam.optim.backup import Backup, Target
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import as_dtensor_like, gradient_of, is_dtensor, local_part_like, shard_groups_of, to_local
from fastsam.optim.storage_swap import grad_storage_reusable
from fastsam_kernels.constants import compute_dtype

G1, VARIANT_STATE, NEXT_STATE = "first_gradient", "sam_memory", "sam_memory_next"  # fields, and keys of saved states
GRADIENT, ROUNDED = "gathered_gradient", "rounded_direction"
MASTER, UNPERTURBED = "master", "unperturbed"  # keys of saved states
Weights = dict[Tensor, dict[str, Tensor]]  # per parameter: its master copy, unperturbed weights, first gradient, memory


class Bucket:
    """Parameters of one dtype.

    Slots are counted in the order of the parameters. `numbers` are the parameters' numbers over all buckets, for
    messages. `backup` keeps the unperturbed weights of the parameters `backup_selection`.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        numbers: Sequence[int],
        groups: Sequence[int],
        kernels: Kernels,
        hparams: Tensor,
        is_fused: bool,
        exclusive: bool,
    ) -> None:
        self.params, self.numbers, self.groups = list(params), list(numbers), list(groups)
        self.kernels, self.hparams = kernels, hparams
        self.dtype, self.device = params[0].dtype, params[0].device
        self.shard_groups, self.has_dtensors = shard_groups_of(params[0]), any(map(is_dtensor, params))
        self.compute = compute_dtype(self.dtype)
        # Kernels get detached aliases, which skip autograd's dispatch, and dense tensors in place of ones with gaps.
        self.aliases = [to_local(p).detach() for p in self.params]
        self.tensors = [
            p if is_dense(p) else torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.aliases
        ]
        self.layout = Layout.from_tensors(self.tensors, groups)
        self.arena = Arena(self.layout, device=self.device)
        backup_dtype = self.compute if is_fused else self.dtype
        self.backup = Backup(self.params, self.aliases, backup_dtype, self.arena, kernels, exclusive)
        self.steps = torch.zeros(1, len(self.params), dtype=torch.float32, device=self.device)
        self._no_norm = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._selections: dict[tuple[int, ...], Selection] = {}
        self.backup_selection = self.select(())
        self.whole = self.select(tuple(range(len(self.params))))

    def select(self, slots: tuple[int, ...]) -> Selection:
        """Return the parameters in `slots`, always the same object."""
        selection = self._selections.get(slots)
        if selection is None:
            selection = self._selections[slots] = Selection(
                slots, self.params, self.aliases, self.tensors, self.layout, self.backup.can_swap
            )
        return selection

    def gather(self, slots: Iterable[int] | None = None) -> tuple[Selection, list[Tensor]]:
        """Return the parameters that have a gradient, among the parameters in `slots` (None: all), and the gradients.

        Each gradient has its parameter's dtype and order of elements: it is copied if it has others, or if it is of a
        subclass. Raises RuntimeError for a gradient that cannot be used.
        """
        grads: dict[int, Tensor] = {}
        for i in self.whole.slots if slots is None else slots:
            grad = gradient_of(self.params[i]) if self.has_dtensors else self.params[i].grad
            if grad is not None:
                grads[i] = _in_order(grad, self.tensors[i], self.numbers[i])
        return self.select(tuple(grads)), list(grads.values())

    def direct_calls(self, selection: Selection) -> Any:
        """Return the direct calls of the kernels on these weights (`fastsam_kernels.direct_calls`), or None."""
        if torch.compiler.is_compiling() or selection.indirect or not selection.slots:
            return None
        target = self.backup.target
        calls = selection.direct_calls.get(target, target)
        if calls is target:
            make, operands = getattr(self.kernels, "direct_calls", None), self.backup.operands(selection)
            calls = selection.direct_calls[target] = make and make(*operands, selection.table, self.hparams)
        return None if calls is None or calls.is_watched() else calls

    def field(self, name: str) -> Tensor:
        """Return a field of the update's state, `[1, row_size]` in the dtype of the arithmetic; zeros at first."""
        return self.arena.field(name, self.compute)

    def fill_(self, field: Tensor, selection: Selection, grads: Sequence[Tensor]) -> Tensor:
        """Copy these gradients into a field, which gets zeros elsewhere, and return it."""
        if selection is not self.whole:
            field.zero_()
        if grads:
            torch._foreach_copy_(selection.field_views(field), list(grads))
        return field

    def to_param_dtype(self, vector: Tensor) -> Tensor:
        """Return a vector in the dtype of the parameters."""
        return vector if self.dtype == self.compute else self.arena.field(ROUNDED, self.dtype).copy_(vector)

    # --- first gradients that the update reads ---

    def store_g1(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """Copy these gradients, because their memory may be written in the second pass."""
        self.fill_(self.arena.field(G1, self.dtype), selection, grads)

    def g1_views(self, selection: Selection) -> list[Tensor]:
        """Return the gradients that `store_g1` copied."""
        return selection.field_views(self.arena.field(G1, self.dtype))

    # --- a direction that is another than the gradient ---

    @torch.no_grad()
    def direction_(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        choose: Callable[[Tensor, Tensor, Tensor], Tensor],
        factor: Tensor | None,
        base_state: str | None,
    ) -> list[Tensor]:
        """Return the vectors along which these parameters are perturbed: `choose(factor * g, state, next_state)`,
        see `SAM.direction`. The state of other parameters stays. `base_state` is the variant's."""
        g = self.fill_(self.field(GRADIENT), selection, grads)
        if factor is not None:
            g.mul_(factor)
        if VARIANT_STATE not in self.arena:
            state = g[:, :0] if base_state is None else self.field(base_state)
            return selection.views(self.to_param_dtype(choose(g, state, g[:, :0])))
        state, next_state = self.field(VARIANT_STATE), self.field(NEXT_STATE)
        direction = choose(g, state, next_state)
        if selection is not self.whole:
            complement = self.select(tuple(i for i in self.whole.slots if i not in selection.slots))
            torch._foreach_copy_(complement.views(next_state), complement.views(state))
        return selection.views(self.to_param_dtype(direction))

    # --- other memory for perturbed weights ---

    @property
    def updates_whole(self) -> bool:
        """True if an interrupt finds an update made or not made, because no line of Python is a part of it."""
        return not torch.compiler.is_compiling() and hasattr(self.kernels, "update_calls")

    def swap(self, selection: Selection, grads: Sequence[Tensor], donate: bool) -> Any:
        """Prepare to give these parameters other memory for their perturbed weights, and return the `direct_calls` that
        then perturb them; None if that is not possible. The selection has a `swap`, and the backup's `swap_back` ends
        it."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # memory is not swapped when a graph is replayed
        backup, swap = self.backup, selection.swap
        assert swap is not None
        backup.target = Target.PARAMS
        direct = self.direct_calls(selection)
        if direct is None:
            backup.target = Target.RESTORED
        else:
            is_donated = donate and grad_storage_reusable(self.params, selection.slots, grads)
            swap.set_targets(grads if is_donated else selection.views(backup.weights), is_donated)
            backup.active_swap = swap
        return direct

    # --- the calls ---

    def norm_(
        self,
        selection: Selection,
        grads: Sequence[Tensor],
        sumsq: Tensor,
        adaptive: bool,
        accumulate: bool,
    ) -> None:
        """Add these gradients (in adaptive groups scaled by their weights) to the squared norm of the model."""
        selection.load()
        weights = selection.tensors if adaptive else []
        if adaptive and self.backup.is_master:
            # T = |w| + eta is of the master copy, as the perturbation's is; first it takes over what was written to the
            # weights.
            if self.backup.needs_save:
                self.save_(selection, grads)
            grads, weights = [g.to(self.compute) for g in grads], selection.views(self.backup.weights)
        self.kernels.norm_(sumsq, grads, weights, selection.table, self.hparams, accumulate)

    def perturb_(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None = None
    ) -> None:
        """Save the weights and move them to the perturbed point. With a `seed`, they are rounded stochastically."""
        selection.load()
        self.kernels.perturb_(
            selection.tensors,
            self.backup.weights,
            grads,
            selection.table,
            self.hparams,
            sumsq,
            self.backup.needs_save,
            seed,
        )
        selection.store()
        self.backup_selection = selection

    def norm_perturb_(
        self, direct: Any, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, adaptive: bool
    ) -> None:
        """Make `norm_` and `perturb_` as direct calls. Parameters that `swap` prepared get other memory."""
        self.backup_selection, swap = selection, self.backup.active_swap
        if swap is None:
            direct.norm_perturb_(grads, sumsq, adaptive, self.backup.needs_save)
        else:
            direct.norm_perturb_(grads, sumsq, adaptive, save=False, perturbed_weights=swap.targets)
            swap.swap_in()

    def save_(self, selection: Selection, grads: Sequence[Tensor]) -> None:
        """Save the weights and leave them: a perturbation whose norm is zero."""
        selection.load()
        self.kernels.perturb_(
            selection.tensors, self.backup.weights, grads, selection.table, self.hparams, self._no_norm, True
        )

    def unperturb_(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None = None
    ) -> None:
        """Take back a perturbation that was interrupted, of all, some or none of the parameters.

        Before the perturbation `backup` holds older weights. The perturbed point is a function of `backup`, so it is
        computed again. Weights that equal it bit for bit have been perturbed; all others are untouched.
        """
        if self.backup.target is Target.PARAMS:
            self.backup.swap_back()
            return
        self.backup.restore(self.select(self.perturbed_slots(selection, grads, sumsq, seed)))
        self.backup_selection = self.select(())

    def perturbed_slots(
        self, selection: Selection, grads: Sequence[Tensor], sumsq: Tensor, seed: Tensor | None
    ) -> tuple[int, ...]:
        """Return the slots whose weights equal, bit for bit, the perturbed point of the saved weights."""
        points = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in selection.tensors]
        self.kernels.perturb_(points, self.backup.weights, grads, selection.table, self.hparams, sumsq, False, seed)
        return tuple(i for i, t in zip(selection.slots, points, strict=True) if same_bits(self.aliases[i], t))

    def saved_slots(self) -> tuple[int, ...]:
        """Return the slots whose weights equal, bit for bit, the saved weights."""
        pairs = zip(self.backup_selection.slots, self.backup_selection.views(self.backup.weights), strict=True)
        return tuple(i for i, weights in pairs if same_bits(self.aliases[i], weights.to(self.dtype)))

    # --- states ---

    def copy_weights(self, is_perturbed: bool) -> Weights:
        """Return copies of the weights and vectors that a step reads. `is_perturbed` is True between the passes."""
        result: Weights = {}
        for slot, parameter in enumerate(self.params):
            weights = self.backup.unperturbed_weights(self.select((slot,)))[0]
            tensors = {MASTER: weights} if self.backup.is_master else {}
            names = [VARIANT_STATE, NEXT_STATE] if is_perturbed else [VARIANT_STATE]
            if is_perturbed and slot in self.backup_selection.slots:
                names.append(G1)
                tensors[UNPERTURBED] = weights.to(self.dtype)
            tensors |= {name: self.arena.views(name)[slot] for name in names if name in self.arena}
            if tensors:
                result[parameter] = {name: as_dtensor_like(t.clone(), parameter) for name, t in tensors.items()}
        return result

    def load_weights(self, copies: Weights, is_perturbed: bool) -> None:
        """Take over the result of `copy_weights` of a bucket whose dtype and device may be others."""
        saved_slots = []
        for slot, parameter in enumerate(self.params):
            tensors = {name: local_part_like(tensor, parameter) for name, tensor in copies.get(parameter, {}).items()}
            weights = tensors.get(MASTER) if self.backup.is_master else None
            if VARIANT_STATE in tensors and VARIANT_STATE in self.arena:
                self.arena.views(VARIANT_STATE)[slot].copy_(tensors[VARIANT_STATE])
                if NEXT_STATE in tensors:
                    self.layout.views(self.field(NEXT_STATE)[0])[slot].copy_(tensors[NEXT_STATE])
            if is_perturbed and UNPERTURBED in tensors:
                saved_slots.append(slot)
                if G1 in tensors:
                    self.layout.views(self.arena.field(G1, self.dtype)[0])[slot].copy_(tensors[G1])
                original = tensors[UNPERTURBED].to(self.device, self.dtype)
                # A master copy counts only if it rounds to the weights, because a conversion from another half
                # precision may have rounded them otherwise.
                weights = original if weights is None else _where_rounds_to(original, weights.to(self.device))
            if weights is not None:
                self.select((slot,)).views(self.backup.weights)[0].copy_(weights)
        self.backup_selection = self.select(tuple(saved_slots))


BucketGrads = tuple[Bucket, Selection, list[Tensor]]  # gradients of these parameters of a bucket
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _where_rounds_to(weights: Tensor, master: Tensor) -> Tensor:
    return torch.where(master.to(weights.dtype) == weights, master, weights.to(master.dtype))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b are equal, with NaN and the signs of zeros."""
    integers = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _in_order(grad: Tensor, param: Tensor, number: int) -> Tensor:
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of parameter {number} is sparse ({grad.layout}); FusedSAM needs dense gradients: for an "
            "embedding use sparse=False, or give its parameters a separate optimizer"
        )
    if grad.is_complex():
        raise RuntimeError(
            f"the gradient of parameter {number} is complex ({grad.dtype}); FusedSAM needs real gradients"
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"the gradient of parameter {number} is {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(param.shape)} on {param.device}: it belongs to the parameter before a change; zero the gradients "
            "and run the backward pass again"
        )
    # The memory of a subclass, or of a tensor with a pending sign, may not have its elements.
    bare = torch.compiler.is_compiling() or (type(grad) is Tensor and not grad.is_neg())
    if bare and grad.dtype == param.dtype and grad.stride() == param.stride():
        return grad
    empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
    return empty.copy_(grad.detach())
