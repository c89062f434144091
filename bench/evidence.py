"""Evidence for SAM on small data that people know: MNIST-1D and 5,000 images of MNIST, in one model and in clients.

MNIST-1D: Greydanus and Kobak, "Scaling down deep learning with MNIST-1D" (ICML 2024). Every method is tuned on samples
and seeds that the report does not use: learning rates times weight decays for SGD, times radii for SAM. A grid grows
while its best trial is at one of its ends. The best trial then trains with the seeds of the report. A seed draws the
training samples, their wrong labels, the initial weights and the order.
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
from bench.evidence_data import CLASSES, Gru, cnn, images, mlp, series, strided_cnn
from fastsam import SAM, FusedSAM, fed, variants
from fastsam.fed.data.federated import split_data

Pair = tuple[Tensor, Tensor]
Trial = tuple[float, float]  # learning rate, and weight decay or radius
Run = Callable[[Trial, int, bool], float]  # accuracy by trial, seed and whether it is one of the tuning

PROCESSES = 2
MOMENTUM, DECAY, HELD_OUT = 0.9, 1e-3, 800
LRS, DECAYS, RHOS = (0.05, 0.1, 0.2), (1e-3, 3e-3, 9e-3), (0.15, 0.3, 0.6)
GROWTH, FIRST_TUNING_SEED = 3, 1000  # at most three extensions of a grid
LATE = 0.75  # fraction of the steps before the first step of SAM
CURVE, STARTS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8), (0.0, 0.5, 0.75, 0.9, 1.0)  # radii, and fractions like `LATE`
ROUNDS, QUICK_ROUNDS, LAST = 200, 3, 5  # rounds; a run's accuracy is the mean of the last ones
COHORT: dict[str, Any] = {"participation": 0.25, "local_epochs": 5, "batch_size": 20}


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        make: function of a radius and the number of steps that returns a variant; None for SGD.
        grid: radii of the first grid, or weight decays of SGD.
        share: number of steps, relative to SGD's.
    """

    make: Callable[[float, int], SAM] | None = None
    grid: Sequence[float] = RHOS
    share: float = 1.0


METHODS = {
    "SGD": Method(None, DECAYS),
    "SGD, twice the steps": Method(None, DECAYS, share=2.0),
    "SAM": Method(lambda rho, steps: SAM(rho)),
    "ASAM": Method(lambda rho, steps: SAM(rho, adaptive=True), (0.5, 1.0, 2.0)),
    "MSAM": Method(lambda rho, steps: variants.MSAM(rho), (0.75, 1.5, 3.0)),
    "SAM, interval=2": Method(lambda rho, steps: SAM(rho, interval=2)),
    "SAM, late": Method(lambda rho, steps: SAM(rho, start=round(LATE * steps))),
}
ALGORITHMS: dict[str, tuple[Callable[[float], fed.Algorithm], Sequence[float]]] = {
    "FedAvg": (lambda _: fed.FedAvg(), DECAYS),
    "FedSAM": (lambda rho: fed.FedSAM(rho=rho), RHOS),
    "SCAFFOLD": (lambda _: fed.SCAFFOLD(), DECAYS),
    "FedDyn": (lambda _: fed.FedDyn(), DECAYS),
    "FedSMOO": (lambda rho: fed.FedSMOO(rho=rho), RHOS),
}


@dataclass(frozen=True)
class Task:
    """A model, samples (of training and tuning, and of the test), and a fraction of wrong labels. `train`, `seeds` and
    `tuning_seeds` are numbers: of the training samples of a run, and of the seeds of report and tuning."""

    title: str
    load: Callable[[], tuple[Pair, Pair]]
    model: Callable[[], nn.Module]
    noise: float = 0.0
    train: int = 4000
    steps: int = 3000
    batch: int = 100
    seeds: int = 8
    tuning_seeds: int = 2

    def start(self, seed: int) -> nn.Module:
        """Return a seed's model before training."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def split(self, seed: int, is_tuning: bool) -> tuple[Pair, Pair]:
        """Return training samples, of which a fraction has a wrong class, and samples to evaluate."""
        (x, y), test = self.load()
        rng = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(y), generator=rng)
        if is_tuning:
            test, order = (x[order[:HELD_OUT]], y[order[:HELD_OUT]]), order[HELD_OUT:]
        x, y = x[order[: self.train]], y[order[: self.train]]
        is_wrong = torch.rand(len(y), generator=rng) < self.noise
        return (x, torch.where(is_wrong, (y + torch.randint(1, CLASSES, y.shape, generator=rng)) % CLASSES, y)), test


KINDS: Sequence[tuple[Any, ...]] = (  # name, samples, model, percentages of wrong labels, numbers of `Task`
    ("MLP", series, mlp, (0, 20, 40), {}),
    ("CNN", series, cnn, (0, 20, 40), {"steps": 1500, "seeds": 5, "tuning_seeds": 1}),
    ("GRU", series, Gru, (0,), {"steps": 1000, "seeds": 3, "tuning_seeds": 1}),
    # MNIST with wrong labels would flatter SAM: the rate that tuning chooses for SGD fails with half of the seeds.
    ("MNIST", images, strided_cnn, (0,), {"train": 500, "steps": 300, "batch": 32, "tuning_seeds": 6}),
)
TASKS = {
    f"{name.lower()}-{percent}": Task(
        f"{name}, {f'{percent} % wrong' if percent else 'right labels'}", load, model, percent / 100, **numbers
    )
    for name, load, model, percents, numbers in KINDS
    for percent in percents
}


def train(task: Task, method: Method, trial: Trial, seed: int, is_tuning: bool = False) -> float:
    """Train a seed's model, with a rate that falls to 0 as a cosine, and return its accuracy."""
    (x, y), held_out = task.split(seed, is_tuning)
    steps, rng = round(method.share * task.steps), torch.Generator().manual_seed(seed)
    model, options = task.start(seed), {"lr": trial[0], "momentum": MOMENTUM, "weight_decay": DECAY}
    optimizer: torch.optim.Optimizer
    if method.make is None:
        optimizer = torch.optim.SGD(model.parameters(), **{**options, "weight_decay": trial[1]})
    else:
        optimizer = FusedSAM(model.parameters(), torch.optim.SGD, variant=method.make(trial[1], steps), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for number in range(steps):
        if number % (len(y) // task.batch) == 0:
            batches = iter(torch.randperm(len(y), generator=rng).split(task.batch))
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


def train_clients(task: Task, name: str, trial: Trial, seed: int, is_tuning: bool, rounds: int) -> float:
    """Train a seed's model on clients with unequal classes, and return the accuracy of the global model."""
    (x, y), held_out = task.split(seed, is_tuning)
    data = split_data(x, y, held_out, clients=40, alpha=0.3, seed=seed, classes=CLASSES, name=task.title)
    make, grid = ALGORITHMS[name]
    decay = trial[1] if grid is DECAYS else DECAY
    result = fed.run(
        task.start(seed), data, make(trial[1]), rounds=rounds, lr=trial[0], weight_decay=decay, seed=seed,
        executor="vmap", progress=False, **COHORT,
    )  # fmt: skip
    return statistics.fmean(record["test_accuracy"] for record in result.history[-LAST:])


def tune(run: Run, grid: Sequence[float], seeds: range, growth: int = GROWTH) -> list[dict[str, float]]:
    """Return the trials, best first. The grid grows by a factor of 2 at the ends where its best trial is."""
    axes, scores = (list(LRS), list(grid)), dict[Trial, float]()
    for _ in range(1 + growth):
        for trial in itertools.product(*axes):
            if trial not in scores:
                scores[trial] = statistics.fmean(run(trial, seed, True) for seed in seeds)
        best, sizes = max(scores, key=scores.__getitem__), [len(axis) for axis in axes]
        for axis, value in zip(axes, best, strict=True):
            axis[:0] = [value / 2] if value == axis[0] else []
            axis += [value * 2] if value == axis[-1] else []
        if sizes == [len(axis) for axis in axes]:
            break
    rows = [{"lr": lr, "value": value, "validation": score} for (lr, value), score in scores.items()]
    return sorted(rows, key=lambda row: -row["validation"])


def measure_row(task_name: str, name: str, quick: bool) -> dict[str, Any]:
    """Return the row of a method or an algorithm: its trials, and the accuracy of the best by seed."""
    torch.set_num_threads(1)
    begin, task = time.process_time(), TASKS[task_name]
    task = replace(task, **({} if name in METHODS else {"seeds": 5, "tuning_seeds": 1}))
    task = replace(task, seeds=2, tuning_seeds=1, steps=30) if quick else task
    if name in METHODS:
        grid, steps = METHODS[name].grid, round(METHODS[name].share * task.steps)
        run: Run = functools.partial(train, task, METHODS[name])
    else:
        grid, steps = ALGORITHMS[name][1], QUICK_ROUNDS if quick else ROUNDS
        run = functools.partial(train_clients, task, name, rounds=steps)
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + task.tuning_seeds)
    trials = tune(run, grid, seeds, 0 if quick else GROWTH)
    best = trials[0]["lr"], trials[0]["value"]
    chosen = f"lr {best[0]:g}, {'weight decay' if grid is DECAYS else 'rho'} {best[1]:g}"
    return _row(name, chosen, steps, [run(best, seed, False) for seed in range(task.seeds)], begin, grid=trials)


def curve_row(task_name: str, value: float, quick: bool, name: str) -> dict[str, Any]:
    """Return the accuracy of SAM by seed at a radius, or at a start with the best radius of the curve."""
    torch.set_num_threads(1)
    begin, task = time.process_time(), TASKS[task_name]
    task = replace(task, seeds=2, steps=30) if quick else task
    rho = value if name == "rho" else 0.4
    method = Method(lambda rho, steps: SAM(rho, start=round(value * steps) if name == "start" else 0))
    accuracy = [train(task, method, (LRS[-1], rho), seed) for seed in range(task.seeds)]
    return _row(f"{name} {value:g}", f"lr {LRS[-1]:g}, rho {rho:g}", task.steps, accuracy, begin, value=value)


def _row(name: str, chosen: str, steps: int, accuracy: Sequence[float], begin: float, **more: Any) -> dict[str, Any]:
    """Return a row, with the hours of one processor since `begin` and the peak memory of this process in MiB."""
    mean, std = statistics.fmean(accuracy), statistics.stdev(accuracy)
    return {
        "name": name, "title": f"`{name}`", "chosen": chosen, **more,
        "steps": {"steps": steps, "accuracy": list(accuracy), "mean": mean, "std": std},
        "hours": (time.process_time() - begin) / 3600,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def measure(work: Callable[..., dict[str, Any]], task_name: str, items: Sequence[Any], quick: bool) -> dict[str, Any]:
    """Return a case with a row for each item, two processes of one thread at a time, each row in its own process."""
    task = TASKS[task_name]
    task.load()  # data that are missing raise here, and not in a worker
    jobs = [(task_name, item, quick) for item in items]
    if quick:
        rows = list(itertools.starmap(work, jobs))
    else:
        with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=1) as pool:
            rows = pool.starmap(work, jobs, chunksize=1)
    return {"title": task.title, "noise": task.noise, "train": task.train, "steps": task.steps, "rows": rows}


def cases(options: Options) -> Iterator[Case]:
    """Yield the accuracy of all methods by task, of clients, and of SAM by its radius and its start."""

    def case(part: str, task: str, names: Sequence[str], work: Callable[..., Any], items: Sequence[Any]) -> Case:
        return Case(part, task, names, functools.partial(measure, work, task, items, options.quick))

    for part, table, tasks in (("methods", METHODS, TASKS), ("clients", ALGORITHMS, ("mlp-0", "mlp-40"))):
        if names := options.select(table):
            yield from (case(part, task, names, measure_row, names) for task in tasks)
    for name, values in (("rho", CURVE), ("start", STARTS)):
        if chosen := [value for value in values if options.select([f"{name} {value:g}"])]:
            names, work = [f"{name} {value:g}" for value in chosen], functools.partial(curve_row, name=name)
            yield from (case(name, task, names, work, chosen) for task in ("mlp-0", "mlp-40"))
