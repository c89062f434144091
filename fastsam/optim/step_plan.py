"""The parts of a step that a variant needs. They are computed once, when the engine is made."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.optim.variants.sam import SAM, OnePassDirection, VariantState


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
