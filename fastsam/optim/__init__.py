"""`FusedSAM`, its variants and schedules; `Lion`, which torch does not have.

`fused_sam` is the class, with `step_phase` (the order of calls), `param_groups`, `state_dict` and `state_dict_format`.
`variants/` is the SAM family, `rho_scheduler` schedules of rho.
`engine` makes the two passes of a step, `one_pass` the steps of variants with one pass, and `mixing` combines their
gradients; `update` and `rules` are the calls of an update, `scalars` the numbers of a step on the device.
`buffers` follows the parameters with `param_guard`; `bucket` has those of one dtype, `selection` those of a call,
`backup` their unperturbed weights, `storage_swap` other memory for perturbed ones. `parameters` checks tensors.
`amp`, `sharded`, `statistics`, `early`, `leftover` and `clip_check` serve GradScalers, ranks, BatchNorm, updates in the
backward pass, and two warnings.
"""

from __future__ import annotations

from fastsam.optim import variants
from fastsam.optim.fused_sam import FusedSAM
from fastsam_kernels.rules.lion import Lion

__all__ = ["FusedSAM", "Lion", "variants"]
