"""The norm of a step of FSDP2 on one of several ranks, compared with one process; for `rank_group.on_ranks`."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastsam import FusedSAM
from tests.helpers.sharded_ranks import Net, data, whole


def whole_norm(rank: int) -> str:
    """Compare steps in float64, each rank with its own batch, with a loop by hand in one process with all batches."""
    net, plain, rho = Net().double(), Net().double(), 0.3
    fully_shard(net.second)
    fully_shard(net)
    opt = FusedSAM(net.parameters(), torch.optim.AdamW, rho=rho, lr=0.05, weight_decay=0.1)
    params, base = list(plain.parameters()), torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)

    def gradients(model: nn.Module, ranks: Sequence[int]) -> list[Tensor]:
        model.zero_grad()
        x, y = (torch.cat(parts).double() for parts in zip(*map(data, ranks), strict=True))
        (model(x) - y).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for _ in range(3):
        shards = [g.to_local().flatten() for g in gradients(net, [rank]) if isinstance(g, DTensor)]
        opt.first_step()
        gradients(net, [rank])
        opt.second_step()
        grads = gradients(plain, range(dist.get_world_size()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        weights, moves = [p.detach().clone() for p in params], [rho * g / (norm + 1e-12) for g in grads]
        with torch.no_grad():
            torch._foreach_add_([*params], moves)
        gradients(plain, range(dist.get_world_size()))
        with torch.no_grad():
            torch._foreach_copy_([*params], weights)
        base.step()
        assert opt.grad_norm is not None and abs(torch.cat(shards).norm() / norm - 1) > 1e-3, "a rank's norm"
        torch.testing.assert_close(opt.grad_norm.double(), norm, rtol=1e-10, atol=0.0)
        for p, q in zip(net.parameters(), params, strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-9, atol=1e-9)
    return "kept"
