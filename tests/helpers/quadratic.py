"""A model whose loss is a quadratic with known values, for the tests of the measures."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastsam.arena import Arena, Layout
from fastsam.fed.update.model_copy import Replica


class Point(nn.Module):
    """Weights of 2 + 2x2 elements; the output for the sample x (`[n, 6]`) is `w - x`."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.matrix = nn.Parameter(torch.zeros(2, 2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.bias, self.matrix.flatten()]) - x


def loss_of(curvature: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """`loss(model(x), y) = mean_j y_j/2 (w - x_j)^T A (w - x_j)`: gradient `mean_j y_j A (w - x_j)`, Hessian
    `mean_j y_j A`."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (y * (output @ curvature.to(output.dtype) * output).sum(dim=1)).mean()

    return loss


def replica(model: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> Replica:
    model = Point(dtype) if model is None else model
    layout = Layout.from_tensors([p.detach() for p in model.parameters()])
    return Replica(model, layout, Arena(layout).field("w", dtype)[0])


def row(values: Sequence[float] | Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return six numbers as a row of `Point`'s layout."""
    values = torch.as_tensor(values, dtype=dtype)
    out = torch.zeros(replica().layout.row_size, dtype=dtype)
    replica().layout.gather([values[:2], values[2:].reshape(2, 2)], out)
    return out


def flat(values: Tensor) -> Tensor:
    """Return the six numbers of a row."""
    return torch.cat([view.flatten() for view in replica().layout.views(values)])


def samples(*centres: Sequence[float], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return one sample per centre with the factor `scale`. Missing coordinates of a centre are zero."""
    x = torch.zeros(len(centres), 6, dtype=torch.float64)
    for i, centre in enumerate(centres):
        x[i, : len(centre)] = torch.as_tensor(centre, dtype=torch.float64)
    return x, torch.full((len(centres),), scale, dtype=torch.float64)
