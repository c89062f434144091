"""The SAM class that projects copy from each other: a yardstick for times."""

from __future__ import annotations

from typing import Any

import torch


class CopiedSAM(torch.optim.Optimizer):
    """The per-tensor SAM: `CopiedSAM(params, torch.optim.SGD, rho=0.05, lr=...)`.

    It is on no package registry: github.com/davda54/sam made it popular. This class performs the same tensor operations
    in the same order. It has the defects that `fastsam.FusedSAM` exists to avoid.
    """

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def _active_params(self) -> list[tuple[dict[str, Any], Any]]:
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        """Perturb the weights, with a norm and a clone per tensor, and the norm of these norms."""
        norm = torch.norm(torch.stack([(1.0 * p.grad).norm(p=2) for _, p in self._active_params()]), p=2)
        for group, p in self._active_params():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(1.0 * p.grad * (group["rho"] / (norm + 1e-12)).to(p))

    @torch.no_grad()
    def second_step(self) -> None:
        """Restore the weights by setting `p.data` to the clones, and take the base optimizer's step."""
        for _, p in self._active_params():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
