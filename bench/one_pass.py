"""Whole training steps of variants of one pass beside plain SGD's: `python -m bench.one_pass` prints the table of
docs/variants.md.

Each model is a perceptron of equal layers, trained on one random batch by `torch.optim.SGD(fused=True)` with momentum
and by ours: forward, backward, update. Samples of all are interleaved; a ratio is the median over the rounds, with its
quartiles, of a round's two samples. Nothing is timed unless a radius of 0 gives SGD's weights.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from bench.timing import Summary, no_garbage_collection
from fastsam import MSAM, SAM, FusedSAM
from fastsam.optim.variants import LastGradient

SIZES = {"50 k": (5, 100, 32), "1 M": (4, 512, 128), "11 M": (11, 1024, 128)}  # layers, width, batch
OPTIONS = {"lr": 1e-3, "momentum": 0.9}
RHO, SECONDS = 0.3, 0.1  # a sample's length, about
VARIANTS: dict[str, SAM] = {"MSAM": MSAM(RHO), "LastGradient": LastGradient(RHO), "SAM": SAM(RHO)}


class Training:
    """One contender: its own copy of the model, and its optimizer; `sam`: None for SGD."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, sam: SAM | None) -> None:
        self.model, self.batch = copy.deepcopy(model), batch
        params = list(self.model.parameters())
        self.optimizer = (
            torch.optim.SGD(params, fused=True, **OPTIONS)
            if sam is None
            else FusedSAM(params, torch.optim.SGD, sam=sam, **OPTIONS)
        )
        self.update: Callable[[], object] = self.optimizer.step
        self.two_passes = type(sam) is SAM
        self.in_updates = 0.0

    def step(self) -> None:
        if self.two_passes:
            self._pass()
            self._timed(self.optimizer.first_step)  # type: ignore[union-attr]
        self._pass()
        self._timed(self.update)

    def _pass(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def _timed(self, act: Callable[[], object]) -> None:
        start = time.perf_counter()
        act()
        self.in_updates += time.perf_counter() - start

    def sample(self, steps: int) -> tuple[float, float]:
        """Seconds per step, and of them in the optimizer."""
        self.in_updates, start = 0.0, time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps, self.in_updates / steps


def perceptron(layers: int, width: int) -> nn.Module:
    """`layers` square matrices with biases and tanh between them."""
    torch.manual_seed(0)
    return nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.Tanh()) for _ in range(layers))))


def check(model: nn.Module, batch: torch.Tensor) -> None:
    """Raises AssertionError where a radius of 0 does not give SGD's weights."""
    for variant in (MSAM(0.0), LastGradient(0.0)):
        both = Training(model, batch, None), Training(model, batch, variant)
        for _, training in itertools.product(range(3), both):
            training.step()
        for p, q in zip(both[0].model.parameters(), both[1].model.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def rows(name: str, rounds: int) -> list[str]:
    """Lines of the table for one size."""
    layers, width, size = SIZES[name]
    model, batch = perceptron(layers, width), torch.randn(size, width, generator=torch.Generator().manual_seed(1))
    check(model, batch)
    trainings = {"SGD": Training(model, batch, None)}
    trainings |= {label: Training(model, batch, sam) for label, sam in VARIANTS.items()}
    steps = max(2, round(SECONDS / trainings["SGD"].sample(3)[0]))
    taken: dict[str, list[tuple[float, float]]] = {label: [] for label in trainings}
    with no_garbage_collection():
        for number in range(rounds + 1):
            order = list(trainings)
            start = number % len(order)
            for label in order[start:] + order[:start]:
                sample = trainings[label].sample(steps)
                if number:  # the first round warms up
                    taken[label].append(sample)
    lines = []
    for label in VARIANTS:
        whole, update = (
            Summary.of_ratios([s[i] for s in taken[label]], [s[i] for s in taken["SGD"]]) for i in range(2)
        )
        milliseconds = Summary.of([s[0] * 1e3 for s in taken[label]]).median
        lines.append(
            f"| {name} | `{label}` | {milliseconds:.2f} | {whole.median:.2f} ({whole.q1:.2f} to {whole.q3:.2f}) | "
            f"{update.median:.2f} ({update.q1:.2f} to {update.q3:.2f}) |"
        )
    return lines


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    print("| parameters | variant | ms a step | of SGD's whole step | of SGD's update |\n|---|---|---:|---:|---:|")
    for name in SIZES:
        print("\n".join(rows(name, rounds)), flush=True)
