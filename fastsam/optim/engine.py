"""The two passes of a step over all parameters: perturb, save, restore and update, in order."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.backup import Target, WeightState
from fastsam.optim.base_optimizer import unhooked_step, unscale_
from fastsam.optim.bucket import Bucket, BucketGrads, Weights
from fastsam.optim.hparams import STEPS, LossScales
from fastsam.optim.param_tracking import ParamTracker
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import all_reduced
from fastsam.optim.update import UpdateInputs, rule_of
from fastsam.optim.variant_step import c_call, clip_in_memory, largest, or_nonfinite, update_norm, with_norm
from fastsam.optim.variants.sam import SAM
from fastsam_kernels.constants import FreedError, check_not_freed

COULD_NOT = "the update could not run: out of memory, or torch's threads or a launch on the GPU failed"
UNREDUCED = (
    "no parameter has a gradient, and some are split among ranks: a first pass under "
    "set_requires_gradient_sync(False) leaves its gradients with fully_shard, which would add them to the second "
    "pass's. Leave it out: each pass reduces its gradients"
)
IN_EVALUATION = (
    "step() in evaluation: the weights are the clean ones since eval(); call train() before the forward pass"
)
WRITTEN_WEIGHTS = (
    "the weights were written while they are at the perturbed point, and this step, which starts from the clean "
    "ones, would lose the change. Call eval() before the change (a model's load_state_dict(), a clamp, an average that "
    "is swapped in), and train() after it"
)
ARRIVED_CLEAN = (
    "the optimizer's state was saved in training, at the perturbed point, and the model's in evaluation. The gradient "
    "would be the gradient at the clean weights. Call train() after loading both"
)


class Engine(ParamTracker):
    """The two passes of a step.

    Every method either does its work, or raises and leaves a state from which `restore_weights` restores the original
    weights. With a variant of one pass the weights are PERTURBED between steps, and ORIGINAL in evaluation.
    """

    def __init__(
        self,
        base: Optimizer,
        variant: SAM,
        backend: str,
        stochastic_rounding: bool = False,
        exclusive: bool = False,
        in_backward: bool = False,
    ) -> None:
        """Begin without buffers. Raises ValueError for a base or options that do not serve."""
        super().__init__(base, variant, backend, exclusive, in_backward)
        if exclusive and self.one_pass:
            raise ValueError(
                f"assume_no_alias=True with {type(variant).__name__}, whose weights are perturbed between steps too: "
                "the promise ends with the step, so leave it out"
            )
        self.stochastic_rounding = stochastic_rounding
        # Here, and not on the optimizer, because Lightning's wrapper shares its attributes for reading only.
        self.training = True  # False in the evaluation of a variant of one pass
        self.in_closure = False  # a closure of `step` is running
        self.is_finishing = False  # `second_step` is running
        self._calls: list[BucketGrads] = []  # calls of a perturbation under way
        self._phase_after_update = WeightState.ORIGINAL
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
        """Return the calls that set the count of steps; none if every step perturbs."""
        groups = [] if self.variant_step.perturbs_every_step else self.base.param_groups
        return [partial(group.__setitem__, STEPS, steps) for group in groups]

    # --- the passes ---

    @property
    def perturbs(self) -> bool:
        """True if the step that begins, or is under way, perturbs between two passes."""
        return self.variant_step.perturbs_every_step or (not self.one_pass and self.variant.perturbs_at(self.steps))

    def perturb(self, calls: list[BucketGrads], scale: Tensor | None, donate: bool) -> None:
        """Move the weights to the perturbed point, with the gradients that `collect_grads` found.

        `scale` is their loss scale, None for 1 or if it is not known. `donate` is True if the caller clears the
        gradients next, so that their memory may be used. Raises RuntimeError for unusable gradients, and then writes
        nothing.
        """
        if self.has_sharded_params and not any(grads for _, _, grads in calls):
            raise RuntimeError(UNREDUCED)
        self.begin_step()
        for bucket in self.buckets:
            bucket.backup.begin_step()
        if not self.variant_step.is_plain_sam:
            _check_not_freed(calls)
            if not self.perturbs:  # the weights are not saved, because nothing moves them
                for bucket in self.buckets:
                    bucket.backup_selection = bucket.select(())
                self.weight_state = WeightState.PERTURBED
                return
            calls = self._with_directions(calls, scale)
        if self.stochastic_rounding:
            self.perturbations.add_(1)
        self._move(calls, scale, donate)

    def _move(self, calls: list[BucketGrads], scale: Tensor | None, donate: bool = False) -> None:
        """Perturb along the vectors of `calls`. In the state PERTURBED the weights are saved already."""
        direct, old_state, self._calls = self._direct_calls(calls, donate), self.weight_state, calls
        if direct is None:
            _check_not_freed(calls)
            self._norm(calls)
            self._hparams.apply_rho_fn(self._sum, scale)
        try:
            self.weight_state = old_state if old_state is WeightState.PERTURBED else WeightState.PERTURBING
            for bucket, selection, grads in calls:
                if direct is None:
                    bucket.perturb_(selection, grads, self._sum, self._seed)
                else:
                    bucket.norm_perturb_(direct, selection, grads, self._sum, self._hparams.adaptive)
        except FreedError:
            self.weight_state = old_state  # to take back a perturbation, `restore_weights` would read the gradients
            raise
        self.weight_state, self._calls = WeightState.PERTURBED, []
        self._invalidate_unsharded()
        if self.in_backward is not None:
            self._sync_state()
            self.in_backward.updated_slots.clear()
            for bucket, selection, _ in calls:
                if donate and bucket.backup.active_swap is not None:
                    self.in_backward.register(bucket, selection.slots, self._update_one)

    def _direct_calls(self, calls: list[BucketGrads], donate: bool) -> Any:
        """Return the direct calls that make norm and perturbation in one pass; None if the norm has to be known
        first."""
        if len(calls) != 1 or self.stochastic_rounding or self.variant_step.needs_norm or self.has_sharded_params:
            return None
        bucket, selection, grads = calls[0]
        if self._hparams.adaptive and bucket.backup.is_master:
            return None
        return (selection.swap and bucket.swap(selection, grads, donate)) or bucket.direct_calls(selection)

    def _update_one(self, bucket: Bucket, slot: int) -> bool:
        """Update a parameter whose second gradient is complete, while others wait for their gradients.

        Returns False if `update` has to update the parameter, for example because a group was added between the passes.
        """
        groups = self.base.param_groups
        follows = self.weight_state is WeightState.PERTURBED and bucket in self.buckets
        if not follows or rule_of(self.base) is not self.rule or len(groups) != self._hparams.tensor.shape[1]:
            return False
        self._refresh_options(groups)
        part, grads = bucket.gather((slot,))
        swap = bucket.backup.active_swap
        if swap is None or not swap.swap_back_one(slot):
            return False
        update = self._updates[self.buckets.index(bucket)]
        afterwards: list[partial[Any]] = []
        ready = update.prepare(part, grads, self._hparams.specs, self.base.state, UpdateInputs([]), afterwards)
        if any(map(partial.__call__, ready + afterwards)):
            raise RuntimeError(COULD_NOT)
        return True

    def _with_directions(self, calls: list[BucketGrads], scale: Tensor | None) -> list[BucketGrads]:
        """Return the calls of a variant with its directions, and keep first gradients that the second pass reads."""
        if self.variant_step.has_unperturbed_groups:
            moves = list(map(self.variant.perturbs_group, self.base.param_groups))
            calls = [_perturbed_subset(moves, *call) for call in calls]
        if self.variant_step.needs_g1:
            for bucket, selection, grads in calls:
                bucket.store_g1(selection, grads)
        if not self.variant.has_direction:
            return calls
        if self.variant.base_state is not None:
            self._sync_state()
        return self.variant_step.directions(calls, scale)

    def update(
        self, calls: Sequence[BucketGrads], scales: LossScales, found_inf: Tensor | None, skip_nonfinite: bool
    ) -> None:
        """Restore the weights and update them, with the calls of `collect_grads`. With one pass they are then perturbed
        for the next step.

        If the update is not fused and there is a GradScaler, it waits for the device, as torch's unfused optimizers do.
        """
        if skip_nonfinite:
            if self.variant_step.combines:
                self._hparams.set_single_grad_coefficients()  # a coefficient of the last step may be infinite
            found_inf = or_nonfinite(found_inf, update_norm(UpdateInputs(calls)).to(self._sum.device))
        if self.rule is None:
            self._update_by_base(calls, scales, found_inf)
        else:
            self._update_fused(calls, scales, found_inf)
        if self.one_pass:
            self._perturb_next(self.rule is not None and all(part is bucket.whole for bucket, part, _ in calls))

    def _update_fused(self, calls: Sequence[BucketGrads], scales: LossScales, found_inf: Tensor | None) -> None:
        combines, perturbs_every_step = self.variant_step.combines, self.variant_step.perturbs_every_step
        self._sync_state()
        is_perturbed = perturbs_every_step or self.perturbs
        if not is_perturbed:
            self._begin_unperturbed(calls)
        if combines:
            _check_not_freed(calls)
            if is_perturbed:
                inputs = self.variant_step.combine(self._hparams, calls, self._sum, scales, found_inf)
            else:
                inputs = self.variant_step.combine_single(self._hparams, calls, scales, found_inf)
        else:
            inputs = UpdateInputs(calls, None, [], found_inf, scales.g2)
            if self.max_grad_norm is not None:
                inputs = with_norm(self._hparams, inputs)
        ready: list[partial[Any]] = []
        afterwards: list[partial[Any]] = []
        for update, (_, selection, grads) in zip(self._updates, inputs.calls):  # noqa: B905  (`strict` would cost time)
            ready += update.prepare(selection, grads, self._hparams.specs, self.base.state, inputs, afterwards)
        if combines:
            ready += inputs.calls_after
            if is_perturbed:
                ready += self.variant_step.unit_calls(scales.g1)
        if not perturbs_every_step:
            ready += self._post_update_calls(inputs.calls, inputs.found_inf)
        ready += afterwards
        if torch.compiler.is_compiling():  # which unrolls loops, and calls no C function on functions
            for call in ready:
                call()
            self.weight_state = WeightState.ORIGINAL
            return
        ready.append(partial(setattr, self, "weight_state", self._phase_after_update))
        # The calls are made in order, until one returns true, without a line of Python between them. If they are
        # not Python either, no signal is handled before the last one has returned.
        copies = [(update, update.copy_state()) for update in self._updates if update.in_parts]
        try:
            if any(map(partial.__call__, ready)):
                raise RuntimeError(COULD_NOT)
        except BaseException:
            for update, old_state in copies if self.weight_state is not WeightState.ORIGINAL else ():
                update.load_state(old_state)
            raise
        for bucket in self.buckets:
            bucket.backup.note_update()
        self._invalidate_unsharded()

    def _post_update_calls(self, calls: Sequence[BucketGrads], found_inf: Tensor | None) -> list[partial[Any]]:
        """Return the calls after an update. They count the step, and with one pass keep the gradients for the next
        perturbation."""
        # An interrupted `second_step` may have left the flag. If the next step has no `first_step`, it is cleared here.
        calls_after = [*self._count(self.steps + 1), partial(setattr, self, "is_finishing", False)]
        if self.one_pass:
            calls_after += self.variant_step.keep_gradients(calls, found_inf)
            if self._seed is not None:
                calls_after.append(c_call(self._seed.add_, 1))
        return calls_after

    def _begin_unperturbed(self, calls: Sequence[BucketGrads]) -> None:
        """Begin an update without a perturbation: in place, or from a copy if an interrupt could find it half made.

        With one pass the saved weights are updated in place, and the parameters follow with the perturbation. ASAM's
        norm reads the weights of the parameters, so that they get the new ones first.
        """
        self._phase_after_update = WeightState.ORIGINAL
        if self.one_pass and self.weight_state is WeightState.PERTURBED:
            is_in_place = all(bucket.updates_whole and part is bucket.backup_selection for bucket, part, _ in calls)
            if is_in_place and not self._hparams.adaptive:
                self._phase_after_update = WeightState.PERTURBED
                for bucket in self.buckets:
                    bucket.backup.begin_update(Target.BACKUP)
            return
        if self.weight_state is WeightState.ORIGINAL:
            self.begin_step()
            for bucket in self.buckets:
                bucket.backup.begin_step()
                bucket.backup_selection = bucket.select(())
        for bucket, selection, _ in calls:
            if bucket.updates_whole:
                bucket.backup.begin_update(Target.PARAMS)
                selection.load()
        self.weight_state = WeightState.PERTURBED

    def _update_by_base(self, calls: Sequence[BucketGrads], scales: LossScales, found_inf: Tensor | None) -> None:
        """Update by the base optimizer's own step from the restored weights, with the combined gradients in place of
        the gradients."""
        is_perturbed, calls_after = self.perturbs, []
        self.restore_weights()
        if self.variant_step.combines:
            inputs = self.variant_step.combine_in_place(
                self._hparams, calls, self._sum, scales, found_inf, is_perturbed
            )
            calls_after, found_inf = inputs.calls_after, inputs.found_inf
        if found_inf is None or found_inf.item() == 0:
            if scales.g2 is not None:
                unscale_(self.base, scales.g2)
            sharpness = self.variant_step.coefficients.wsam_weight if is_perturbed else 0.0
            if self.max_grad_norm is not None:
                clip_in_memory(calls, self.max_grad_norm, sharpness, scales.g2)
            unhooked_step(self.base)(self.base)
            if sharpness:
                self.variant_step.apply_sharpness(self.base.param_groups, calls, scales.g2)
            if self.variant_step.combines and is_perturbed:
                calls_after += self.variant_step.unit_calls(scales.g1)
            for call in calls_after:
                call()
        if not self.variant_step.perturbs_every_step:
            for call in self._post_update_calls(calls, found_inf):
                call()
        self._invalidate_unsharded()

    def restore_weights(self) -> None:
        """Restore the original weights, bit for bit, in any state. Raises as `collect_grads` does if saved weights do
        not fit a changed parameter; all others are restored then."""
        if self.weight_state is WeightState.PERTURBING:
            for bucket, selection, grads in self._calls:
                bucket.unperturb_(selection, grads, self._sum, self._seed)
        elif self.weight_state is not WeightState.ORIGINAL:
            self._swap_back()
            try:
                self._sync_params()
            except (RuntimeError, TypeError, ValueError):
                for bucket in self.buckets:
                    bucket.backup.restore_fitting(bucket.backup_selection)
                self.weight_state = WeightState.ORIGINAL
                raise
            for bucket in self.buckets:
                bucket.backup.restore(bucket.backup_selection)
        self.weight_state = WeightState.ORIGINAL
        self._calls = []
        self._invalidate_unsharded()

    def abort_step(self) -> None:
        """Restore the weights of between the steps, bit for bit, after an exception in a step."""
        self.restore_weights()
        if self.one_pass and self.training:
            self.perturb_clean()

    # --- the order of calls ---

    @property
    def finishes(self) -> bool:
        """True while `second_step` is running, so that a closure of `step` belongs to a trainer."""
        return self.is_finishing and (self.weight_state is not WeightState.ORIGINAL or not self.perturbs)

    def require(self, state: WeightState, problem: str, remedy: str) -> None:
        """Raise RuntimeError unless the weights are in this state."""
        if self.weight_state is not state:
            raise RuntimeError(f"{problem}; {remedy}{_trainer_hint()}")

    def require_second(self, problem: str, remedy: str) -> None:
        """Raise RuntimeError if the step perturbs and its first half was not made."""
        if self.weight_state is not WeightState.ORIGINAL or self.perturbs:
            self.require(WeightState.PERTURBED, problem, remedy)

    def require_halves(self, call: str) -> None:
        """Raise RuntimeError if a step has no halves."""
        if self.one_pass:
            raise RuntimeError(
                f"{call} with {type(self.variant).__name__}, which takes one pass: its weights stay at the perturbed "
                "point. Call step() after one backward pass, or step(closure); eval() and train() move to the clean "
                "weights and back"
            )

    def require_turn(self, is_whole: bool) -> None:
        """Raise RuntimeError if `step` cannot be called now. `is_whole` is True if a closure makes the gradients."""
        if self.one_pass:
            self._require_point()
        elif is_whole:
            problem = "step(closure) between first_step() and second_step()"
            self.require(WeightState.ORIGINAL, problem, "call second_step(), or restore() first")
        else:
            self.require_second(
                "step() has nothing to do: no closure, and the weights are not perturbed",
                "call step(closure), or first_step() after the first and step() after the second backward pass",
            )

    # --- the perturbed point between the steps of a variant of one pass ---

    def _require_point(self) -> None:
        """Raise RuntimeError in evaluation, and if the weights are not at the point to which the optimizer moved
        them."""
        if not self.training:
            raise RuntimeError(IN_EVALUATION)
        if self.weight_state is WeightState.ORIGINAL or torch.compiler.is_compiling():
            return
        if self._point is None:
            self._require_arrival()
        elif self._point[1] != self._versions():
            self._sync_params()
            if self._point is not None and not self._is_perturbed(self._point[0]):
                raise RuntimeError(WRITTEN_WEIGHTS)

    def _require_arrival(self) -> None:
        """Raise RuntimeError if the weights are at the clean point after a state was loaded."""
        self._sync_params()
        self._refresh_options(self.base.param_groups)
        moves = self._next_directions(False)
        self._norm(moves)
        is_clean = all(bucket.saved_slots() == bucket.backup_selection.slots for bucket in self.buckets)
        if is_clean and not self._is_perturbed(moves):
            raise RuntimeError(ARRIVED_CLEAN)
        self._point = moves, self._versions()

    def _is_perturbed(self, moves: Sequence[BucketGrads]) -> bool:
        return all(b.perturbed_slots(part, vectors, self._sum, self._seed) == part.slots for b, part, vectors in moves)

    def _versions(self) -> list[int]:
        """Return the versions of all weights; none in a compiled step, after which the weights are compared."""
        if torch.compiler.is_compiling():
            return []
        return [version for bucket in self.buckets for version in bucket.backup.versions()]

    def _next_directions(self, has_all_grads: bool) -> list[BucketGrads]:
        return self.variant_step.next_directions(self._hparams, self.buckets, self.base.state, has_all_grads)

    def _perturb_next(self, has_all_grads: bool) -> None:
        """Perturb the updated weights. `has_all_grads` is True if every parameter had a gradient in the last step."""
        moves, is_perturbed = self._next_directions(has_all_grads), self.weight_state is WeightState.PERTURBED
        if is_perturbed and any(part is not bucket.backup_selection for bucket, part, _ in moves):
            self.restore_weights()
            moves, is_perturbed = self._next_directions(has_all_grads), False
        for bucket in self.buckets:
            bucket.backup.begin_step(has_weights=is_perturbed)
        self._move(moves, None)
        self._point = moves, self._versions()

    def perturb_clean(self) -> None:
        """Move from the clean weights to the perturbed point; nothing before the first step."""
        if self._table is None and not self._carried_weights and not self.base.state:
            return
        self.begin_step()
        self._sync_params()
        self._refresh_options(self.base.param_groups)
        self._perturb_next(False)

    def eval(self) -> None:
        """Move to the weights of evaluation: with one pass restore the clean ones, bit for bit.

        Raises RuntimeError inside a closure.
        """
        if self.one_pass and self.training:
            if self.in_closure:
                raise RuntimeError("eval() inside a closure of step(): leave it to before or after the step")
            try:
                self.restore_weights()
            except BaseException:
                self.abort_step()
                raise
            self.training = False
        self._call_base("eval")

    def train(self) -> None:
        """Move to the weights of training: with one pass to the perturbed point. Weights with a loaded state are
        perturbed from the clean ones, in either state."""
        if self.in_closure:
            return
        self._call_base("train")
        is_there = self.training and self.weight_state is WeightState.PERTURBED and self._point is not None
        if is_there or not self.one_pass:
            return
        self.training = True
        try:
            self.restore_weights()
            self.perturb_clean()
        except BaseException:
            self.restore_weights()
            raise

    def _call_base(self, mode: str) -> None:
        """Call the `train()` or `eval()` of a base optimizer that has them. These methods write the weights."""
        function = getattr(self.base, mode, None)
        if function is None:
            return
        if self.in_closure or (self.weight_state is not WeightState.ORIGINAL and not self.one_pass):
            raise RuntimeError(
                f"{mode}() during a step: {type(self.base).__name__} would change the perturbed weights. Call it "
                "before or after the step"
            )
        function()
        self._invalidate_unsharded()

    @property
    def _seed(self) -> Tensor | None:
        """Seed of the stochastic rounding of a perturbation: a counter that is equal on all ranks; None without
        rounding."""
        return self.perturbations if self.stochastic_rounding else None

    def _norm(self, calls: Sequence[BucketGrads]) -> None:
        """Compute one norm over all parameters, of all dtypes and all ranks."""
        adaptive = self._hparams.adaptive
        if self.variant.norm_degree != 2:
            if adaptive:
                raise ValueError(f"adaptive=True in a parameter group cannot be combined with {self.variant}")
            self._sum.copy_(largest(calls, self._sum).square())
            return
        if self.has_sharded_params:
            self._sum.copy_(all_reduced(calls, self._sum, lambda b, part, g, s: b.norm_(part, g, s, adaptive, True)))
            return
        accumulate = False
        for bucket, selection, grads in calls:
            if selection.slots:
                bucket.norm_(selection, grads, self._sum, adaptive, accumulate)
                accumulate = True
        if not accumulate:
            self._sum.zero_()

    # --- states ---

    @property
    def options(self) -> dict[str, Any]:
        """The arguments from which an engine like this one is made, besides the base optimizer."""
        names = ("variant", "backend", "stochastic_rounding", "exclusive")
        return {"in_backward": self.in_backward is not None, **{name: getattr(self, name) for name in names}}

    def facts(self) -> dict[str, Any]:
        """Return the entry "fastsam" of a state dict, without the scale of a GradScaler."""
        facts: dict[str, Any] = {"perturbed": self.weight_state is not WeightState.ORIGINAL}
        facts["variant"] = type(self.variant).__name__
        if self.stochastic_rounding:
            facts["perturbations"] = int(self.perturbations)
        if not self.variant_step.perturbs_every_step:
            facts["steps"] = self.steps
        if self.variant_step.unit is not None:
            facts["unit"] = float(self.variant_step.unit)
        if (numbers := self.uninitialized_numbers()) is not None:
            facts["left_out"] = numbers
        if self.one_pass:
            facts["training"] = self.training
        return facts

    def load(self, weights: Weights, facts: Mapping[str, Any]) -> None:
        super().load(weights, facts)
        unit = facts.get("unit")
        self.variant_step.unit = None if unit is None else torch.tensor(unit, device="cpu")
        self.steps, self.training = facts.get("steps", 0), facts.get("training", True) or not self.one_pass


def _perturbed_subset(moves: Sequence[bool], bucket: Bucket, part: Selection, grads: list[Tensor]) -> BucketGrads:
    """Return the parameters that the variant perturbs. `moves` says for each group if the variant perturbs it."""
    subset = [(i, g) for i, g in zip(part.slots, grads, strict=True) if moves[bucket.groups[i]]]
    return bucket, bucket.select(tuple(i for i, _ in subset)), [g for _, g in subset]


def _check_not_freed(calls: Sequence[BucketGrads]) -> None:
    if not torch.compiler.is_compiling():
        for _, _, grads in calls:
            check_not_freed(grads)


def _trainer_hint() -> str:
    """Return the end of a message that names the trainer with two passes, if transformers' `Trainer` is a caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kinds = [kind.__name__ for kind in type(frame.f_locals.get("self")).__mro__]
        if frame.f_globals.get("__name__") == "transformers.trainer" and "SAMTrainerMixin" not in kinds:
            return ". The Trainer of transformers makes one pass. Take fastsam.integrations.hf.SAMTrainer"
        frame = frame.f_back
    return ""
