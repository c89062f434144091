"""`FusedSAM`, its variants and schedules; `Lion`, which torch does not have.

One step:  FusedSAM.step (fused_sam) -> Engine.collect_grads (param_tracking, tensor_table) -> Engine.perturb (engine)
           -> collect_grads -> Engine.update (engine) -> FusedUpdate.prepare (update)

`param_groups` checks the groups, `parameters` the tensors, and `state_dict` saves and loads. `variants/` has a file for
each variant of SAM, `rho_scheduler` has schedules of rho. `variant_step` has the parts of a variant's step, and
`hparams` the hyperparameter tensor. A `bucket` has the parameters of one dtype, a `selection` the parameters of a call.
A `backup` has the unperturbed weights, and `storage_swap` gives parameters other memory for perturbed weights. `amp`
serves GradScalers, `sharded` parameters of several ranks, `running_stats` BatchNorm, and `in_backward` updates in the
backward pass. `grad_checks` warns, and `tensor_table` finds what changed.
"""

from __future__ import annotations

from fastsam.optim import variants
from fastsam.optim.fused_sam import FusedSAM
from fastsam_kernels.rules.lion import Lion

__all__ = ["FusedSAM", "Lion", "variants"]
