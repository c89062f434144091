"""Steps of a variant with one pass.

Between the steps the weights are at a perturbed point, at which the next gradient is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.backup import Target
from fastsam.optim.bucket import GRADIENT, VARIANT_STATE, Bucket, BucketGrads
from fastsam.optim.engine import Engine
from fastsam.optim.hparams import LossScales
from fastsam.optim.param_tracking import WeightState
from fastsam.optim.selection import Selection
from fastsam.optim.state_dict_format import CheckedState, Weights
from fastsam.optim.variant_step import MOMENTA, c_call, check_base
from fastsam.optim.variants.sam import SAM, OnePassDirection, VariantState

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


class OnePass(Engine):
    """Engine of variants with one pass: weights are PERTURBED between training steps, and ORIGINAL in evaluation."""

    one_pass = True

    def __init__(self, base: Optimizer, backend: str, stochastic_rounding: bool, exclusive: bool, variant: SAM) -> None:
        if exclusive:
            raise ValueError(
                f"assume_no_alias=True with {type(variant).__name__}, whose weights are perturbed between steps too: "
                "the promise ends with the step, so leave it out"
            )
        super().__init__(base, backend, stochastic_rounding, exclusive, variant)
        self._last_perturbation: list[BucketGrads] = []  # vectors along which the weights were perturbed
        self._versions: list[int] | None = None  # versions of the weights since then; None: a state was loaded

    @property
    def perturbs(self) -> bool:
        return False

    # --- a step ---

    def require_ready(self) -> None:
        """Raise RuntimeError in evaluation, and if the weights are not at the point to which the optimizer moved
        them."""
        if not self.training:
            raise RuntimeError(IN_EVALUATION)
        if self.weight_state is WeightState.ORIGINAL or torch.compiler.is_compiling():
            return
        if self._versions is None:
            self._require_arrival()
        elif self._versions != self._versions_now():
            self._sync_params()
            if self._versions is not None and not self._is_perturbed(self._last_perturbation):
                raise RuntimeError(WRITTEN_WEIGHTS)

    def _require_arrival(self) -> None:
        """Check the weights after a state was loaded."""
        self._sync_params()
        self._refresh_options(self.base.param_groups)
        moves = self._next_perturbation(False)
        self._norm(moves)
        is_clean = all(bucket.saved_slots() == bucket.backup_selection.slots for bucket in self.buckets)
        if is_clean and not self._is_perturbed(moves):
            raise RuntimeError(ARRIVED_CLEAN)
        self._last_perturbation, self._versions = moves, self._versions_now()

    def _is_perturbed(self, moves: Sequence[BucketGrads]) -> bool:
        return all(b.perturbed_slots(part, vectors, self._sum, self._seed) == part.slots for b, part, vectors in moves)

    def _versions_now(self) -> list[int]:
        return [version for bucket in self.buckets for version in bucket.backup.versions()]

    def update(
        self, calls: Sequence[BucketGrads], scales: LossScales, found_inf: Tensor | None, skip_nonfinite: bool
    ) -> None:
        """Update the saved weights, and perturb the result."""
        super().update(calls, scales, found_inf, skip_nonfinite)
        self._perturb_next(self.rule is not None and all(part is bucket.whole for bucket, part, _ in calls))

    def _begin_unperturbed(self, calls: Sequence[BucketGrads]) -> None:
        """Begin an update of the saved weights.

        They are updated in place if all of them are updated and no interrupt can find that half made. The parameters
        then follow with the perturbation. Otherwise the parameters get the new weights first.
        """
        self._phase_after_update = WeightState.ORIGINAL
        if self.weight_state is WeightState.ORIGINAL:
            if not torch.compiler.is_compiling():
                self.begin_step()
            super()._begin_unperturbed(calls)
        # ASAM's norm is of weights that the parameters hold.
        elif not self._hparams.adaptive and all(b.updates_whole and part is b.backup_selection for b, part, _ in calls):
            self._phase_after_update = WeightState.PERTURBED
            for bucket in self.buckets:
                bucket.backup.begin_update(Target.BACKUP)

    def _post_update_calls(self, calls: Sequence[BucketGrads], found_inf: Tensor | None) -> list[partial[Any]]:
        calls_after = super()._post_update_calls(calls, found_inf)
        if self.variant.state is VariantState.GRADIENT and any(grads for _, _, grads in calls):
            calls_after += [_gradient_call(*call, found_inf) for call in calls]
        if self._seed is not None:
            calls_after.append(c_call(self._seed.add_, 1))
        return calls_after

    # --- the point between steps ---

    def perturb_clean(self) -> None:
        """Move from the clean weights to the perturbed point; nothing before the first step."""
        if self._table is None and not self._carried_weights and not self.base.state:
            return
        self.begin_step()
        self._sync_params()
        self._refresh_options(self.base.param_groups)
        self._perturb_next(False)

    def _perturb_next(self, has_all_grads: bool) -> None:
        """Perturb the updated weights. `has_all_grads` is True if every parameter had a gradient in the last step."""
        moves = self._next_perturbation(has_all_grads)
        if self.weight_state is WeightState.PERTURBED and any(
            part is not bucket.backup_selection for bucket, part, _ in moves
        ):
            self.restore_weights()
            moves = self._next_perturbation(has_all_grads)
        for bucket in self.buckets:
            bucket.backup.begin_step(has_weights=self.weight_state is WeightState.PERTURBED)
        self._calls = moves
        self._move(moves, None)
        self._last_perturbation = moves
        if not torch.compiler.is_compiling():
            self._versions = self._versions_now()

    def _next_perturbation(self, has_all_grads: bool) -> list[BucketGrads]:
        """Return the calls of the next perturbation. `has_all_grads` is True if every parameter had a gradient in the
        last step."""
        if self.variant.one_pass_direction is OnePassDirection.GRADIENT:
            return [_last_gradient(bucket, has_all_grads) for bucket in self.buckets]
        assert self.rule is not None
        name, state = MOMENTA[self.rule.name], self.base.state
        has_momentum = [name in kind.fields for kind in self._hparams.specs]
        result = []
        for bucket in self.buckets:
            part = bucket.whole
            if not has_all_grads or not all(has_momentum):
                slots = zip(bucket.params, bucket.groups, strict=True)
                part = bucket.select(
                    tuple(i for i, (p, group) in enumerate(slots) if has_momentum[group] and p in state)
                )
            result.append((bucket, part, part.field_views(bucket.to_param_dtype(bucket.field(name)))))
        return result

    def abort_step(self) -> None:
        self.restore_weights()
        if self.training:
            self.perturb_clean()

    def eval(self) -> None:
        """Restore the clean weights, bit for bit. Raises RuntimeError inside a closure."""
        if not self.training:
            return
        if self.in_closure:
            raise RuntimeError("eval() inside a closure of step(): leave it to before or after the step")
        try:
            self.restore_weights()
        except BaseException:
            self.abort_step()
            raise
        self.training = False

    def train(self) -> None:
        """Move to the perturbed point. Weights with a loaded state are perturbed from the clean ones, in either
        state."""
        if self.training and self.weight_state is WeightState.PERTURBED and self._versions is not None:
            return
        self.training = True
        try:
            self.restore_weights()
            self.perturb_clean()
        except BaseException:
            self.restore_weights()
            raise

    # --- buffers ---

    @torch._disable_dynamo
    def rebuild(self) -> None:
        super().rebuild()
        self._last_perturbation, self._versions = [], None

    def load(self, weights: Weights, is_perturbed: bool, uninitialized_numbers: Sequence[int] | None) -> None:
        super().load(weights, is_perturbed, uninitialized_numbers)
        self._last_perturbation, self._versions = [], None

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "training": self.training}

    def load_checked(self, state: CheckedState) -> None:
        super().load_checked(state)
        self.training = state.training


def make_engine(base: Optimizer, backend: str, stochastic_rounding: bool, exclusive: bool, variant: SAM) -> Engine:
    """Return the engine that makes a variant's steps. Raises ValueError for a base or options that do not serve."""
    check_base(variant, base, base.param_groups)
    kind = Engine if variant.one_pass_direction is OnePassDirection.NONE else OnePass
    return kind(base, backend, stochastic_rounding, exclusive, variant)


def _last_gradient(bucket: Bucket, has_all_grads: bool) -> BucketGrads:
    part = bucket.whole
    if not has_all_grads:
        part = bucket.select(tuple(i for i, p in enumerate(bucket.params) if p.requires_grad))
    return bucket, part, part.field_views(bucket.arena.field(VARIANT_STATE, bucket.dtype))


def _gradient_call(bucket: Bucket, part: Selection, grads: Sequence[Tensor], found_inf: Tensor | None) -> partial[Any]:
    """Return a call that keeps these gradients, and zeros for other parameters; nothing if `found_inf` is not 0."""
    state = bucket.arena.field(VARIANT_STATE, bucket.dtype)
    if found_inf is None and part is bucket.whole:
        return c_call(torch._foreach_copy_, part.field_views(state), list(grads))
    field = bucket.fill_(bucket.arena.field(GRADIENT, bucket.dtype), part, grads)
    if found_inf is not None:
        torch.where(found_inf == 0, field, state, out=field)
    return c_call(state.copy_, field)
