"""The problem that every contender solves: lists of parameter shapes, the step's constants, weights and gradients.

What is measured is the optimizer part of one SAM step: from the gradients of the first pass to the perturbed weights,
and from the gradients of the second pass to the new weights (SGD with momentum and weight decay). The two backward
passes are not in it: their gradients are prepared, and handed over as autograd leaves them, in other memory at every
step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

RHO, NU = 0.05, 1e-12
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
FLOOR_BYTES = 40  # per float32 parameter: norm 4, perturb with a backup 16, restore and step 20 (docs/design.md)

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Size:
    """One list of parameter shapes, and how long to measure whole steps on it.

    rows: of the arena, for ops. steps: of a sample, enough that it is well above the timer and starts from warm caches
    where it would in training.
    """

    name: str
    title: str
    shapes: Shapes
    rows: int = 1
    steps: int = 1
    rounds: int = 21

    @cached_property
    def lengths(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes]

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of all rows."""
        return self.rows * sum(self.lengths)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "size": self.name, "title": self.title, "tensors": len(self.shapes), "parameters": self.parameters
        }  # fmt: skip


def _resnet18() -> Shapes:
    """ResNet-18 for ImageNet (He et al. 2016, table 1) in the order of torchvision's module: 62 tensors, 11,689,512
    parameters."""

    def norm(channels: int) -> list[tuple[int, ...]]:
        return [(channels,), (channels,)]

    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), *norm(64)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before if block == 0 else width, 3, 3), *norm(width), (width, width, 3, 3), *norm(width)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), *norm(width)]
        before = width
    return (*shapes, (1000, 512), (1000,))


def _small_cnn() -> Shapes:
    """A client's CNN: six 3x3 convolutions, each with a group norm, and a classifier: 20 tensors, 51,994 parameters."""
    shapes: list[tuple[int, ...]] = []
    channels = (3, 16, 16, 32, 32, 48, 48)
    for before, after in itertools.pairwise(channels):
        shapes += [(after, before, 3, 3), (after,), (after,)]
    return (*shapes, (10, 48), (10,))


def _list30m() -> Shapes:
    """One hundred linear layers of a middling size: 200 tensors, 30,000,000 parameters."""
    return ((400, 749), (400,)) * 100


SIZES: dict[str, Size] = {
    size.name: size
    for size in (
        Size("resnet18", "ResNet-18", _resnet18(), steps=1, rounds=41),
        Size("small_cnn", "small client CNN", _small_cnn(), steps=20, rounds=61),
        Size("list30m", "30 M list", _list30m(), steps=1, rounds=21),
    )
}


def initial_weights(shapes: Shapes, seed: int = 0, device: torch.device | str = "cpu") -> list[Tensor]:
    """Weights of an ordinary magnitude, float32, the same for every contender."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).mul_(0.05).to(device) for shape in shapes]


class Gradients:
    """Prepared gradients, one fresh tensor per parameter, in three sets that the passes take in turn.

    So the two passes of a step see different gradients, and a parameter's gradient lies elsewhere at every step, as it
    does under autograd with `zero_grad(set_to_none=True)`. `flat(i)` is the set i as one tensor, for the contender
    whose gradients were flat to begin with.
    """

    SETS = 3

    def __init__(self, shapes: Shapes, seed: int = 1, device: torch.device | str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sets: list[list[Tensor]] = [
            [torch.randn(shape, generator=generator).mul_(0.01).to(device) for shape in shapes]
            for _ in range(self.SETS)
        ]

    def tensors(self, index: int) -> Sequence[Tensor]:
        return self.sets[index % self.SETS]

    def flat(self, index: int) -> Tensor:
        return self._flat[index % self.SETS]

    @cached_property
    def _flat(self) -> list[Tensor]:
        return [torch.cat([g.reshape(-1) for g in tensors]) for tensors in self.sets]
