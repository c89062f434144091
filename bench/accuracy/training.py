"""One run, how long a step takes, and the choice of the two numbers of the grid."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.accuracy.contenders import Contender
from bench.accuracy.tasks import Pair, Task
from bench.timing import interleave
from fastsam.arena import Layout
from fastsam.fed.measures.objective import Objective
from fastsam.fed.measures.sharpness import one_step
from fastsam.fed.step.model_copy import Replica, trainable

RADIUS = 0.1  # of the sharpness
SAMPLE = 10  # steps of a sample of the clock: two whole periods of what perturbs in one step of five


@dataclass(frozen=True)
class Trial:
    """What is tuned: the learning rate, and the contender's second number."""

    lr: float
    value: float


@dataclass(frozen=True)
class Outcome:
    """Share of the evaluated labels that are right; how far the training loss rises within a step of length RADIUS
    along its gradient."""

    accuracy: float
    sharpness: float | None = None


def run(
    task: Task, contender: Contender, trial: Trial, seed: int, steps: int, tuning: bool = False, sharp: bool = False
) -> Outcome:
    """Trains from the seed's initial weights on its samples, in its order; the learning rate falls linearly to 0."""
    train, held_out = task.split(seed, tuning)
    model, optimizer = _start(task, contender, trial, seed)
    act = _step_of(model, optimizer, _batches(train, task.batch, seed))
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = trial.lr * (1 - number / steps)
        act()
    leave = getattr(optimizer, "eval", None)  # a variant of one pass rests at perturbed weights
    if leave is not None:
        leave()
    model.eval()
    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).double().mean()
    return Outcome(float(right), _sharpness(model, train) if sharp else None)


def tune(task: Task, contender: Contender, seeds: list[int], steps: int) -> list[dict[str, Any]]:
    """Every trial of the grid with its mean validation accuracy over the seeds, the best first; of equals the first of
    the grid."""
    trials = [Trial(lr, value) for lr, value in itertools.product(task.lrs, contender.values)]
    scored = []
    for trial in trials:
        found = [run(task, contender, trial, seed, steps, tuning=True).accuracy for seed in seeds]
        scored.append({**asdict(trial), "validation": statistics.fmean(found)})
    return sorted(scored, key=lambda row: -row["validation"])


def step_times(task: Task, contenders: dict[str, Contender], rounds: int) -> dict[str, float]:
    """Seconds per step, medians over interleaved rounds, each beginning with another contender."""
    acts = {}
    for name, contender in contenders.items():
        trial = Trial(task.lrs[0], contender.values[0])
        model, optimizer = _start(task, contender, trial, seed=0)
        acts[name] = _step_of(model, optimizer, _batches(task.split(0, tuning=True)[0], task.batch, seed=0))

    def sample(act: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(SAMPLE):
            act()
        return (time.perf_counter() - start) / SAMPLE

    taken = interleave({name: partial(sample, act) for name, act in acts.items()}, rounds)
    return {name: statistics.median(times) for name, times in taken.seconds.items()}


def steps_in_equal_time(steps: int, cost: float) -> int:
    """How many steps, each as long as `cost` of SGD's, fit into the time of `steps` of SGD's; one at least, and no more
    than `steps`."""
    return max(1, min(steps, int(steps / cost)))


def _start(task: Task, contender: Contender, trial: Trial, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
    return model, contender.optimizer(model, trial.lr, trial.value)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Pair]) -> Callable[[], object]:
    def act() -> object:
        x, y = next(batches)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return act


def _batches(pair: Pair, size: int, seed: int) -> Iterator[Pair]:
    """For ever: whole batches of a fresh order in each epoch."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        for part in torch.randperm(len(pair[0]), generator=rng).split(size):
            if len(part) == min(size, len(pair[0])):
                yield pair[0][part], pair[1][part]


def _sharpness(model: nn.Module, train: Pair) -> float:
    layout = Layout.of(trainable(model))
    replica = Replica(model, layout, torch.zeros(layout.row_size))
    objective = Objective.pooled(replica, cross_entropy, [train])
    return one_step(objective, replica.row.clone(), RADIUS)
