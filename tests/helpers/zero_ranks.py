"""SAM around ZeroRedundancyOptimizer on one of several ranks, for `rank_group.on_ranks`."""

import numpy as np
import torch
from torch import Tensor

from fastsam import FusedSAM
from tests.helpers.sam_oracle import landscape, make_parameters

ADAM = torch.optim.Adam


def train_steps(opt: FusedSAM, params: list[torch.nn.Parameter]) -> list[np.ndarray]:
    """Return the weights after four steps, as arrays, because a tensor sent to another process needs its sender."""

    def closure() -> Tensor:
        loss = landscape(params, 0)
        loss.backward()
        return loss

    for step in range(4):
        if step == 2:
            opt.param_groups[0]["lr"] = 0.01
        opt.step(closure)
    return [p.detach().numpy() for p in params]


def train_both(rank: int) -> tuple[list[np.ndarray], list[np.ndarray], int, str]:
    """Return the weights with the state on all ranks and with each rank's part of it, the number of parameters with
    state on this rank, and the error of a ZeroRedundancyOptimizer around FusedSAM."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # a second and a half, for its TorchScript

    params, params_of_zero = (make_parameters([(5, 3), (8,), (4,)], torch.float32) for _ in range(2))
    opt = FusedSAM(params_of_zero, ZeroRedundancyOptimizer, rho=0.3, optimizer_class=ADAM, lr=0.05)
    weights = train_steps(FusedSAM(params, ADAM, rho=0.3, lr=0.05), params), train_steps(opt, params_of_zero)
    try:
        ZeroRedundancyOptimizer(params, optimizer_class=FusedSAM, lr=0.1)
        message = "nothing"
    except TypeError as error:
        message = str(error)
    return *weights, len(opt.base_optimizer.optim.state), message  # type: ignore[attr-defined]
