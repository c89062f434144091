"""The time of steps with compact masters beside those with full ones: `python -m bench.compact` prints the table of
docs/fused_sam.md.

A chain of square linear layers in bfloat16, SGD with momentum, one thread. Samples are interleaved; a ratio is the
median over the rounds, with its quartiles, of a round's two samples, in time of the processor. Nothing is timed unless
the weights are the same bits after some steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.timing import Summary, no_garbage_collection
from fastsam import FusedSAM

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "compact": {"master": "compact"},
    "compact, momenta in bfloat16": {"master": "compact", "momentum_dtype": torch.bfloat16},
}
EXACT = "full", "compact"
BATCHES = 0, 64, 512  # 0: the optimizer's part alone, with gradients that are there


class Training:
    """One contender: its own copy of the model, and its optimizer."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = FusedSAM(self.model.parameters(), torch.optim.SGD, lr=1e-3, momentum=0.9, **KINDS[kind])
        self.ready = [torch.randn_like(p) for p in self.model.parameters()]

    def step(self, batch: Tensor | None) -> None:
        """None: without passes."""
        for half in (self.optimizer.first_step, self.optimizer.second_step):
            self.optimizer.zero_grad()
            if batch is None:
                for p, g in zip(self.model.parameters(), self.ready, strict=True):
                    p.grad = g
            else:
                self.model(batch).square().mean().backward()
            half()

    def sample(self, batch: Tensor | None) -> float:
        """Seconds of a processor per step."""
        start = time.process_time()
        self.step(batch)
        return time.process_time() - start


def chain(layers: int, width: int) -> nn.Module:
    """Square matrices, one after the other."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(torch.bfloat16)


def check() -> None:
    """Raises AssertionError where compact masters do not give the weights of full ones."""
    batch, model = torch.randn(16, 512).to(torch.bfloat16), chain(3, 512)
    full, compact = (Training(model, kind) for kind in EXACT)
    for _ in range(3):
        full.step(batch)
        compact.step(batch)
    assert all(map(torch.equal, full.model.parameters(), compact.model.parameters()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    check()
    model = chain(options.layers, options.width)
    trainings = {kind: Training(model, kind) for kind in KINDS}
    print("| batch | masters | ms a step | of full masters |\n|---:|---|---:|---:|")
    for size in BATCHES:
        batch = torch.randn(size, options.width).to(torch.bfloat16) if size else None
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with no_garbage_collection():
            for number in range(options.rounds + 1):
                for kind, training in trainings.items():
                    seconds = training.sample(batch)
                    if number:  # the first round warms up
                        taken[kind].append(seconds)
        for kind, samples in taken.items():
            ratio = Summary.of_ratios(samples, taken["full"])
            milliseconds = Summary.of([1e3 * s for s in samples]).median
            title = f"{size} rows" if size else "no passes"
            print(f"| {title} | {kind} | {milliseconds:.0f} | {ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f}) |")


if __name__ == "__main__":
    main()
