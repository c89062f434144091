"""FusedSAM under DistributedDataParallel, on one rank of two."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fastsam import FusedSAM


def train(rank: int, styles: Sequence[str]) -> dict[str, bytes]:
    """Return the weights after three steps of each style. This rank has half of the samples."""
    samples, weights = slice(4 * rank, 4 * rank + 4), {}
    for style in styles:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        x, y = torch.randn(8, 6).double(), torch.randn(8, 1).double()
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=style == "views")
        opt = FusedSAM(ddp.parameters(), SGD, lr=0.1, momentum=0.9, rho=0.3)

        def closure(ddp: nn.Module = ddp, x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = (ddp(x[samples]) - y[samples]).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if style == "no_sync":
                with ddp.no_sync():
                    closure()
                opt.first_step(zero_grad=True)
                closure()
                opt.second_step(zero_grad=True)
            else:
                opt.step(closure)
        weights[style] = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    return weights
