"""The problem that every contender solves: lists of parameter shapes, the step's constants, weights and gradients.

A benchmark measures the optimizer part of one SAM step: from the gradients of the first pass to the perturbed weights,
and from the gradients of the second pass to the new weights (SGD with momentum and weight decay). The two backward
passes are not part of it. Their gradients are prepared, and have a different address at every step, as under autograd.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.models import build

RHO, NU = 0.05, 1e-12
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
FLOOR_BYTES = 40  # per float32 parameter: norm 4, perturb with a backup 16, restore and step 20 (docs/kernels.md)

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Size:
    """One list of parameter shapes, and how long to measure whole steps on it.

    Attributes:
        name: name in commands and files.
        title: name in tables.
        shapes: shapes of the parameters.
        rows: number of rows of the arena, for ops.
        steps: number of steps of a sample, enough for the timer and for caches as warm as in training.
        rounds: number of rounds.
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
        """Return the number of parameters of all rows."""
        return self.rows * sum(self.lengths)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "size": self.name, "title": self.title, "tensors": len(self.shapes), "parameters": self.parameters
        }  # fmt: skip


def _resnet18(stem: int, classes: int) -> Shapes:
    """Return the shapes of ResNet-18 with a first convolution of `stem` x `stem`, in the order of torchvision's module.

    It has 62 tensors. With 7 and 1000 (ImageNet) they have 11,689,512 parameters, with 3 and 10 (CIFAR-10) 11,173,962.
    """
    with torch.device("meta"):
        model = build("resnet18_gn", (3, 32, 32), classes, seed=0)
    first, *shapes = (tuple(p.shape) for p in model.parameters())
    return ((*first[:2], stem, stem), *shapes)


def _client_cnn(*channels: int) -> Shapes:
    """Return the shapes of a client CNN: 3x3 convolutions, each with a group norm, and a classifier of ten classes."""
    shapes: list[tuple[int, ...]] = []
    for inputs, outputs in itertools.pairwise((3, *channels)):
        shapes += [(outputs, inputs, 3, 3), (outputs,), (outputs,)]
    return (*shapes, (10, channels[-1]), (10,))


def split_evenly(parameters: int, tensors: int) -> Shapes:
    """Return shapes of `parameters` elements in `tensors` pieces of nearly one length."""
    size, num_longer = divmod(parameters, tensors)
    return tuple((size + (i < num_longer),) for i in range(tensors))


SMALL_CNN = _client_cnn(16, 16, 32, 32, 48, 48)  # 20 tensors, 51,994 parameters
LIST30M: Shapes = ((400, 749), (400,)) * 100  # a hundred linear layers: 200 tensors, 30,000,000 parameters
CUTS = (1, 10, 100, 400, 1000)
_STEP_SIZES = (
    Size("resnet18", "ResNet-18", _resnet18(7, 1000), rounds=41),
    Size("small_cnn", "small client CNN", SMALL_CNN, steps=20, rounds=61), Size("list30m", "30 M list", LIST30M),
)  # fmt: skip
_KERNEL_SIZES = (
    Size("resnet18", "ResNet-18, 11.2 M", _resnet18(3, 10)),
    Size("100m", "100 M", ((1000, 999), (1000,)) * 100), Size("50k", "50 k", SMALL_CNN),
    Size("225k", "225 k", _client_cnn(32, 32, 64, 64, 104, 104)),
    Size("rows100", "100 rows of 50 k", SMALL_CNN, rows=100), Size("30m", "30 M", LIST30M),
    *(Size(f"cut{n}", f"4 M in {n}", split_evenly(4_000_000, n)) for n in CUTS),
)  # fmt: skip
SIZES, KERNEL_SIZES = ({size.name: size for size in sizes} for sizes in (_STEP_SIZES, _KERNEL_SIZES))


def initial_weights(shapes: Shapes, seed: int = 0, device: torch.device | str = "cpu") -> list[Tensor]:
    """Return weights of an ordinary magnitude, float32, the same for every contender."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).mul_(0.05).to(device) for shape in shapes]


class Gradients:
    """Prepared gradients, one fresh tensor per parameter, in three sets that the passes take in turn.

    The two passes of a step see different gradients, and the address of a parameter's gradient differs from step to
    step, as under autograd with `zero_grad(set_to_none=True)`. `flat(i)` is the set i as one tensor, for the contender
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
