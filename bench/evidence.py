"""Evidence for SAM on MNIST-1D: 4,000 series of 40 numbers, made to tell methods apart in minutes.

Source of data and models: Greydanus and Kobak, "Scaling down deep learning with MNIST-1D" (ICML 2024). The package
`mnist1d` makes the series; nothing is downloaded. Every method has nine trials: learning rates times
weight decays for SGD, learning rates times radii for SAM. Trials are ranked on 800 held-out training series with seeds
that the report does not use. Then the best trial trains on all series, and the test set is read once for each seed.
"""

import functools
import itertools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.case import Case, Options
from fastsam import SAM, FusedSAM, variants

Pair = tuple[Tensor, Tensor]
Trial = dict[str, float]  # learning rate, weight decay and radius

PROCESSES = 2
BATCH, MOMENTUM, DECAY, HELD_OUT, CLASSES, LENGTH = 100, 0.9, 1e-3, 800, 10, 40
STEPS, QUICK_STEPS = 3000, 30
LRS, DECAYS = (0.03, 0.1, 0.2), (1e-3, 3e-3, 1e-2)
FIRST_TUNING_SEED = 1000
LATE = 0.75  # fraction of the steps before the first step of SAM
RHOS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # of the curve


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        make: function of a radius and the number of steps that returns a variant and options of FusedSAM; None for SGD.
        rhos: radii of the grid.
        share: number of steps, relative to SGD's.
    """

    make: Callable[[float, int], dict[str, Any]] | None = None
    rhos: Sequence[float] = (0.1, 0.3, 0.6)
    share: float = 1.0

    def trials(self) -> Iterator[Trial]:
        """Yield the grid: nine trials."""
        for lr, value in itertools.product(LRS, DECAYS if self.make is None else self.rhos):
            yield (
                {"lr": lr, "decay": value, "rho": 0.0}
                if self.make is None
                else {"lr": lr, "decay": DECAY, "rho": value}
            )


METHODS = {
    "SGD": Method(),
    "SGD, twice the steps": Method(share=2.0),
    "SAM": Method(lambda rho, steps: {"rho": rho}),
    "ASAM": Method(lambda rho, steps: {"variant": SAM(rho, adaptive=True)}, (0.5, 1.0, 2.0)),
    "MSAM": Method(lambda rho, steps: {"variant": variants.MSAM(rho)}, (0.3, 1.0, 3.0)),
    "SAM, interval=2": Method(lambda rho, steps: {"variant": SAM(rho, interval=2)}),
    "SAM, late": Method(lambda rho, steps: {"variant": SAM(rho, start=round(LATE * steps))}),
}


class Gru(nn.Module):
    """A bidirectional GRU over the series, and a dense layer over all its outputs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width * LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.gru(x[..., None])[0].flatten(1))
        return scores


def mlp(width: int = 100) -> nn.Module:
    """Return the MLP of the paper."""
    return nn.Sequential(
        nn.Linear(LENGTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def cnn(channels: int = 25) -> nn.Module:
    """Return the CNN of the paper: three convolutions with a stride of 2."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, LENGTH))]
    for inputs, size in ((1, 5), (channels, 3), (channels, 3)):
        layers += [nn.Conv1d(inputs, channels, size, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * channels, CLASSES))


@dataclass(frozen=True)
class Task:
    """A model and a fraction of wrong training labels.

    Args:
        seeds: number of seeds of the report.
        tuning_seeds: number of seeds of the tuning.
    """

    title: str
    model: Callable[[], nn.Module]
    noise: float = 0.0
    seeds: int = 8
    tuning_seeds: int = 2


KINDS = ((mlp, 8, 2, (0, 20, 40)), (cnn, 5, 1, (0, 20, 40)), (Gru, 5, 1, (0,)))
TASKS = {
    f"{model.__name__.lower()}-{percent}": Task(
        f"{model.__name__.upper()}, {f'{percent} % wrong' if percent else 'right labels'}", model, percent / 100, n, t
    )
    for model, n, t, noises in KINDS
    for percent in noises
}


@functools.cache
def data() -> tuple[Pair, Pair]:
    """Return the training series and the test series of the package's default, labels int64."""
    from mnist1d.data import make_dataset

    arrays = make_dataset()
    pairs = ((arrays[f"x{end}"], arrays[f"y{end}"]) for end in ("", "_test"))
    train, test = ((torch.from_numpy(x).float(), torch.from_numpy(y).long()) for x, y in pairs)
    return train, test


def split(noise: float, is_tuning: bool) -> tuple[Pair, Pair]:
    """Return training samples, of which a fraction has a wrong class, and samples to evaluate."""
    (x, y), test = data()
    if is_tuning:
        test, (x, y) = (x[:HELD_OUT], y[:HELD_OUT]), (x[HELD_OUT:], y[HELD_OUT:])
    rng = torch.Generator().manual_seed(0)
    is_wrong = torch.rand(len(y), generator=rng) < noise
    return (x, torch.where(is_wrong, (y + torch.randint(1, CLASSES, y.shape, generator=rng)) % CLASSES, y)), test


def run(task: Task, method: Method, trial: Trial, seed: int, steps: int, is_tuning: bool = False) -> float:
    """Train a seed's model, with a rate that falls to 0 as a cosine, and return its accuracy."""
    (x, y), held_out = split(task.noise, is_tuning)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
    steps, rng = round(method.share * steps), torch.Generator().manual_seed(seed)
    options = {"lr": trial["lr"], "momentum": MOMENTUM, "weight_decay": trial["decay"]}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), **options)
    if method.make is not None:
        optimizer = FusedSAM(model.parameters(), torch.optim.SGD, **method.make(trial["rho"], steps), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for number in range(steps):
        if number % (len(y) // BATCH) == 0:
            batches = iter(torch.randperm(len(y), generator=rng).split(BATCH))
        places = next(batches)

        def closure(part: Pair = (x[places], y[places])) -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(model(part[0]), part[1])
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()
    if isinstance(optimizer, FusedSAM):  # methods of one pass leave the weights perturbed
        optimizer.eval()
    with torch.no_grad():
        return float((model.eval()(held_out[0]).argmax(1) == held_out[1]).double().mean())


def measure_row(task_name: str, name: str, quick: bool) -> dict[str, Any]:
    """Return the row of a method: its grid, best first, and the accuracies of the best trial, a number a seed."""
    torch.set_num_threads(1)
    task, method, steps, start = TASKS[task_name], METHODS[name], QUICK_STEPS if quick else STEPS, time.process_time()
    task = replace(task, seeds=2, tuning_seeds=1) if quick else task
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + task.tuning_seeds)
    grid = [
        {
            **trial,
            "validation": statistics.fmean(run(task, method, trial, seed, steps, is_tuning=True) for seed in seeds),
        }
        for trial in method.trials()
    ]
    grid.sort(key=lambda trial: -trial["validation"])
    accuracy = [run(task, method, grid[0], seed, steps) for seed in range(task.seeds)]
    value = f"weight decay {grid[0]['decay']:g}" if method.make is None else f"rho {grid[0]['rho']:g}"
    return {
        "name": name, "title": f"`{name}`", "chosen": f"lr {grid[0]['lr']:g}, {value}", "grid": grid,
        "steps": results_of(round(method.share * steps), accuracy), **costs(start),
    }  # fmt: skip


def results_of(steps: int, accuracy: Sequence[float]) -> dict[str, Any]:
    """Return the figures of a row from the accuracy of each seed."""
    mean, std = statistics.fmean(accuracy), statistics.stdev(accuracy)
    return {"steps": steps, "accuracy": list(accuracy), "mean": mean, "std": std}


def costs(start: float) -> dict[str, float]:
    """Return the hours of one processor since `start`, and the peak memory of the process in MiB."""
    hours, peak = (time.process_time() - start) / 3600, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"hours": hours, "peak_mib": peak}


def curve_row(task_name: str, rho: float, quick: bool) -> dict[str, Any]:
    """Return the accuracies of SAM with a radius: of each learning rate the mean, and the seeds of the best."""
    torch.set_num_threads(1)
    task, steps, seeds = TASKS[task_name], QUICK_STEPS if quick else STEPS, range(2 if quick else 3)
    trials = [{"lr": lr, "decay": DECAY, "rho": rho} for lr in LRS]
    runs = [[run(task, METHODS["SAM"], trial, seed, steps) for seed in seeds] for trial in trials]
    best = max(range(len(runs)), key=lambda i: statistics.fmean(runs[i]))
    facts = {"title": f"{rho:g}", "chosen": f"lr {trials[best]['lr']:g}", "rho": rho}
    return {"name": f"rho {rho:g}", **facts, "steps": results_of(steps, runs[best])}


def measure(work: Callable[..., dict[str, Any]], task_name: str, items: Sequence[Any], quick: bool) -> dict[str, Any]:
    """Return a case with a row for each item, two processes of one thread at a time, each row in its own process."""
    jobs = [(task_name, item, quick) for item in items]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=1) as pool:
        rows = pool.starmap(work, jobs, chunksize=1)
    task = TASKS[task_name]
    return {"title": task.title, "noise": task.noise, "train": len(data()[0][1]), "steps": STEPS, "rows": rows}


def cases(options: Options) -> Iterator[Case]:
    """Yield the accuracy of all methods by task, then the curve over SAM's radius."""
    if names := options.select(METHODS):
        for task in TASKS:
            yield Case("1d", task, names, functools.partial(measure, measure_row, task, names, options.quick))
    if rhos := [rho for rho in RHOS if options.select([f"rho {rho:g}"])]:
        for task in ("mlp-0", "mlp-40", "cnn-0"):
            names = [f"rho {rho:g}" for rho in rhos]
            yield Case("1d-rho", task, names, functools.partial(measure, curve_row, task, rhos, options.quick))
