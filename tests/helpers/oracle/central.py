"""The centralised baseline: SGD or SAM on the pooled data, as if there were one client."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loop import Clients, Options, run


def central(
    model: nn.Module,
    clients: Clients,
    method: Any,
    options: Options,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> nn.Module:
    """Train by `method` on all samples together, in the order of the clients."""
    pooled_data = torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients])
    return run(model, [pooled_data], method, options, [[0]] * options.rounds, loss)
