"""Models for classification, or a user's own, made from a seed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastsam.fed.common.checks import nearest
from fastsam.fed.common.import_paths import call_with_options
from fastsam.fed.models.pixels import Pixels
from fastsam.fed.models.resnet import ResNet18GN
from fastsam.fed.models.small import CNN, EMNISTCNN, MLP, LeNet
from fastsam.fed.models.vit import vit_b_32

__all__ = ["CNN", "EMNISTCNN", "MLP", "MODELS", "LeNet", "Pixels", "ResNet18GN", "build", "vit_b_32"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": CNN,
    "mlp": MLP,
    "emnist_cnn": EMNISTCNN,
    "lenet": LeNet,
    "resnet18_gn": ResNet18GN,
    "vit_b_32": vit_b_32,
}


def build(
    name: str | Callable[..., nn.Module] | nn.Module, in_shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> nn.Module:
    """Return a new model on the CPU whose initial weights are a function of `seed`. The caller's random state stays.

    Args:
        name: name in `MODELS`, or a class or function that makes a module, or a module, which is copied.
        in_shape, classes: shape of a sample and number of classes, for functions with parameters of these names.
        seed: random seed of the weights.
        **options: passed in any case.

    Raises:
        ValueError: the name is unknown, or the model does not take the options.
    """
    make: Any = MODELS.get(name) if isinstance(name, str) else name
    if not callable(make):
        raise ValueError(
            f"model must be one of {', '.join(map(repr, MODELS))} or a function that makes one, in a config its import "
            f"path 'package.module:name', got {name!r}{nearest(name, MODELS) if isinstance(name, str) else ''}"
        )
    label = name if isinstance(name, str) else getattr(make, "__qualname__", type(make).__name__)
    if isinstance(make, nn.Module) and not options:
        return copy.deepcopy(make)
    parameters = inspect.signature(make).parameters
    arguments = {key: value for key, value in (("in_shape", in_shape), ("classes", classes)) if key in parameters}
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed: it would seed the CUDA generators as well, which nothing restores
        torch.default_generator.manual_seed(seed)
        try:
            model = call_with_options(make, arguments | options, f"model_options of {label}")
        except TypeError as error:
            if not isinstance(name, str) or not options:
                raise  # an error in the user's code is not changed
            raise ValueError(f"model_options of {label}: {options} makes no model ({error})") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {label!r} must make a torch.nn.Module, got {type(model).__name__}")
    return model
