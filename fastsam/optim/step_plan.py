"""The parts of a step that a variant needs, which are computed once, when the engine is made; and the base optimizers
that serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from fastsam.optim.update import Group, rule_of
from fastsam.optim.variants.sam import SAM, OnePassDirection, VariantState

# By update rule: the field of its state that is a momentum.
MOMENTA = {"sgd": "momentum_buffer", "rmsprop": "momentum_buffer", "adam": "exp_avg", "lion": "exp_avg"}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The parts of a step of a variant, which are the same in every step and with every base optimizer.

    Attributes:
        perturbs_every_step: there is no step without a perturbation, so steps are not counted.
        uses_combiner: the update reads more than the last gradient, or keeps something for the next step.
        combines_grads: the update reads both gradients, so clipping the second one by hand would be wrong.
        uses_separate_norm: the norm is not the L2 norm of the gradient, or rho is a function of it.
        has_unperturbed_groups: the variant leaves some parameter groups where they are.
        is_plain_sam: a step is the norm, the perturbation and the update of SAM, and nothing else.
    """

    perturbs_every_step: bool
    uses_combiner: bool
    combines_grads: bool
    uses_separate_norm: bool
    has_unperturbed_groups: bool
    is_plain_sam: bool


def plan_of(variant: SAM) -> StepPlan:
    """Return the parts of a step of a variant."""
    looks_ahead = bool(variant.unperturbed_coefficients.looksam_alpha)
    has_two_passes = variant.one_pass_direction is OnePassDirection.NONE
    perturbs_every_step = has_two_passes and variant.perturbs_every_step
    changes_gradient = variant.coefficients.needs_g1 or variant.coefficients.g2 != 1
    updates_state = variant.state in (VariantState.DIRECTION, VariantState.ORTHOGONAL)
    uses_combiner = changes_gradient or updates_state or looks_ahead
    uses_separate_norm = variant.rho_fn is not None or variant.norm_degree != 2
    has_unperturbed_groups = type(variant).perturbs_group is not SAM.perturbs_group
    needs_more = uses_combiner or variant.has_direction or uses_separate_norm or has_unperturbed_groups
    return StepPlan(
        perturbs_every_step=perturbs_every_step,
        uses_combiner=uses_combiner,
        combines_grads=variant.coefficients.needs_g1 or looks_ahead,
        uses_separate_norm=uses_separate_norm,
        has_unperturbed_groups=has_unperturbed_groups,
        is_plain_sam=perturbs_every_step and not needs_more,
    )


def check_base(variant: SAM, base: Optimizer, groups: Sequence[Group]) -> None:
    """Raise ValueError for a base optimizer without a learning rate or a state that the variant needs."""
    rule, name = rule_of(base), type(variant).__name__
    if variant.coefficients.wsam_weight and any("lr" not in group for group in groups):
        raise ValueError(
            f"{name} needs a base optimizer with a learning rate, which {type(base).__name__} has not; take "
            "decouple=False, or another base"
        )
    entry = variant.base_state
    if entry is not None and (rule is None or not all(entry in rule.fields(group) for group in groups)):
        raise ValueError(
            f"{name} reads {entry} in the state of its base optimizer, which has to be torch.optim.Adam or AdamW "
            f"(without amsgrad); got {type(base).__name__}"
        )
    if variant.one_pass_direction is not OnePassDirection.MOMENTUM:
        return
    if rule is None or rule.name not in MOMENTA:
        raise ValueError(
            f"{name} perturbs against the momentum of its base optimizer, which has to be torch.optim.SGD or RMSprop "
            f"with a momentum, Adam or AdamW (without amsgrad), or fastsam.Lion; got {type(base).__name__}"
        )
    for number, group in enumerate(groups):
        if MOMENTA[rule.name] not in rule.fields(group):
            raise ValueError(
                f"{name} perturbs against the momentum of its base optimizer, and parameter group {number} has none; "
                f"give one: momentum=0.9"
            )
