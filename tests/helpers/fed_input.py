"""A run of one round on one client of six samples, to be started with one thing that is wrong."""

from typing import Any

import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle

X, Y = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
NOTHING = torch.full_like(Y, -100)


def start(
    model: nn.Module | None = None, clients: Any = None, algorithm: fed.Algorithm | None = None, **options: Any
) -> fed.Result:
    return fed.run(
        model or oracle.smooth_model(torch.float32),
        [(X, Y)] if clients is None else clients,
        algorithm or fed.FedAvg(),
        **{"rounds": 1, **options},
    )
