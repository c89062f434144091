"""Between data and model: images that are kept as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Pixels(nn.Module):
    """A model for images of bytes: `model` gets ``(x / 255 - mean) / std`` in the dtype of its weights.

    Its input is uint8 [n, C, H, W]. Floating-point inputs have been normalised and go to `model` as they are.

    Args:
        model: the model.
        mean, std: mean and standard deviation of each channel, in 0..1. They are constants, not buffers, so that no
            run sends or averages them.
    """

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.scale = tuple(1 / (255 * s) for s in std)
        self.shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x if x.is_floating_point() else self.normalise(x))

    def normalise(self, x: Tensor) -> Tensor:
        """Return the model's input ``(x / 255 - mean) / std``, `[n, C, H, W]` in the dtype of the weights."""
        dtype = next(self.model.parameters()).dtype
        if (x.device, dtype) not in self._constants:  # once per device: a copy to a GPU would wait for it in each step
            shift, scale = (
                torch.tensor(v, dtype=dtype, device=x.device).reshape(-1, 1, 1) for v in (self.shift, self.scale)
            )
            self._constants[x.device, dtype] = shift, scale
        shift, scale = self._constants[x.device, dtype]
        return torch.addcmul(shift, x.to(dtype), scale)
