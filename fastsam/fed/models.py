"""Small models for classification, made from a seed; or a user's own by import path."""

from __future__ import annotations

import copy
import inspect
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fastsam.fed.imports import call_with_options, import_object, is_import_path


class CNN(nn.Module):
    """Two 3x3 convolutions (16 and 32 channels by default), each with ReLU and 2x2 max-pooling, a hidden layer, a linear layer.

    No normalisation layer, hence no buffers. Inputs [n, C, H, W], or [n, H, W] for one channel; H and W of 4 or more (8x8 digits: 13,706
    parameters; 28x28: 105,866).
    """

    def __init__(
        self, in_shape: tuple[int, ...], classes: int, channels: tuple[int, int] = (16, 32), hidden: int = 64
    ) -> None:
        super().__init__()
        in_shape = (1, *in_shape) if len(in_shape) == 2 else tuple(in_shape)
        if len(in_shape) != 3 or min(in_shape[1:]) < 4:
            raise ValueError(
                f"the model 'cnn' takes images [C, H, W] or [H, W] of at least 4x4, got samples of the shape {in_shape}; try 'mlp'"
            )
        first, second = channels
        self.in_shape = in_shape
        self.conv1 = nn.Conv2d(in_shape[0], first, 3, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.hidden = nn.Linear(second * (in_shape[1] // 4) * (in_shape[2] // 4), hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *self.in_shape)
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(nn.functional.relu(conv(x)), 2)
        return self.out(nn.functional.relu(self.hidden(x.flatten(1))))


class MLP(nn.Module):
    """Fully connected: one hidden layer (64 units by default) per entry of `hidden`, ReLU between. Inputs [n, ...] are flattened."""

    def __init__(self, in_shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        sizes = [math.prod(in_shape), *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = nn.functional.relu(layer(x))
        return self.out(x)


MODELS: dict[str, type[nn.Module]] = {"cnn": CNN, "mlp": MLP}


def build(name: str, in_shape: tuple[int, ...], classes: int, seed: int, **options: Any) -> nn.Module:
    """A new model on the CPU whose initial weights are a function of `seed`; the caller's random numbers are untouched.

    name: a name of `MODELS`, or the import path ("package.module:attribute", "file.py:attribute") of a class or
    function that makes a module, or of a module (copied). `in_shape` (one sample) and `classes` are passed to what
    has parameters of those names; `options` always.
    Raises ValueError for an unknown name or options that the model does not take.
    """
    if name in MODELS:
        make: Any = MODELS[name]
    elif is_import_path(name):
        make = import_object(name, "model")
    else:
        raise ValueError(
            f"model must be one of {', '.join(map(repr, MODELS))} or an import path 'package.module:name', got {name!r}"
        )
    if isinstance(make, nn.Module) and not options:
        return copy.deepcopy(make)
    accepted = inspect.signature(make).parameters
    given = {key: value for key, value in (("in_shape", in_shape), ("classes", classes)) if key in accepted}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            seed
        )  # not torch.manual_seed: it would seed the CUDA generators as well, which nothing restores
        model = call_with_options(make, given | options, f"model_options of {name}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name!r} must make a torch.nn.Module, got {type(model).__name__}")
    return model
