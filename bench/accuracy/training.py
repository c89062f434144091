"""The measurement of one contender on one task: tuning, the report's runs, and the time of a step.

All contenders are tuned with equally many trials, on seeds and samples that the report does not use. Then each trains
with the seeds of the report, by two protocols. `steps` has the task's number of steps. `time` has the number of steps
that fits into SGD's time, by measured times of a step.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bench.accuracy.tasks import TASKS, Pair, Task
from bench.timing import interleave
from fastsam import SAM, FusedSAM, variants
from fastsam.arena import Layout
from fastsam.fed.measures.objective import Objective
from fastsam.fed.measures.sharpness import one_step
from fastsam.fed.update.model_copy import Replica, trainable
from fastsam.optim.variants.sam import OnePassDirection

SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (1000,)
QUICK_STEPS = 20
RADIUS = 0.1  # radius of the sharpness measure
SAMPLE = 10  # steps of one timing sample: two whole periods of variants that perturb in one step of five
Trial = tuple[float, float]  # learning rate, and the second number of a contender

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
DECAYS, RHOS = (0.0, 5e-4, 5e-3), (0.02, 0.05, 0.15)


@dataclass(frozen=True)
class Contender:
    """A contender of the comparison, and the second number of its grid.

    Args:
        make: function from the second number of a trial to a variant; None for SGD.
        values: grid of the second number.
        second: name of the second number.
        share (float): fraction of a task's steps.
        start (float): fraction of a training's steps before the variant perturbs.
    """

    make: Callable[[float], SAM] | None
    values: tuple[float, ...] = RHOS
    second: str = "rho"
    share: float = 1.0
    start: float = 0.0

    def variant(self, value: float, steps: int) -> SAM | None:
        """Return the variant of a trial whose training has `steps` steps; None for SGD."""
        return None if self.make is None else replace(self.make(value), start=round(self.start * steps))

    def passes(self, value: float, steps: int) -> int:
        """Return the number of backward passes of a training."""
        sam = self.variant(value, steps)
        if sam is None or sam.one_pass_direction is not OnePassDirection.NONE:
            return steps
        return steps + sum(map(sam.perturbs_at, range(steps)))

    def optimizer(self, model: nn.Module, lr: float, value: float, steps: int) -> torch.optim.Optimizer:
        """Return the optimizer of a trial."""
        sam = self.variant(value, steps)
        if sam is None:
            params = list(model.parameters())
            return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM, weight_decay=value, fused=True)
        groups = variants.SAMON.groups(model) if isinstance(sam, variants.SAMON) else model.parameters()
        return FusedSAM(groups, torch.optim.SGD, variant=sam, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def contenders() -> dict[str, Contender]:
    """Return SGD, and every variant of SAM with its own defaults and radii."""
    table = {
        "SGD": Contender(None, DECAYS, "weight decay"),
        "SGD, half the steps": Contender(None, DECAYS, "weight decay", share=0.5),  # the effect of only stopping early
        "SAM": Contender(lambda rho: SAM(rho)),
        "ASAM": Contender(lambda rho: SAM(rho, adaptive=True), (0.2, 0.5, 1.0)),
        "SAM, interval=5": Contender(lambda rho: SAM(rho, interval=5)),
        "LESAM": Contender(lambda sigma: SAM(0.15, rho_fn=variants.LESAM(sigma)), (0.01, 0.03, 0.1), "sigma"),
        "WSAM": Contender(lambda rho: variants.WSAM(rho), (0.005, 0.015, 0.05)),
        "LookSAM": Contender(lambda rho: variants.LookSAM(rho, k=5)),
        "SAMON": Contender(lambda rho: variants.SAMON(rho), (0.1, 0.5, 2.0)),
        "MSAM": Contender(lambda rho: variants.MSAM(rho), (0.05, 0.15, 0.5)),
    }
    for name in variants.__all__:
        kind = getattr(variants, name)
        if name not in table and isinstance(kind, type) and issubclass(kind, SAM):
            table[name] = Contender(lambda rho, kind=kind: kind(rho))  # type: ignore[misc]
    return table


def measure(name: str, variant: str, quick: bool) -> dict[str, Any]:
    """Return a task's case with the contender's row: its grid, best first, and the best trial's runs by protocol."""
    task, seeds, contender = TASKS[name], SEEDS[:2] if quick else SEEDS, contenders()[variant]
    steps = QUICK_STEPS if quick else task.steps
    times = step_times(task, {"SGD": contenders()["SGD"], variant: contender}, 2 if quick else 15)
    relative_time, num_steps = times[variant] / times["SGD"], round(contender.share * steps)
    grid = tune(task, contender, TUNING_SEEDS, num_steps)
    trial = (grid[0]["lr"], grid[0]["value"])
    results: dict[int, dict[str, Any]] = {}
    for count in dict.fromkeys((num_steps, fewer_steps := min(num_steps, steps_in_equal_time(steps, relative_time)))):
        runs = [run(task, contender, trial, seed, count, sharp=True) for seed in seeds]
        accuracy, sharpness = ([one[i] for one in runs] for i in (0, 1))
        results[count] = {
            "steps": count, "accuracy": accuracy, "sharpness": sharpness, "mean": statistics.fmean(accuracy),
            "std": statistics.stdev(accuracy), "rise": statistics.fmean(sharpness),
        }  # fmt: skip
    text = f"lr {trial[0]:g}, {contender.second} {trial[1]:g}"
    row = {"name": variant, "title": f"`{variant}`", "cost": relative_time, "chosen": text}
    row |= {"grid": grid, "steps": results[num_steps], "time": results[fewer_steps]}
    facts = {"title": task.title, "noise": task.noise, "train": task.train, "steps": steps, "lrs": list(task.lrs)}
    return {**facts, "rows": [row]}


def run(
    task: Task, contender: Contender, trial: Trial, seed: int, steps: int, is_tuning: bool = False, sharp: bool = False
) -> tuple[float, float]:
    """Train from the seed's initial weights on its samples, in its order; the learning rate falls linearly to 0.

    Return the share of the evaluated labels that are right, and with `sharp` how far the training loss rises within a
    step of length `RADIUS` along its gradient.
    """
    train, held_out = task.split(seed, is_tuning)
    model, optimizer = _start(task, contender, trial, seed, steps)
    act = _step_of(model, optimizer, _batches(train, task.batch, seed))
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = trial[0] * (1 - number / steps)
        act()
    if isinstance(optimizer, FusedSAM):  # one-pass variants leave the weights perturbed
        optimizer.eval()
    model.eval()
    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).double().mean()
    return float(right), _sharpness(model, train) if sharp else math.nan


def tune(task: Task, contender: Contender, seeds: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Return every trial of the grid with its mean validation accuracy over the seeds, the best first.

    Equally good trials keep the order of the grid.
    """
    trials = []
    for lr, value in itertools.product(task.lrs, contender.values):
        accuracies = [run(task, contender, (lr, value), seed, steps, is_tuning=True)[0] for seed in seeds]
        trials.append({"lr": lr, "value": value, "validation": statistics.fmean(accuracies)})
    return sorted(trials, key=lambda row: -row["validation"])


def step_times(task: Task, contenders: dict[str, Contender], rounds: int) -> dict[str, float]:
    """Return seconds per step, medians over interleaved rounds, each beginning with another contender."""
    acts = {}
    for name, contender in contenders.items():
        model, optimizer = _start(task, contender, (task.lrs[0], contender.values[0]), seed=0, steps=0)
        acts[name] = _step_of(model, optimizer, _batches(task.split(0, is_tuning=True)[0], task.batch, seed=0))

    def sample(act: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(SAMPLE):
            act()
        return (time.perf_counter() - start) / SAMPLE

    samples = interleave({name: partial(sample, act) for name, act in acts.items()}, rounds)
    return {name: statistics.median(times) for name, times in samples.seconds.items()}


def steps_in_equal_time(steps: int, relative_time: float) -> int:
    """Return how many steps, each as long as `cost` of SGD's, fit into the time of `steps` of SGD's; one at least, and
    no more than `steps`."""
    return max(1, min(steps, int(steps / relative_time)))


def _start(
    task: Task, contender: Contender, trial: Trial, seed: int, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
    return model, contender.optimizer(model, *trial, steps)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Pair]) -> Callable[[], object]:
    def act() -> object:
        x, y = next(batches)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return act


def _batches(pair: Pair, size: int, seed: int) -> Iterator[Pair]:
    """Yield whole batches for ever, of a fresh order in each epoch."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        for part in torch.randperm(len(pair[0]), generator=rng).split(size):
            if len(part) == min(size, len(pair[0])):
                yield pair[0][part], pair[1][part]


def _sharpness(model: nn.Module, train: Pair) -> float:
    layout = Layout.from_tensors(trainable(model))
    replica = Replica(model, layout, torch.zeros(layout.row_size))
    objective = Objective.sample_mean(replica, cross_entropy, [train])
    return one_step(objective, replica.row.clone(), RADIUS)
