"""The per-tensor SAM that most PyTorch projects copy, as a yardstick.

It is on no package registry: the version made popular by github.com/davda54/sam is a file that is pasted from project
to project. This class is written anew and performs the same tensor operations in the same order. It is here to be
measured, not to be used: it has the defects that `fastsam.FusedSAM` exists to avoid.
"""

from __future__ import annotations

from typing import Any

import torch


class CopiedSAM(torch.optim.Optimizer):
    """`CopiedSAM(params, torch.optim.SGD, rho=0.05, lr=..., momentum=...)`, with `first_step` and `second_step`."""

    def __init__(
        self, params: Any, base_optimizer: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def _each(self) -> list[tuple[dict[str, Any], Any]]:
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        """Perturb the weights, with a norm per tensor, the norm of these norms, and a clone of every weight in every
        step."""
        norm = torch.norm(torch.stack([(1.0 * p.grad).norm(p=2) for _, p in self._each()]), p=2)
        for group, p in self._each():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(1.0 * p.grad * (group["rho"] / (norm + 1e-12)).to(p))

    @torch.no_grad()
    def second_step(self) -> None:
        """Restore the weights by setting `p.data` to the clones, and take the base optimizer's step."""
        for _, p in self._each():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
