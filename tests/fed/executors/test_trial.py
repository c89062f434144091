"""The trial step of stacked clients against each client alone: what rounding explains passes, what it does not is
refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle


def stacked(x: torch.Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x)


class Tie(nn.Module):
    """The larger one of two equal weights goes into a logit, `share` times; in stacked rows, rounding makes it the
    other one."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.pair, self.share = oracle.smooth_model(torch.float32), nn.Parameter(torch.ones(2)), share

    def forward(self, x):
        pair = self.pair * torch.tensor([1.0, 1 + 1e-6]) if stacked(self.pair) else self.pair
        return self.inner(x) + self.share * pair.max(0).values * torch.tensor([1.0, 0.0, 0.0])


class Scaled(nn.Module):
    """Logits that are off by a factor in stacked rows."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.factor = oracle.smooth_model(dtype), factor

    def forward(self, x):
        return self.inner(x) * self.factor if stacked(x) else self.inner(x)


def tried(model: nn.Module, dtype: torch.dtype = torch.float32) -> fed.RunResult:
    return fed.run(model, oracle.ragged_clients(dtype), fed.FedAvg(), rounds=1, participation=1.0, executor="vmap")


def test_a_maximum_that_rounding_moves_is_no_reason_to_refuse() -> None:
    """Single elements of the gradient are then quite different, the loss and the gradient as a whole are not."""
    tried(Tie(0.03))


def test_a_gradient_that_differs_as_a_whole_is_refused_though_the_loss_agrees() -> None:
    with pytest.raises(ValueError, match="a stacked step gives other losses or gradients"):
        tried(Tie(3.0))


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_losses_may_differ_by_rounding_alone(dtype: torch.dtype, off: float) -> None:
    tried(Scaled(1 + off, dtype), dtype)
    with pytest.raises(ValueError, match="a stacked step gives other losses or gradients"):
        tried(Scaled(1 + 1000 * off, dtype), dtype)
