"""Small models and data for the comparisons, and how far two models are from each other."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Client = tuple[Tensor, Tensor]  # x and y


def smooth_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Return a model with tanh, because kinks would amplify rounding differences."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def dropout_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Return a smooth model that draws random numbers in every pass."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 3)).to(dtype)


def pooling_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Return a model with convolution, tanh and average pooling for images of 2 channels, 6 by 6."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(dtype)


def _clients(shape: tuple[int, ...], dtype: torch.dtype, sizes: Sequence[int], seed: int) -> list[Client]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def ragged_clients(
    dtype: torch.dtype = torch.float64, sizes: Sequence[int] = (7, 16, 1, 23, 12), seed: int = 1
) -> list[Client]:
    """Return clients of unequal sizes. One client has a single sample."""
    return _clients((6,), dtype, sizes, seed)


def ragged_images(
    dtype: torch.dtype = torch.float64, sizes: Sequence[int] = (7, 16, 1, 23, 12), seed: int = 1
) -> list[Client]:
    """Return clients with images for `pooling_model`."""
    return _clients((2, 6, 6), dtype, sizes, seed)


def flat_norm(tensors: Sequence[Tensor]) -> float:
    return torch.cat([t.flatten() for t in tensors]).double().norm().item()


def difference(a: nn.Module, b: nn.Module) -> float:
    """Return the relative difference of two models' weights, in the L2 norm."""
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    return flat_norm([p.detach().double() - q.detach().double() for p, q in pairs]) / flat_norm(
        [q.detach() for _, q in pairs]
    )


def movement(a: nn.Module, b: nn.Module) -> float:
    """Return the largest absolute difference of two models' weights."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return torch.cat([(p.detach() - q.detach()).flatten() for p, q in pairs]).abs().max().item()
