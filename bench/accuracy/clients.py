"""Evidence for SAM on clients: the tasks of bench/accuracy/evidence.py, dealt to clients with one to three classes.

Each algorithm with SAM is next to the same algorithm without it: FedSAM and FedAvg, FedGAMMA and SCAFFOLD, FedSMOO and
FedDyn. All are tuned with equally many trials on seeds and samples that the report does not use.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.accuracy.evidence import PROCESSES, SEEDS, TUNING_SEEDS
from bench.accuracy.tasks import REAL_TASKS
from fastsam import fed
from fastsam.fed.data.federated import split_data

CLIENTS, ALPHA, COHORT, EPOCHS, BATCH, WIDTH = 25, 0.1, 0.2, 5, 16, 32
ROUNDS, QUICK_ROUNDS = 50, 3
LAST = 5  # number of last rounds whose mean is the accuracy of a run
LRS, RHOS, DECAYS = (0.02, 0.05, 0.1, 0.2), (0.03, 0.1, 0.3), (0.0, 1e-3, 1e-2)


@dataclass(frozen=True)
class Pair:
    """An algorithm, and the second number of its grid.

    Args:
        make: function from a radius to the algorithm.
        has_sam (bool): the second number is the radius. Otherwise it is the weight decay.
    """

    make: Callable[[float], fed.Algorithm]
    has_sam: bool


# The slowest come first, so that both processes end at about the same time.
ALGORITHMS = {
    "FedSMOO": Pair(lambda rho: fed.FedSMOO(rho=rho), True),
    "FedGAMMA": Pair(lambda rho: fed.FedGAMMA(rho=rho), True),
    "FedSAM": Pair(lambda rho: fed.FedSAM(rho=rho), True),
    "FedDyn": Pair(lambda _: fed.FedDyn(), False),
    "SCAFFOLD": Pair(lambda _: fed.SCAFFOLD(), False),
    "FedAvg": Pair(lambda _: fed.FedAvg(), False),
}


def measure(name: str, names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Return a task's case with a row for each algorithm of `names`."""
    task = REAL_TASKS[name]
    task.load()  # a missing file raises here, and not in a worker
    jobs = [(name, algorithm, quick) for algorithm in ALGORITHMS if algorithm in names]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, torch.set_num_threads, (1,)) as pool:
        rows = pool.starmap(measure_row, jobs, chunksize=1)
    return {"title": task.title, "noise": task.noise, "train": task.train, "lrs": list(LRS), "rows": rows}


def measure_row(name: str, algorithm_name: str, quick: bool) -> dict[str, Any]:
    """Return the row of an algorithm: its grid, best first, and the accuracies of the best trial, a number a seed."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    grid = []
    for lr in LRS:
        for value in RHOS if ALGORITHMS[algorithm_name].has_sam else DECAYS:
            seeds = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
            runs = [run(name, algorithm_name, lr, value, seed, rounds, is_tuning=True) for seed in seeds]
            grid.append({"lr": lr, "value": value, "validation": statistics.fmean(runs)})
    grid.sort(key=lambda trial: -trial["validation"])
    lr, value = grid[0]["lr"], grid[0]["value"]
    seeds = SEEDS[:2] if quick else SEEDS
    accuracy = [run(name, algorithm_name, lr, value, seed, rounds, is_tuning=False) for seed in seeds]
    second = "rho" if ALGORITHMS[algorithm_name].has_sam else "weight decay"
    results = {"steps": rounds, "accuracy": accuracy, "mean": statistics.fmean(accuracy)}
    results["std"] = statistics.stdev(accuracy)
    text = f"lr {lr:g}, {second} {value:g}"
    return {"name": algorithm_name, "title": f"`{algorithm_name}`", "chosen": text, "grid": grid, "steps": results}


def run(name: str, algorithm_name: str, lr: float, value: float, seed: int, rounds: int, is_tuning: bool) -> float:
    """Return the accuracy of the global model: of a seed's model, clients and cohorts."""
    (x, y), held_out = REAL_TASKS[name].split(seed, is_tuning)
    data = split_data(x, y, held_out, clients=CLIENTS, alpha=ALPHA, seed=seed, classes=10, name=name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(x[0].numel(), WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )  # a dense model, whose clients are trained together
    pair = ALGORITHMS[algorithm_name]
    result = fed.run(
        model, data, pair.make(value), rounds=rounds, participation=COHORT, sampler="bernoulli", local_epochs=EPOCHS,
        batch_size=BATCH, lr=lr, weight_decay=0.0 if pair.has_sam else value, seed=seed, executor="vmap",
        progress=False,
    )  # fmt: skip
    return statistics.fmean(record["test_accuracy"] for record in result.history[-LAST:])
