"""Steps of a variant with one pass. Between the steps the weights are at a perturbed point, at which the next gradient
is
taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.bucket import GRADIENT, MEMORY, ROUNDED, Bucket, Call
from fastsam.optim.buffers import Phase
from fastsam.optim.engine import PLAIN, Engine
from fastsam.optim.mixing import silent, taking
from fastsam.optim.rules import Group, rule_of
from fastsam.optim.scalars import Scales
from fastsam.optim.selection import Selection
from fastsam.optim.state_dict_format import Weights
from fastsam.optim.variants.sam import SAM, Ahead, Memory

# By update rule: the field of its state that is a momentum.
MOMENTA = {"sgd": "momentum_buffer", "rmsprop": "momentum_buffer", "adam": "exp_avg", "lion": "exp_avg"}

IN_EVALUATION = (
    "step() in evaluation: the weights are the clean ones since eval(); call train() before the forward pass"
)
WRITTEN = (
    "somebody wrote the weights while they rest at the perturbed point, and this step, which starts from the clean "
    "ones, would lose it. Call eval() "
    "before and train() after what writes them (a model's load_state_dict(), a clamp, an average that is swapped in)"
)
ARRIVED_CLEAN = (
    "the optimizer's state was saved in training, at the perturbed point, and the model's in evaluation, so that the "
    "gradient would be that of the "
    "clean weights. After loading both call train()"
)


class OnePass(Engine):
    """The engine of variants with one pass. PERTURBED is the phase between training steps, IDLE that of clean
    weights."""

    one_pass = True

    def __init__(
        self,
        base: Optimizer,
        backend: str,
        stochastic_rounding: bool = False,
        exclusive: bool = False,
        variant: SAM = PLAIN,
    ) -> None:
        if exclusive:
            raise ValueError(
                f"assume_no_alias=True with {type(variant).__name__}, whose weights are perturbed between steps too: "
                "the promise ends with the step, so leave it out"
            )
        super().__init__(base, backend, stochastic_rounding, exclusive, variant)
        check_base(variant, base, base.param_groups)
        self.always = False
        self._rested: list[Call] = []  # along what the weights were perturbed
        self._versions: list[int] | None = None  # of the weights since then; None: they were carried here

    @property
    def perturbs(self) -> bool:
        return False

    # --- a step ---

    def require_ready(self) -> None:
        """Raises RuntimeError in evaluation, and where the weights are not at the point that the optimizer left them
        at."""
        if not self.training:
            raise RuntimeError(IN_EVALUATION)
        if self.phase is Phase.IDLE or torch.compiler.is_compiling():
            return
        if self._versions is None:
            self._require_arrival()
        elif self._versions != self._versions_now():
            self._sync_params()
            if self._versions is not None and not self._at_rest(self._rested):
                raise RuntimeError(WRITTEN)

    def _require_arrival(self) -> None:
        """After a state was loaded."""
        self._sync_params()
        self._refresh_options(self.base.param_groups)
        moves = self._ahead(False)
        self._norm(moves)
        clean = all(bucket.saved_slots() == bucket.held.slots for bucket in self.buckets)
        if clean and not self._at_rest(moves):
            raise RuntimeError(ARRIVED_CLEAN)
        self._rested, self._versions = moves, self._versions_now()

    def _at_rest(self, moves: Sequence[Call]) -> bool:
        return all(b.perturbed_slots(part, along, self._sum, self._seed) == part.slots for b, part, along in moves)

    def _versions_now(self) -> list[int]:
        return [version for bucket in self.buckets for version in bucket.backup.versions()]

    def update(self, calls: Sequence[Call], scales: Scales, found_inf: Tensor | None, skip_nonfinite: bool) -> None:
        """Update the saved weights, and perturb the result."""
        super().update(calls, scales, found_inf, skip_nonfinite)
        self._rest(all(selection is bucket.whole for bucket, selection, _ in calls))

    def _start(self, calls: Sequence[Call]) -> None:
        """The saved weights are updated where they are, if all of them are and no interrupt finds that half made; the
        parameters follow with the perturbation. Else the parameters get the new weights first."""
        self._updated = Phase.IDLE
        if self.phase is Phase.IDLE:
            if not torch.compiler.is_compiling():
                self.begin_step()
            super()._start(calls)
        # ASAM's norm is of weights that the parameters hold.
        elif not self._scalars.adaptive and all(b.updates_whole and part is b.held for b, part, _ in calls):
            self._updated = Phase.PERTURBED
            for bucket in self.buckets:
                bucket.backup.begin_in_backup()

    def _following(self, calls: Sequence[Call], found_inf: Tensor | None) -> list[partial[Any]]:
        found = super()._following(calls, found_inf) + self._keeping(calls, found_inf)
        if self._seed is not None:
            found.append(silent(self._seed.add_, 1))
        return found

    def finish_step(self, calls: Sequence[Call], scales: Scales, made: bool) -> None:
        super().finish_step(calls, scales, made)
        for call in self._keeping(calls, None) if made else []:
            call()
        if self._seed is not None:
            self._seed.add_(1)
        self._rest(False)

    def _keeping(self, calls: Sequence[Call], found_inf: Tensor | None) -> list[partial[Any]]:
        """Calls that keep the gradient, where the variant does."""
        if self.variant.memory is not Memory.GRADIENT or not any(grads for _, _, grads in calls):
            return []
        return [_kept(*call, found_inf) for call in calls]

    # --- the point between steps ---

    def rest(self) -> None:
        """From the clean weights to the perturbed point; nothing before the first step."""
        if self._guard is None and not self._carried and not self.base.state:
            return
        self.begin_step()
        self._sync_params()
        self._refresh_options(self.base.param_groups)
        self._rest(False)

    def _rest(self, whole: bool) -> None:
        """whole: every parameter had a gradient in the step just made."""
        moves = self._ahead(whole)
        if self.phase is Phase.PERTURBED and any(part is not bucket.held for bucket, part, _ in moves):
            self.recover()
            moves = self._ahead(whole)
        for bucket in self.buckets:
            bucket.backup.begin_step(has_weights=self.phase is Phase.PERTURBED)
        self._calls = moves
        self._move(moves, None)
        self._rested = moves
        if not torch.compiler.is_compiling():
            self._versions = self._versions_now()

    def _ahead(self, whole: bool) -> list[Call]:
        """Return the calls of the next perturbation. whole: as in `_rest`."""
        if self.variant.ahead is Ahead.GRADIENT:
            return [_along_gradient(bucket, whole) for bucket in self.buckets]
        assert self.rule is not None
        name, state = MOMENTA[self.rule.name], self.base.state
        has = [name in kind.fields for kind in self._scalars.kinds]
        found = []
        for bucket in self.buckets:
            part = bucket.whole
            if not whole or not all(has):
                slots = zip(bucket.params, bucket.groups, strict=True)
                part = bucket.select(tuple(i for i, (p, group) in enumerate(slots) if has[group] and p in state))
            vector = bucket.field(name)
            if bucket.dtype != bucket.compute:
                vector = bucket.arena.field(ROUNDED, bucket.dtype).copy_(vector)
            found.append((bucket, part, _views(bucket, part, vector)))
        return found

    def fall_back(self) -> None:
        self.recover()
        if self.training:
            self.rest()

    def eval(self) -> None:
        """The clean weights, bit for bit."""
        try:
            self.recover()
        except BaseException:
            self.fall_back()
            raise
        self.training = False

    def train(self) -> None:
        """The perturbed point. Weights that a state was loaded for are taken to it from the clean ones, wherever they
        are."""
        if self.training and self.phase is Phase.PERTURBED and self._versions is not None:
            return
        self.training = True
        try:
            self.recover()
            self.rest()
        except BaseException:
            self.recover()
            raise

    # --- buffers ---

    @torch._disable_dynamo
    def rebuild(self) -> None:
        check_base(self.variant, self.base, self.base.param_groups)
        super().rebuild()
        self._rested, self._versions = [], None

    def load(self, weights: Weights, perturbed: bool, left_out: Sequence[int] | None) -> None:
        super().load(weights, perturbed, left_out)
        self._rested, self._versions = [], None


def engine_of(
    base: Optimizer,
    backend: str,
    stochastic_rounding: bool,
    exclusive: bool,
    variant: SAM,
) -> Engine:
    """The engine that makes a variant's steps. Raises ValueError for a base optimizer and for options with which the
    variant cannot."""
    check_base(variant, base, base.param_groups)
    kind = Engine if variant.ahead is Ahead.NONE else OnePass
    return kind(base, backend, stochastic_rounding, exclusive, variant)


def check_base(variant: SAM, base: Optimizer, groups: Sequence[Group]) -> None:
    """Raises ValueError for a base optimizer without the momentum that the variant perturbs against."""
    rule, name = rule_of(base), type(variant).__name__
    if variant.ahead is not Ahead.MOMENTUM:
        return
    if rule is None or rule.name not in MOMENTA:
        raise ValueError(
            f"{name} perturbs against the momentum of its base optimizer, which has to be torch.optim.SGD or RMSprop "
            f"with a momentum, Adam or AdamW "
            f"(without amsgrad), or fastsam.Lion; got {type(base).__name__}"
        )
    for number, group in enumerate(groups):
        if MOMENTA[rule.name] not in rule.fields(group):
            raise ValueError(
                f"{name} perturbs against the momentum of its base optimizer, and parameter group {number} has none; "
                f"give one: momentum=0.9"
            )


def _along_gradient(bucket: Bucket, whole: bool) -> Call:
    part = bucket.whole
    if not whole:
        part = bucket.select(tuple(i for i, p in enumerate(bucket.params) if p.requires_grad))
    return bucket, part, _views(bucket, part, bucket.arena.field(MEMORY, bucket.dtype))


def _views(bucket: Bucket, part: Selection, vector: Tensor) -> list[Tensor]:
    """Return the parts of the bucket's vector for these parameters."""
    if torch.compiler.is_compiling():  # to which views made outside would be inputs of their own
        return part.views(vector)
    if part.along is None:
        part.along = part.views(vector)
    return part.along


def _kept(bucket: Bucket, part: Selection, grads: Sequence[Tensor], found_inf: Tensor | None) -> partial[Any]:
    """A call that keeps these gradients, and zeros for the other parameters; nothing new where `found_inf` is not 0."""
    memory = bucket.arena.field(MEMORY, bucket.dtype)
    if found_inf is None and part is bucket.whole:
        return silent(torch._foreach_copy_, _views(bucket, part, memory), list(grads))
    taken = bucket.arena.field(GRADIENT, bucket.dtype)
    if part is not bucket.whole:
        taken.zero_()
    if grads:
        torch._foreach_copy_(part.views(taken), list(grads))
    if found_inf is not None:
        torch.where(found_inf == 0, taken, memory, out=taken)
    return taking(memory, taken)
