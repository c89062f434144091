"""The loops that one writes without a library: over clients, and over batches."""

import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from bench.fed.workload import BATCH, LR, RHO, Workload

loss = nn.functional.cross_entropy


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """Train with a bare loop and return the model.

    Args:
        workload: the workload.
        rounds: number of rounds.
        tick: function that is called after every round.
        option: "tensors" is SGD over the parameters' list. "channels_last" is the same with the model in this memory
            format, one more line, which makes convolutions and pooling faster on a CPU. "flat": all parameters are
            views of one buffer.
    """
    model, data = workload.make_model(), workload.tensors()
    if option == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    local = (Flat if option == "flat" else Tensors)(model, sharp=workload.algorithm == "fedsam")
    for _ in range(rounds):
        start = local.weights()
        mean = [torch.zeros_like(w) for w in start]
        for i in random.sample(range(workload.clients), workload.cohort):
            local.load(start)
            for x, y in batches(*data[i]):
                local.step(x, y)
            for m, w in zip(mean, local.weights()):
                m.add_(w, alpha=1 / workload.cohort)
        local.load(mean)
        tick()
    return model


def batches(x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(y)).to(y.device)
    return zip(x[order].split(BATCH), y[order].split(BATCH))


class Tensors:
    """Plain SGD; with `sharp`, the SAM step as it is usually copied, parameter by parameter."""

    def __init__(self, model: nn.Module, sharp: bool) -> None:
        self.model, self.sharp = model, sharp
        self.parameters = list(model.parameters())
        self.tensors: list[Tensor] = self.parameters  # type: ignore[assignment] # what is updated

    def weights(self) -> list[Tensor]:
        return [w.detach().clone() for w in self.tensors]

    @torch.no_grad()
    def load(self, weights: list[Tensor]) -> None:
        for tensor, w in zip(self.tensors, weights):
            tensor.copy_(w)

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss(self.model(x), y), self.parameters))

    def norm(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([g.norm() for g in grads]).norm()

    def step(self, x: Tensor, y: Tensor) -> None:
        grads = self.gradients(x, y)
        with torch.no_grad():
            if self.sharp:
                scale = RHO / (self.norm(grads) + 1e-12)
                start = self.weights()
                for tensor, g in zip(self.tensors, grads):
                    tensor.add_(g * scale)
                with torch.enable_grad():
                    grads = self.gradients(x, y)
                self.load(start)
            for tensor, g in zip(self.tensors, grads):
                tensor.sub_(g, alpha=LR)


class Flat(Tensors):
    """The same over one flat buffer."""

    def __init__(self, model: nn.Module, sharp: bool) -> None:
        super().__init__(model, sharp)
        self.tensors, offset = [torch.cat([p.detach().flatten() for p in self.parameters])], 0
        for p in self.parameters:
            p.data = self.tensors[0][offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        grads = super().gradients(x, y)
        return [torch.cat([g.flatten() for g in grads])]

    def norm(self, grads: list[Tensor]) -> Tensor:
        return grads[0].norm()
