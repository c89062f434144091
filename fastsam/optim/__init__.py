"""`FusedSAM` and what it stands on; `Lion`, which torch does not have.

`fused_sam` is the class, `turns` which of a step's calls comes next, `variants/` the SAM family; `engine` makes a
step's two passes, `one_pass` the steps of variants whose weights rest at a perturbed point, `modes` moves those to the
clean weights and back, `mixing` is what updates
see of the gradients; `amp` asks a GradScaler what it did; `buffers` follows the parameters from step to step,
`parameters` says which tensors can be optimized, `rules` what the base optimizer's update is, `scalars` keeps the
numbers of a step on the device, `bucket` (with `selection`) gathers tensors into calls of the kernels, `exclusive`
lends parameters the memory of their perturbed weights,`watch` notices what happened to the parameters between steps,
`sharded` is what parameters split among ranks need, `leftover` gradients that a closure's step would take away,
`statistics` is what the second pass leaves alone, `saving` is state dicts and pickling, `checkpoint` what is in them.
"""

from __future__ import annotations

from fastsam.optim import variants
from fastsam.optim.fused_sam import FusedSAM
from fastsam_kernels.rules.lion import Lion

__all__ = ["FusedSAM", "Lion", "variants"]
