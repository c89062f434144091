"""The per-tensor SAM that most PyTorch projects copy, as a yardstick.

It is on no package registry, so it cannot be installed: the version made popular by github.com/davda54/sam lives on as
a file pasted from project to project. What follows is written anew for this benchmark and performs the same tensor
operations in the same order: one norm per tensor, stacked and normed again; a clone of every weight in every step; a
perturbation out of place, then added; the weights "restored" by pointing `p.data` at the clone; then the base
optimizer's own step. It is here to be measured, not to be used: it has the defects that `fastsam.FusedSAM` exists to
avoid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CopiedSAM(torch.optim.Optimizer):
    """`CopiedSAM(params, torch.optim.SGD, rho=0.05, lr=..., momentum=...)`, with `first_step` and `second_step`."""

    def __init__(
        self, params: Any, base_optimizer: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any
    ) -> None:
        super().__init__(params, {"rho": rho, "adaptive": False, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._gradient_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                factor = torch.pow(p, 2) if group["adaptive"] else 1.0
                e_w = factor * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _gradient_norm(self) -> Tensor:
        device = self.param_groups[0]["params"][0].device
        norms = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    factor = torch.abs(p) if group["adaptive"] else 1.0
                    norms.append((factor * p.grad).norm(p=2).to(device))
        return torch.norm(torch.stack(norms), p=2)
