"""How much of a SAM perturbation bfloat16 weights keep: `python -m bench.rounding` prints the table of
docs/fused_sam.md.

Eight square layers of random weights, heavy-tailed gradients, rho = 0.05. "kept" compares z - round(w), where z is the
perturbed point, with the intended perturbation e: the cosine of the two, and <z - round(w), e>/||e||^2; "mean" is over
32 perturbations of the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastsam

LAYERS, DRAWS, RHO = 8, 32, 0.05


def moved(optimizer: fastsam.FusedSAM, params: list[Tensor]) -> Tensor:
    """z - round(w) of one first pass, which is taken back."""
    before = torch.cat([p.detach().flatten().float() for p in params])
    with optimizer.perturbed():
        return torch.cat([p.detach().flatten().float() for p in params]) - before


def row(size: int, stochastic: bool, fresh: bool) -> str:
    """fresh: the master copy is the rounded weights, as it is when a bfloat16 model is loaded."""
    generator = torch.Generator().manual_seed(0)
    width = int((size / LAYERS) ** 0.5)
    masters = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(LAYERS)]
    params = [torch.nn.Parameter(m.bfloat16()) for m in masters]
    for p in params:
        gradient = torch.randn(width, width, generator=generator) * torch.randn(width, width, generator=generator).exp()
        p.grad = gradient.bfloat16()
    optimizer = fastsam.FusedSAM(params, rho=RHO, lr=0.1, stochastic_rounding=stochastic)
    if not fresh:
        optimizer.load_state_dict(
            optimizer.state_dict() | {"state": {i: {"master": master} for i, master in enumerate(masters)}}
        )
    intended = torch.cat([p.grad.flatten().float() for p in params])
    intended *= RHO / intended.norm()
    draws = [moved(optimizer, params) for _ in range(DRAWS if stochastic else 1)]
    mean = torch.stack(draws).mean(0)
    gain = draws[0].dot(intended) / intended.square().sum()
    cosine, of_mean = (torch.cosine_similarity(d, intended, dim=0).item() for d in (draws[0], mean))
    name = f"{'rounded weights' if fresh else 'float32 master'} | {'stochastic' if stochastic else 'nearest'}"
    return f"| {size / 1e6:.0f} M | {name} | {cosine:.2f} | {gain:.2f} | {of_mean:.2f} |"


if __name__ == "__main__":
    for size in (1_000_000, 11_000_000):
        for fresh in (False, True):
            for stochastic in (False, True):
                print(row(size, stochastic, fresh), flush=True)
