"""Augmentation of image batches on their device, all samples at once. It is a function of the generator only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsam.fed.clients.population import Augment
from fastsam.fed.common.checks import integer, number


@dataclass(frozen=True)
class FlipCrop:
    """Horizontal flip, then zero-padding and a random crop of the old size, each with its own probability, per sample.

    The defaults are FL-Simulator's and FedLESAM's for CIFAR (flip 0.5; with probability 0.5 a pad of 4 and one of the
    9 x 9 crops). Images are normalised before, as in these simulators, so that the padding has the mean colour.
    `FlipCrop(crop=1.0)` always crops, as in Caldarola et al. (ECCV 2022).

    Args:
        pad: pixels on each side, >= 0.
        flip, crop: probabilities.

    Raises:
        ValueError: a value is out of range.
    """

    pad: int = 4
    flip: float = 0.5
    crop: float = 0.5

    def __post_init__(self) -> None:
        integer("pad", self.pad, at_least=0)
        number("flip (a probability)", self.flip, at_least=0, at_most=1)
        number("crop (a probability)", self.crop, at_least=0, at_most=1)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return a new tensor of augmented images x [n, H, W] or [n, C, H, W].

        Four numbers per sample are drawn from `generator`, on its device. A generator on the CPU gives the same images
        on every device. Raises ValueError if x are not images.
        """
        if x.dim() not in (3, 4):
            raise ValueError(f"FlipCrop takes images [n, H, W] or [n, C, H, W], got the shape {list(x.shape)}")
        n, (height, width), pad = len(x), x.shape[-2:], self.pad
        draws = torch.rand(4, n, 1, generator=generator, device=generator.device).to(x.device)
        crops = draws[1] < self.crop
        offsets = (draws[2:] * (2 * pad + 1)).long().clamp_(max=2 * pad)  # float32 may round a draw up to 2 * pad + 1
        row_shift, column_shift = torch.where(crops, offsets, pad)
        rows = row_shift + torch.arange(height, device=x.device)
        columns = column_shift + torch.arange(width, device=x.device)
        columns = torch.where(draws[0] < self.flip, width + 2 * pad - 1 - columns, columns)
        places = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
        planes = F.pad(x, (pad,) * 4).reshape(n, -1, (height + 2 * pad) * (width + 2 * pad))
        return planes.gather(2, places.reshape(n, 1, -1).expand(-1, planes.shape[1], -1)).reshape(x.shape)


AUGMENTS: dict[str, Augment | None] = {"none": None, "flip_crop": FlipCrop(), "flip_crop_always": FlipCrop(crop=1.0)}


def augment_by_name(name: str, default: str = "none") -> Augment | None:
    """Return the augmentation of that name; "auto" is `default`. Raises ValueError."""
    name = default if isinstance(name, str) and name == "auto" else name
    if not isinstance(name, str) or name not in AUGMENTS:
        raise ValueError(
            f"augment must be 'auto', {', '.join(map(repr, AUGMENTS))}, or in a config an import path "
            f"'package.module:name', got {name!r}"
        )
    return AUGMENTS[name]
