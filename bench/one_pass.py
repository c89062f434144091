"""Whole training steps of variants of one pass next to plain SGD's: `python -m bench.one_pass` prints the table of
docs/variants.md.

Each model is a perceptron of equal layers, trained on one random batch by `torch.optim.SGD(fused=True)` with momentum
and by ours: forward, backward, update. Nothing is timed unless a radius of 0 gives SGD's weights.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bench.tables import table
from bench.timing import Summary, interleave
from fastsam import MSAM, SAM, FusedSAM
from fastsam.optim.variants import LastGradient

SIZES = {"50 k": (5, 100, 32), "1 M": (4, 512, 128), "11 M": (11, 1024, 128)}  # layers, width, batch
OPTIONS = {"lr": 1e-3, "momentum": 0.9}
RHO, SECONDS = 0.3, 0.1  # a sample's length, about
VARIANTS: dict[str, SAM] = {"MSAM": MSAM(RHO), "LastGradient": LastGradient(RHO), "SAM": SAM(RHO)}
HEADS = ["parameters", "variant", "ms a step", "of SGD's whole step", "of SGD's update"]


class Training:
    """One contender: its own copy of the model, and its optimizer; `sam`: None for SGD."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, sam: SAM | None) -> None:
        self.model, self.batch = copy.deepcopy(model), batch
        params = list(self.model.parameters())
        ours = sam and FusedSAM(params, torch.optim.SGD, variant=sam, **OPTIONS)
        self.optimizer = ours or torch.optim.SGD(params, fused=True, **OPTIONS)
        first = (ours.first_step,) if ours and type(sam) is SAM else ()
        self.phases: tuple[Callable[[], object], ...] = (*first, self.optimizer.step)

    def sample(self, steps: int) -> tuple[float, float]:
        """Return the seconds per step, and the part of them in the optimizer."""
        in_updates, start = 0.0, time.perf_counter()
        for _, phase in itertools.product(range(steps), self.phases):
            self.optimizer.zero_grad()
            self.model(self.batch).square().mean().backward()
            since = time.perf_counter()
            phase()
            in_updates += time.perf_counter() - since
        return (time.perf_counter() - start) / steps, in_updates / steps


def check(model: nn.Module, batch: torch.Tensor) -> None:
    """Raise AssertionError if a radius of 0 does not give SGD's weights."""
    for variant in (MSAM(0.0), LastGradient(0.0)):
        both = Training(model, batch, None), Training(model, batch, variant)
        for training in both:
            training.sample(3)
        for p, q in zip(both[0].model.parameters(), both[1].model.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def rows(name: str, rounds: int) -> list[list[str]]:
    """Return the rows of one size: medians over rounds of the ratios of a round's two samples, with quartiles."""
    layers, width, size = SIZES[name]
    torch.manual_seed(0)
    model = nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.Tanh()) for _ in range(layers))))
    batch = torch.randn(size, width, generator=torch.Generator().manual_seed(1))
    check(model, batch)
    trainings = {"SGD": Training(model, batch, None)}
    trainings |= {label: Training(model, batch, sam) for label, sam in VARIANTS.items()}
    steps = max(2, round(SECONDS / trainings["SGD"].sample(3)[0]))
    taken = interleave({label: partial(one.sample, steps) for label, one in trainings.items()}, rounds).seconds
    made = []
    for label in VARIANTS:
        (whole, update), (base, base_update) = zip(*taken[label], strict=True), zip(*taken["SGD"], strict=True)
        both = Summary.of_ratios(whole, base), Summary.of_ratios(update, base_update)
        ratios = [f"{one.median:.2f} ({one.q1:.2f} to {one.q3:.2f})" for one in both]
        made.append([name, f"`{label}`", f"{Summary.of(whole).median * 1e3:.2f}", *ratios])
    return made


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    print(table(HEADS, [row for name in SIZES for row in rows(name, rounds)], "llrrr"))
