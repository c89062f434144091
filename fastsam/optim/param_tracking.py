"""The parameters of an optimizer: their buffers, and their changes since the last step.

A parameter without gradients has no buffers until its first gradient. Then it keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.ops import bind
from fastsam.optim import parameters
from fastsam.optim.backup import WeightState
from fastsam.optim.bucket import Bucket, BucketGrads, Weights
from fastsam.optim.hparams import HParamTensor
from fastsam.optim.in_backward import InBackwardHooks
from fastsam.optim.parameters import parameters_of
from fastsam.optim.sharded import ShardGroups, fsdp_modules_of, reshard, shard_groups_of, to_local
from fastsam.optim.tensor_table import TensorTable, any_gradient
from fastsam.optim.update import FusedUpdate, Group, UpdateRule, rule_of
from fastsam.optim.variant_step import VariantStep, check_base
from fastsam.optim.variants.sam import SAM, OnePassDirection

ABANDONED = (
    "only this optimizer still refers to its parameters {}. The model has got other ones, as "
    "load_state_dict(assign=True) does, so a step would train nothing. Build a new FusedSAM over model.parameters() "
    "and load this one's state_dict() into it"
)
# Engines that may be between the two halves of a step. Another engine removes the engines whose step has ended.
_engines_in_step: set[ref[ParamTracker]] = set()


class ParamTracker:
    """Works on the parameter groups and the state of `base`, which the optimizer shares with it.

    Attributes:
        variant_step: the parts of a step that the variant needs, and the combination of its gradients.
        one_pass: the weights are perturbed between steps, so that a step has one pass.
    """

    def __init__(self, base: Optimizer, variant: SAM, backend: str, exclusive: bool, in_backward: bool) -> None:
        """Begin without buffers. Raises ValueError for a base optimizer that does not serve the variant."""
        check_base(variant, base, base.param_groups)
        self.base, self.backend, self.exclusive, self.variant = base, backend, exclusive, variant
        self.variant_step = VariantStep(variant)
        self.one_pass = self.variant_step.one_pass
        # The number of perturbations, which is the seed of the next one's rounding.
        self.perturbations = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.rule: UpdateRule | None = rule_of(base)
        self.max_grad_norm: float | None = None  # largest norm of the combined gradient
        self.in_backward = InBackwardHooks() if in_backward else None  # updates in the second backward pass
        self.weight_state = WeightState.ORIGINAL
        self.buckets: list[Bucket] = []
        self.has_sharded_params = False  # some parameters are split among ranks
        self._fsdp_modules: list[Any] = []  # modules that gather parameters for a pass
        self.uninitialized_params: list[Tensor] | None = None  # parameters without buffers; None before the first step
        self._updates: list[FusedUpdate] = []
        self._table: TensorTable | None = None
        self._carried_weights: Weights = {}
        # With one pass: vectors along which the weights between steps were perturbed, and versions of the weights since
        # then; None if they are not known, because a state was loaded.
        self._point: tuple[list[BucketGrads], list[int]] | None = None
        self._ref = ref(self)

    def begin_step(self) -> None:
        """Note that this engine will be between the halves of a step.

        Raises RuntimeError if another engine is, over some of the same parameters: one of them would lose its update.
        """
        if torch.compiler.is_compiling():
            return
        if _engines_in_step and (len(_engines_in_step) > 1 or self._ref not in _engines_in_step):
            param_ids = set(map(id, parameters_of(self.base.param_groups)))
            for reference in _engines_in_step - {self._ref}:
                tracker = reference()
                if tracker is None or tracker.weight_state is WeightState.ORIGINAL:
                    _engines_in_step.discard(reference)
                elif param_ids.intersection(map(id, parameters_of(tracker.base.param_groups))):
                    end = "eval()" if tracker.one_pass else "second_step() or restore()"
                    raise RuntimeError(
                        "another FusedSAM has perturbed some of these parameters, and its step has not ended. Call "
                        f"its {end} first"
                    )
        _engines_in_step.add(self._ref)

    @property
    def sumsq(self) -> Tensor | None:
        """Squared norm of the last direction, float64 `[1]`; None before the first step."""
        return self.__dict__.get("_sum")

    def collect_grads(self) -> list[BucketGrads]:
        """Update the buffers for the present parameters and options, and return the present gradients.

        Raises RuntimeError for unusable gradients and, in a first pass, if the model was given other parameters.
        """
        groups, is_first = self.base.param_groups, self.one_pass or self.weight_state is WeightState.ORIGINAL
        if self.exclusive and not is_first:
            self._swap_back()
        table = self._table
        calls = None if table is None or torch.compiler.is_compiling() else table.look(groups, is_first)
        if calls is None:
            self._sync_params()
        self._refresh_options(groups)
        if torch.compiler.is_compiling():  # a compiled step is guarded by torch against what a look finds
            return [(bucket, *bucket.gather()) for bucket in self.buckets]
        assert self._table is not None
        if is_first and (numbers := self._table.abandoned_numbers(groups, self.base.state)):
            raise RuntimeError(ABANDONED.format(numbers))
        return calls if calls is not None and self._table is table else self._table.gather()

    def _swap_back(self) -> None:
        """Give parameters in separate perturbed memory their own memory back, before their addresses are read."""
        if self.in_backward is not None:
            self.in_backward.remove()
        for bucket in self.buckets:
            bucket.backup.swap_back()

    def _refresh_options(self, groups: list[Group]) -> None:
        if self._hparams.has_changed(groups):
            self._read_options()
        if self._hparams.has_live:
            self._hparams.copy_live()

    def set_max_grad_norm(self, limit: float | None) -> None:
        """Set the limit of the combined gradient, from the next step on."""
        self.max_grad_norm = limit
        if self._table is not None:
            self._hparams.set_max_grad_norm(limit)

    @torch._disable_dynamo
    def _read_options(self) -> None:
        if rule_of(self.base) is not self.rule:
            self.rebuild()
        else:
            self._hparams.read(self.base.param_groups)

    def _sync_params(self) -> None:
        """Make new buffers if parameters moved, were converted or replaced, or have their first gradient."""
        table = self._table
        if (
            table is None
            or any_gradient(self.uninitialized_params or ())
            or (not torch.compiler.is_compiling() and not table.has_params(self.base.param_groups))
        ):
            self.rebuild()

    def _sync_state(self) -> None:
        """Forget the calls of the last update if the state has other tensors, and adopt what a direction reads."""
        if not torch.compiler.is_compiling() and self._table and not self._table.has_state(self.base.state):
            for update in self._updates:
                update.reset()
                if self.variant.base_state is not None:
                    update.adopt(self._hparams.specs, self.base.state)

    @torch._disable_dynamo
    def rebuild(self) -> None:
        """Make new buffers for the present parameters. State that still fits is kept, and converted if needed."""
        groups = self.base.param_groups
        params = parameters_of(groups)
        parameters.check(params)
        if not self.one_pass:
            parameters.check_not_private(params)
        self._check_shapes()
        self._release(params)
        device = params[0].device if params else torch.device("cpu")
        rule = rule_of(self.base)
        coefficients = self.variant_step.coefficients if self.variant_step.combines else None
        is_reversed = self.variant.one_pass_direction is OnePassDirection.MOMENTUM
        rho_fn = self.variant.rho_fn
        scalars = HParamTensor(rule, groups, device, coefficients, self.max_grad_norm, is_reversed, rho_fn)
        check_base(self.variant, self.base, groups)
        weights = {**self._carried_weights, **self.copy_weights()}
        uninitialized_params = self._without_buffers(params, weights)
        buckets = self._make_buckets(uninitialized_params, scalars)
        for bucket in buckets:
            self.variant_step.add_state(bucket)
            bucket.load_weights(weights, self.weight_state is not WeightState.ORIGINAL)
        updates = [FusedUpdate(bucket, rule) for bucket in buckets] if rule else []
        for update in updates:
            update.adopt(scalars.specs, self.base.state)
        self.perturbations = self.perturbations.to(device)
        old_sum, self._sum = self.sumsq, torch.zeros(1, dtype=torch.float64, device=device)
        if old_sum is not None:
            self._sum.copy_(old_sum)
        table = TensorTable(groups, buckets, uninitialized_params, self._table)
        # From here on nothing can fail.
        self.rule, self._hparams, self.buckets, self._updates = rule, scalars, buckets, updates
        self._table, self._carried_weights, self._point = table, {}, None
        self.has_sharded_params = any(bucket.shard_groups for bucket in buckets)
        members = [p for bucket in buckets for p in bucket.params] if any(b.has_dtensors for b in buckets) else []
        self._fsdp_modules = fsdp_modules_of(members)
        self.uninitialized_params = uninitialized_params

    def _make_buckets(self, uninitialized_params: Sequence[Tensor], scalars: HParamTensor) -> list[Bucket]:
        """Return buckets of the parameters by dtype and by the ranks that share them, in order, without
        `uninitialized_params`."""
        absent = set(map(id, uninitialized_params))
        members: dict[tuple[torch.dtype, ShardGroups], list[tuple[Tensor, int, int]]] = {}
        number = 0
        for group_number, group in enumerate(self.base.param_groups):
            for p in group["params"]:
                if id(p) not in absent:
                    members.setdefault((p.dtype, shard_groups_of(p)), []).append((p, number, group_number))
                number += 1
        buckets, is_fused = [], scalars.rule is not None
        for (dtype, _), members_of_bucket in members.items():
            params, numbers, groups = zip(*members_of_bucket, strict=True)
            kernels = bind(self.backend, scalars.tensor.device, dtype)
            buckets.append(Bucket(params, numbers, groups, kernels, scalars.tensor, is_fused, self.exclusive))
        return buckets

    def _without_buffers(self, params: list[Tensor], weights: Weights) -> list[Tensor]:
        """Return the parameters that had no gradient yet, and required none when they were first seen."""
        old_ids, state = set(map(id, self.uninitialized_params or ())), self.base.state
        fresh = [p for p in params if p.grad is None and p not in state and p not in weights]
        return [p for p in fresh if id(p) in old_ids or not p.requires_grad]

    def _check_shapes(self) -> None:
        for bucket in self.buckets:
            for number, p, segment in zip(bucket.numbers, bucket.params, bucket.layout.segments, strict=True):
                shape = to_local(p).shape
                if shape != segment.shape:
                    raise RuntimeError(
                        f"parameter {number} had shape {tuple(segment.shape)} when it was last stepped and has "
                        f"{tuple(shape)} now; its state does not fit. Build a new FusedSAM"
                    )

    def _release(self, params: Sequence[Tensor]) -> None:
        """Restore the weights of parameters that left the groups while they were perturbed."""
        if self.weight_state is WeightState.ORIGINAL:
            return
        remaining_ids = set(map(id, params))
        for bucket in self.buckets:
            bucket.backup.restore(
                bucket.select(
                    tuple(i for i in bucket.backup_selection.slots if id(bucket.params[i]) not in remaining_ids)
                )
            )

    def copy_weights(self) -> Weights:
        """Return copies of master weights and, while perturbed, of the unperturbed weights."""
        if self._table is None:
            return self._carried_weights
        is_perturbed = self.weight_state is not WeightState.ORIGINAL
        return {p: copies for bucket in self.buckets for p, copies in bucket.copy_weights(is_perturbed).items()}

    def load(self, weights: Weights, facts: Mapping[str, Any]) -> None:
        """Take over saved weights and the entry "fastsam" of a state, after `base` has its state and groups. Buffers
        are made at the next step."""
        self.weight_state = WeightState.PERTURBED if facts["perturbed"] else WeightState.ORIGINAL
        if facts["perturbed"]:
            _engines_in_step.add(self._ref)
        self._carried_weights, self._table, self._point = weights, None, None
        self.buckets, self._updates = [], []
        self.perturbations.fill_(facts.get("perturbations", 0))
        params, numbers = parameters_of(self.base.param_groups), facts.get("left_out")
        self.uninitialized_params = None if numbers is None else [params[i] for i in numbers]

    @torch._disable_dynamo
    def make_state(self) -> None:
        """Make the state of the base optimizer as it is before its first step, for parameters with a gradient."""
        self._sync_params()
        for update in self._updates:
            update.make_initial_state(self._hparams.specs, self.base.state)

    def _invalidate_unsharded(self) -> None:
        """Drop copies that torch keeps of the old weights: autocast's casts and gathered parameters."""
        if not torch.compiler.is_compiling():
            torch.clear_autocast_cache()  # else a region of autocast around both passes casts the weights once
        if self._fsdp_modules:
            reshard(self._fsdp_modules)

    def uninitialized_numbers(self) -> list[int] | None:
        """Return the numbers of the parameters that have no buffers, None before the first step."""
        if self.uninitialized_params is None:
            return None
        absent = set(map(id, self.uninitialized_params))
        return [i for i, p in enumerate(parameters_of(self.base.param_groups)) if id(p) in absent]
