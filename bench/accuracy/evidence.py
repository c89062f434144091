"""Evidence that SAM is worth its second pass: two sets of scanned digits, a small CNN, eight seeds.

`python -m bench evidence` trains with SGD, SAM and three variants, with right labels and with 20 % and 40 % of the
training labels wrong. Everything is tuned with equally many trials on seeds and samples that the report does not use.
"SGD, twice the steps" takes the time of a variant with two passes. The rows of a task are shared by two processes of
one thread each.

Accuracy by passes, with SAM from 0, 50, 75, 90 and 100 % of the steps on (SGD is 100 %):
`python -m bench evidence --cases 'evidence/*' --rows SGD SAM 'SAM, start=*' --out DIR`
"""

import multiprocessing
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench.accuracy.tasks import REAL_TASKS
from bench.accuracy.training import QUICK_STEPS, Contender, run, tune
from fastsam import SAM, variants

PROCESSES = 2
SEEDS, TUNING_SEEDS = tuple(range(8)), (1000, 1001)
DECAYS = (5e-3, 2e-2, 5e-2)
RHOS = (0.03, 0.1, 0.2)

# The slowest come first, so that both processes end at about the same time.
CONTENDERS = {
    "GSAM": Contender(lambda rho: variants.GSAM(rho), RHOS),
    "SAM": Contender(lambda rho: SAM(rho), RHOS),
    "ASAM": Contender(lambda rho: SAM(rho, adaptive=True), (0.3, 1.0, 2.0)),
    "SGD, twice the steps": Contender(None, DECAYS, "weight decay", share=2.0),
    "SAM, start=50 %": Contender(SAM, RHOS, start=0.5),
    "SAM, start=75 %": Contender(SAM, RHOS, start=0.75),
    "SAM, start=90 %": Contender(SAM, RHOS, start=0.9),
    "MSAM": Contender(lambda rho: variants.MSAM(rho), (0.3, 1.0, 2.0)),
    "SGD": Contender(None, DECAYS, "weight decay"),
}


def measure(name: str, names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Return a task's case with a row for each contender of `names`."""
    task = REAL_TASKS[name]
    task.load()  # a missing file raises here, and not in a worker
    jobs = [(name, contender, quick) for contender in CONTENDERS if contender in names]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, torch.set_num_threads, (1,)) as pool:
        rows = pool.starmap(measure_row, jobs, chunksize=1)
    facts = {"title": task.title, "noise": task.noise, "train": task.train, "steps": task.steps, "lrs": list(task.lrs)}
    return {**facts, "rows": rows}


def measure_row(name: str, contender_name: str, quick: bool) -> dict[str, Any]:
    """Return the row of a contender: its grid, best first, and the accuracies of the best trial, a number a seed."""
    task, contender = REAL_TASKS[name], CONTENDERS[contender_name]
    steps = round(contender.share * (QUICK_STEPS if quick else task.steps))
    grid = tune(task, contender, TUNING_SEEDS[:1] if quick else TUNING_SEEDS, steps)
    trial = (grid[0]["lr"], grid[0]["value"])
    accuracy = [run(task, contender, trial, seed, steps)[0] for seed in (SEEDS[:2] if quick else SEEDS)]
    passes = contender.passes(trial[1], steps)
    results = {"steps": steps, "passes": passes, "accuracy": accuracy, "mean": statistics.fmean(accuracy)}
    results["std"] = statistics.stdev(accuracy)
    text = f"lr {trial[0]:g}, {contender.second} {trial[1]:g}"
    return {"name": contender_name, "title": f"`{contender_name}`", "chosen": text, "grid": grid, "steps": results}
