"""The two passes of a step over all parameters: perturb, save, restore and update, in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.bucket import Bucket, Call
from fastsam.optim.buffers import Buffers, Phase
from fastsam.optim.early import Early
from fastsam.optim.gradients import present
from fastsam.optim.mixing import Mixing, clip_in_memory, squares, with_norm
from fastsam.optim.rules import UpdateInputs, rule_of
from fastsam.optim.scalars import Scales
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import summed
from fastsam.optim.state_dict_format import STEPS
from fastsam.optim.variants.sam import SAM, Memory
from fastsam_kernels.conventions import FreedError, refuse_freed

PLAIN = SAM()
COULD_NOT = "the update could not run: out of memory, or torch's threads or a launch on the GPU failed"
UNREDUCED = (
    "no parameter has a gradient, and some are split among ranks: a first pass under set_requires_gradient_sync(False) "
    "leaves its gradients with "
    "fully_shard, which would add them to the second pass's. Leave it out: each pass reduces its gradients"
)


class Engine(Buffers):
    """Every method either does its work or raises and leaves a phase from which `recover` brings the original weights
    back."""

    def __init__(
        self,
        base: Optimizer,
        backend: str,
        stochastic_rounding: bool = False,
        exclusive: bool = False,
        variant: SAM = PLAIN,
    ) -> None:
        self.mixing = Mixing(variant)
        # Every step perturbs; else steps are counted.
        self.always = variant.interval == 1 and type(variant).perturbs is SAM.perturbs
        # Whether there is anything to mix, or to keep, of a step's gradients; a direction of its own; a radius of its
        # own; groups that stay.
        learns = variant.memory in (Memory.DIRECTION, Memory.ORTHOGONAL)
        self.mixes = self.mixing.weighs or learns or bool(variant.between.reuse)
        self.directs = variant.has_direction
        # An update reads another gradient, too.
        self.combines = self.mixing.mix.keeps_first or bool(variant.between.reuse)
        self.sized = variant.rho_fn is not None or variant.norm_degree != 2
        self.parts = type(variant).moves is not SAM.moves
        # SAM itself, and no other variant.
        self.plain = self.always and not (self.mixes or self.directs or self.sized or self.parts)
        self.stochastic_rounding = stochastic_rounding
        # Here, and not on the optimizer, because Lightning's wrapper shares its attributes for reading only.
        self.training = True  # False in the evaluation of a variant of one pass
        self.in_closure = False  # a closure of `step` is running
        self.finishing = False  # `second_step` is running
        self._calls: list[Call] = []  # calls of a perturbation under way
        self.early: Early | None = None  # updates in the second backward pass, if requested
        super().__init__(base, backend, exclusive, variant, self.mixing.mix if self.mixes else None)
        self.steps = self.steps

    @property
    def steps(self) -> int:
        """The number of steps, if not every step perturbs. It is in the parameter groups, because
        torch.distributed.checkpoint stores nothing else of a state dict but the tensors."""
        return int(self.base.param_groups[0].get(STEPS, 0))

    @steps.setter
    def steps(self, count: int) -> None:
        for call in self._count(count):
            call()

    def _count(self, steps: int) -> list[partial[Any]]:
        """Calls that set the count of steps; none where every step perturbs."""
        return [] if self.always else [partial(group.__setitem__, STEPS, steps) for group in self.base.param_groups]

    # --- the passes ---

    _updated = Phase.IDLE  # the phase after an update

    @property
    def perturbs(self) -> bool:
        """True if the step that begins, or is under way, perturbs."""
        return self.always or self.variant.perturbs(self.steps)

    def perturb(self, calls: list[Call], scale: Tensor | None, donate: bool) -> None:
        """Move the weights to the perturbed point, with the gradients that `collect_grads` found.

        Args:
            calls: gradients of each bucket.
            scale: loss scale of the gradients, None for 1 or if it is not known.
            donate: the caller clears the gradients next, so that their memory may be used.

        Raises RuntimeError, before anything is written, for unusable gradients.
        """
        self._calls = calls
        if self.split and not any(grads for _, _, grads in calls):
            raise RuntimeError(UNREDUCED)
        if not torch.compiler.is_compiling():
            self.begin_step()
        for bucket in self.buckets:
            bucket.backup.begin_step()
        if not self.plain:
            if not torch.compiler.is_compiling():
                for _, _, grads in calls:
                    refuse_freed(grads)
            if not self.perturbs:
                return self._skip_perturbation()
            calls = self._calls = self._with_directions(calls, scale)
        if self.stochastic_rounding:
            self.perturbations.add_(1)
        self._move(calls, scale, donate)

    def _move(self, calls: list[Call], scale: Tensor | None, donate: bool = False) -> None:
        """Perturb along the vectors of `calls`, from weights that are saved now, or in the phase PERTURBED from the
        saved
        ones. donate: see `perturb`."""
        seed, phase = self._seed, self.phase if self.phase is Phase.PERTURBED else Phase.PERTURBING
        alone = len(calls) == 1 and seed is None and not (self.sized or self.split)
        raw = None
        if alone:
            bucket, selection, grads = calls[0]
            raw = bucket.swap(selection, grads, donate) if selection.swap is not None else None
            raw = raw or bucket.raw_calls(selection)
        if raw is None or (self._scalars.adaptive and calls[0][0].backup.is_master):
            self._norm(calls)
            if self.variant.rho_fn is not None:
                self._scalars.apply_rho_fn(self.variant.rho_fn, self._sum, scale)
            self.phase = phase
            for bucket, selection, grads in calls:
                bucket.perturb_(selection, grads, self._sum, seed)
        else:
            before, self.phase = self.phase, phase
            try:
                bucket.norm_perturb_(raw, selection, grads, self._sum, self._scalars.adaptive)
            except FreedError:
                self.phase = before  # to take back a perturbation, `recover` would read the gradients
                raise
        self.phase = Phase.PERTURBED
        self._calls = []
        self._invalidate_unsharded()
        if self.early is not None:
            self.early.made.clear()
            for bucket, selection, _ in calls:
                if donate and bucket.backup.is_swapped:
                    self.early.listen(bucket, selection.slots, self._update_one)

    def _update_one(self, bucket: Bucket, slot: int) -> bool:
        """The update of a parameter whose second gradient is whole, while others wait for theirs. False: it is left to
        `update`."""
        groups, state = self.base.param_groups, self.base.state
        if self.phase is not Phase.PERTURBED or bucket not in self.buckets or rule_of(self.base) is not self.rule:
            return False
        if len(groups) != self._scalars.tensor.shape[1]:  # a group was added between the passes
            return False
        if self._scalars.changed(groups):
            self._scalars.read(groups)
        self._scalars.copy_live()
        _, grads = present([bucket.params[slot].grad], [bucket.tensors[slot]], [bucket.numbers[slot]])
        if not bucket.backup.swap_back_one(slot):
            return False
        update = self._updates[self.buckets.index(bucket)]
        afterwards: list[partial[Any]] = []
        part, inputs = bucket.select((slot,)), UpdateInputs([])
        ready = update.prepare(part, grads, self._scalars.kinds, state, inputs, afterwards)
        if any(map(partial.__call__, ready + afterwards)):
            raise RuntimeError(COULD_NOT)
        return True

    def _swap_back(self) -> None:
        if self.early is not None:
            self.early.stop()
        super()._swap_back()

    def _with_directions(self, calls: list[Call], scale: Tensor | None) -> list[Call]:
        """Return the calls of a variant with its directions. The first gradients are kept if the second pass needs
        them."""
        if self.parts:
            calls = [self._perturbed_subset(*call) for call in calls]
        if self.mixing.keeps_first:
            for bucket, selection, grads in calls:
                bucket.keep_first_(selection, grads)
        return self.mixing.directed(calls, scale) if self.directs else calls

    def _perturbed_subset(self, bucket: Bucket, selection: Selection, grads: list[Tensor]) -> Call:
        """Return the parameters that the variant perturbs."""
        moves = list(map(self.variant.moves, self.base.param_groups))
        found = [(i, g) for i, g in zip(selection.slots, grads, strict=True) if moves[bucket.groups[i]]]
        return bucket, bucket.select(tuple(i for i, _ in found)), [g for _, g in found]

    def _skip_perturbation(self) -> None:
        """The first pass of a step that does not perturb: the weights are not saved, since nothing moves them."""
        for bucket in self.buckets:
            bucket.held = bucket.select(())
        self.phase, self._calls = Phase.PERTURBED, []

    def update(self, calls: Sequence[Call], scales: Scales, found_inf: Tensor | None, skip_nonfinite: bool) -> None:
        """Restore the weights and update them, fused, with the calls of `collect_grads`."""
        if skip_nonfinite:
            found_inf = self.nonfinite(calls, found_inf)
        perturbed = self.always or self.perturbs
        if not perturbed:
            self._start(calls)
        if self.mixes:
            if not torch.compiler.is_compiling():
                for _, _, grads in calls:
                    refuse_freed(grads)
            if perturbed:
                inputs = self.mixing.read(self._scalars, calls, self._sum, scales, found_inf)
            else:
                inputs = self.mixing.read_alone(self._scalars, calls, scales, found_inf)
        else:
            inputs = UpdateInputs(calls, None, [], found_inf, scales.second)
            if self.max_grad_norm is not None:
                inputs = with_norm(self._scalars, inputs)
        kinds, state = self._scalars.kinds, self.base.state
        ready: list[partial[Any]] = []
        afterwards: list[partial[Any]] = []
        for update, (_, selection, grads) in zip(self._updates, inputs.calls):  # noqa: B905  (`strict` would cost time)
            ready += update.prepare(selection, grads, kinds, state, inputs, afterwards)
        if self.mixes:
            ready += inputs.after
            if perturbed:
                ready += self.mixing.unit_calls(scales.first)
        if not self.always:
            ready += self._following(inputs.calls, inputs.found_inf)
        ready += afterwards
        if torch.compiler.is_compiling():  # which unrolls loops, and calls no C function on functions
            for call in ready:
                call()
            self.phase = Phase.IDLE
            return
        ready.append(partial(setattr, self, "phase", self._updated))
        # One after the other, up to one that returns true, without a line of Python between them: where they are no
        # Python either, no signal is handled before the last one has returned.
        copies = [(update, update.copies()) for update in self._updates if update.in_parts]
        try:
            if any(map(partial.__call__, ready)):
                raise RuntimeError(COULD_NOT)
        except BaseException:
            for update, before in copies if self.phase is not Phase.IDLE else ():
                update.put_back(before)
            raise
        for bucket in self.buckets:
            bucket.backup.note_update()
        self._invalidate_unsharded()

    def _following(self, calls: Sequence[Call], found_inf: Tensor | None) -> list[partial[Any]]:
        """Calls after an update: the step is counted."""
        # An interrupted `second_step` may have left the flag; without a `first_step` in the next step nobody else
        # clears it.
        return [*self._count(self.steps + 1), partial(setattr, self, "finishing", False)]

    def _start(self, calls: Sequence[Call]) -> None:
        """For an update without a perturbation before it: from the weights where they are; from a copy where an
        interrupt may find it half made."""
        if self.phase is Phase.IDLE:
            for bucket in self.buckets:
                bucket.backup.begin_step()
                bucket.held = bucket.select(())
        for bucket, selection, _ in calls:
            bucket.backup.begin_unperturbed(selection, bucket.updates_whole)
        self.phase = Phase.PERTURBED

    @torch.no_grad()
    def combine_grads(self, calls: Sequence[Call], scales: Scales, found_inf: Tensor | None) -> Tensor | None:
        """For a base optimizer that makes its own step: its gradients become what the variant makes of them. Returns
        `found_inf`, not 0 where a variant that mixes had first gradients that were not finite."""
        self._after = []
        if self.mixes:
            reading = self.mixing.change_(self._scalars, calls, self._sum, scales, found_inf, self.perturbs)
            self._after, found_inf = reading.after, reading.found_inf
        return found_inf

    def clip_grads(self, calls: Sequence[Call], scales: Scales) -> None:
        """Clip the gradients that a base optimizer will read, after they were divided by a GradScaler's scale."""
        limit = self.max_grad_norm
        if limit is not None:
            sharpness = self.mixing.mix.sharpness if self.mixes and self.perturbs else 0.0
            clip_in_memory(calls, limit, sharpness, scales.second)

    def finish_step(self, calls: Sequence[Call], scales: Scales, made: bool) -> None:
        """After a step that the base optimizer made itself, or skipped."""
        if self.mixes and made:
            if self.perturbs:
                self.mixing.correct_(self.base.param_groups, calls, scales.second)
                self._after += self.mixing.unit_calls(scales.first)
            for call in self._after:
                call()
        if not self.always:
            self.steps, self.finishing = self.steps + 1, False
        self._invalidate_unsharded()

    def recover(self) -> None:
        """Bring the original weights back, bit for bit, from whatever phase.

        Raises as `collect_grads` does if a parameter changed so that its saved weights have no place in it; all others
        are restored then.
        """
        if self.phase is Phase.PERTURBING:
            for bucket, selection, grads in self._calls:
                bucket.unperturb_(selection, grads, self._sum, self._seed)
        elif self.phase is not Phase.IDLE:
            self._swap_back()
            try:
                self._sync_params()
            except (RuntimeError, TypeError, ValueError):
                for bucket in self.buckets:
                    bucket.backup.restore_fitting(bucket.held)
                self.phase = Phase.IDLE
                raise
            for bucket in self.buckets:
                bucket.backup.restore(bucket.held)
        self.phase = Phase.IDLE
        self._calls = []
        self._invalidate_unsharded()

    def fall_back(self) -> None:
        """After an exception in a step: the weights as they were between steps, bit for bit."""
        self.recover()

    def nonfinite(self, calls: Sequence[Call], found_inf: Tensor | None) -> Tensor:
        """float32 [1]: not 0 when a gradient of `calls` is not finite, or `found_inf` says so. Does not wait for the
        device."""
        if self.mixes:
            self._scalars.alone_()  # a coefficient of the last step may be infinite
        total = summed(calls, self._sum, squares)
        found = (~total.isfinite()).to(torch.float32)
        return found if found_inf is None else torch.maximum(found, found_inf.reshape(1))

    @property
    def _seed(self) -> Tensor | None:
        """The seed of a perturbation's stochastic rounding: a counter, the same on all ranks, which have to perturb
        alike."""
        return self.perturbations if self.stochastic_rounding else None

    def _norm(self, calls: Sequence[Call]) -> None:
        """One norm over the whole model, whatever its dtypes, on all ranks that have a part of it."""
        adaptive = self._scalars.adaptive
        if self.variant.norm_degree != 2:
            if adaptive:
                raise ValueError(f"adaptive=True in a parameter group cannot be combined with {self.variant}")
            self._sum.copy_(_largest(calls, self._sum).square())
            return
        if self.split:
            self._sum.copy_(summed(calls, self._sum, lambda b, part, g, s: b.norm_(part, g, s, adaptive, True)))
            return
        accumulate = False
        for bucket, selection, grads in calls:
            if selection.slots:
                bucket.norm_(selection, grads, self._sum, adaptive, accumulate)
                accumulate = True
        if not accumulate:
            self._sum.zero_()

    def numbers(self) -> dict[str, float]:
        """Return the counts of perturbations and steps on which the next ones depend, and the unit of a direction's
        memory."""
        found: dict[str, float] = {"perturbations": int(self.perturbations)} if self.stochastic_rounding else {}
        if not self.always:
            found["steps"] = self.steps
        if self.mixing.unit is not None:
            found["unit"] = float(self.mixing.unit)
        return found


def _largest(calls: Sequence[Call], like: Tensor) -> Tensor:
    """Return the largest absolute value in the vectors of `calls`, 0 without any, NaN if one is NaN."""
    tensors = [g for _, _, grads in calls for g in grads if g.numel()]
    if not tensors:
        return torch.zeros_like(like)
    return torch.stack([norm.to(like.dtype) for norm in torch._foreach_norm(tensors, torch.inf)]).amax().view(1)
