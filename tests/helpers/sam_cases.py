"""Bases, closures, a small model and its training, for the tests of FusedSAM."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM, backends
from tests.helpers.sam_oracle import backward, landscape, make_parameters

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
# Two fused bases and an unfused base.
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (ADAMW, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05}),
}


def closure_of(params: list[nn.Parameter], zero_grad: Callable[[], None] | None = None) -> Callable[[], Tensor]:
    """Return a closure with the loss and the backward pass."""

    def closure() -> Tensor:
        if zero_grad is not None:
            zero_grad()
        loss = landscape(params, 0)
        loss.backward()
        return loss

    return closure


class Model(nn.Module):
    """Parameters in a module, one of them channels-last."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(make_parameters([(5, 3), (8,), (2, 3, 4, 4)], dtype, device, seed=seed))
        self.weights[2].data = self.weights[2].data.to(memory_format=torch.channels_last)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.parameters())


def train(model: Model, opt: FusedSAM, steps: range) -> None:
    for step in steps:
        backward(model.params, step)
        opt.first_step()
        second_half(model, opt, step)


def second_half(model: Model, opt: FusedSAM, step: int) -> None:
    backward(model.params, step)
    opt.second_step()


SHAPES: list[tuple[int, ...]] = [(5, 3), (8,), (), (0, 2), (70, 130)]
HALF = torch.bfloat16
native_backend = next(b for b in backends.table() if (b.name, b.device) == ("native", "cpu"))
native = pytest.mark.skipif(not native_backend.available, reason=f"native on cpu: {native_backend.reason}")


def places(params: Sequence[Tensor]) -> list[int]:
    return [p.data_ptr() for p in params]


def first_half(opt: FusedSAM, params: list[nn.Parameter], step: int = 0) -> None:
    backward(params, step)
    opt.first_step()


def halves(opt: FusedSAM, params: list[nn.Parameter], step: int = 0) -> None:
    first_half(opt, params, step)
    backward(params, step)
    opt.second_step()


class Prepared:
    """Gradients as `bench.workload.Gradients` has them, in any dtype."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.sets = [[torch.randn_like(w) for w in weights] for _ in range(3)]

    def tensors(self, index: int) -> Sequence[Tensor]:
        return self.sets[index % 3]

    flat = tensors
