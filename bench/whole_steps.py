"""Whole training steps, forward and backward passes included: FusedSAM, pytorch-optimizer and the copied class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.contenders import Contender, OptimizerStepper
from bench.fed.workload import cnn, mlp
from bench.timing import Machine, interleave, ratios, summary
from fastsam.fed.models import build

LOSS_TOLERANCE = 1e-3  # relative, after the first step


class Training(NamedTuple):
    """A model with one batch, and the number of steps of a sample."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int


TRAININGS = {
    "mlp": Training("MLP, 2.4 k parameters, batch of 16", mlp, (16, 64), 40),
    "cnn": Training("CNN, 225 k parameters, batch of 16", cnn, (16, 1, 28, 28), 8),
    "resnet18": Training(
        "ResNet-18, 11.2 M parameters, batch of 16", lambda: build("resnet18_gn", (3, 32, 32), 10, seed=0),
        (16, 3, 32, 32), 1,
    ),
}  # fmt: skip


def measure(contenders: Sequence[Contender], training: Training, machine: Machine, rounds: int) -> dict[str, Any]:
    """Measure the whole steps of contenders that are optimizers, and return the case.

    A contender is not timed if its loss after one step differs from the first contender's.
    """
    torch.manual_seed(0)
    model, x = training.make(), torch.randn(training.shape, device=machine.device)
    y = torch.arange(len(x), device=machine.device) % 10
    first_loss, rows, samples = None, dict[str, dict[str, Any]](), {}
    for contender in contenders:
        rows[contender.name] = row = {"name": contender.name, "title": contender.title, "ours": bool(contender.backend)}
        if contender.absent:
            row["absent"] = contender.absent
            continue
        step = _step_of(contender, copy.deepcopy(model).to(machine.device), x, y)
        step()
        loss = step()
        first_loss = loss if first_loss is None else first_loss
        if not abs(loss - first_loss) <= LOSS_TOLERANCE * first_loss:
            row["problem"] = f"the loss after a step is {loss:.6g} instead of {first_loss:.6g}"
            continue
        samples[contender.name] = lambda step=step: machine.sample(lambda: [step() for _ in range(training.steps)])
    timings = interleave(samples, rounds)
    for name, seconds in timings.seconds.items():
        ratios_to = {"copied": ratios(seconds, timings.seconds["copied"])} if "copied" in samples else {}
        rows[name]["eager"] = {"seconds": summary([s / training.steps for s in seconds]), "to": ratios_to}
    return {"title": training.title, "steps": training.steps, **timings.facts, "rows": list(rows.values())}


def _step_of(contender: Contender, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes one step of SAM on the batch and returns the loss of the first pass."""
    stepper = contender.build([p.detach() for p in model.parameters()])
    assert isinstance(stepper, OptimizerStepper)
    for (name, _), p in zip(list(model.named_parameters()), stepper.parameters, strict=True):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, p)

    def step() -> float:
        losses = []
        for phase in stepper.phases():
            stepper.optimizer.zero_grad()
            losses.append(nn.functional.cross_entropy(model(x), y))
            losses[-1].backward()
            phase()
        return losses[0].item()

    return step
