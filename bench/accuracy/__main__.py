"""SGD, SAM and every variant on small tasks: `python -m bench.accuracy --out results.json`, then
`python -m bench.report results.json`.

Each contender is tuned per task, by as many trials as everybody else, on seeds and samples that the report does not
see. Then it trains with the seeds of the report, for as many steps as everybody (`steps`), and for as many as fit into
SGD's time (`time`), by measured times of a step. The file is written after every contender; the same command goes on
where it was stopped, and one with other tasks or variants adds them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import environment
from bench.accuracy.contenders import MOMENTUM, WEIGHT_DECAY, Contender, contenders
from bench.accuracy.tasks import TASKS, Task
from bench.accuracy.training import RADIUS, Trial, run, step_times, steps_in_equal_time, tune
from bench.contenders import choose, split
from bench.tables import ACCURACY

TUNING_SEEDS = (1000,)
QUICK_STEPS = 20


def main(argv: Sequence[str] | None = None) -> int:
    known = contenders()
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--variants", default=";".join(known), help=f"SGD is always there; of {'; '.join(known)}")
    parser.add_argument("--seeds", type=int, default=5, help="runs of the report, two or more")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps a run, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy.json"), help="the results file")
    given = parser.parse_args(argv)
    names = list(dict.fromkeys(["SGD", *(name.strip() for name in given.variants.split(";"))]))
    try:
        tasks = {name: choose(TASKS, [name], "task")[0] for name in split(given.tasks)}
        entrants = dict(zip(names, choose(known, names, "variant"), strict=True))
    except ValueError as error:
        parser.error(str(error))
    if given.seeds < 2:
        parser.error(f"--seeds {given.seeds}: a spread needs two seeds or more")
    torch.set_num_threads(1)
    settings = {
        "seeds": list(range(given.seeds)),
        "tuning_seeds": list(TUNING_SEEDS),
        "quick": given.quick,
        "rounds": 2 if given.quick else 15,
        "momentum": MOMENTUM,
        "weight_decay": WEIGHT_DECAY,
        "radius": RADIUS,
    }
    try:
        record = _begun(given.out, settings)
    except ValueError as error:
        parser.error(str(error))
    for name in tasks:
        _measure(name, entrants, record, given.out)
    environment.write(record, given.out)
    return 0


def _begun(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A new record, or the one that is there, to be added to. Raises ValueError for one with other settings."""
    facts = environment.facts(environment.command_line("bench.accuracy"))
    if not path.exists():
        return {"kind": ACCURACY, "environment": facts, "continued": [], "settings": settings, "tasks": {}}
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("kind") != ACCURACY or record["settings"] != settings:
        raise ValueError(f"{path} is no results file with the settings {settings}: name another --out, or remove it")
    now = {key: facts[key] for key in ("command", "commit", "date")}
    if now["commit"] != record["environment"]["commit"] or now["command"] != record["environment"]["command"]:
        record["continued"].append(now)
    return record


def _measure(name: str, entrants: dict[str, Contender], record: dict[str, Any], path: Path) -> None:
    task, settings = TASKS[name], record["settings"]
    steps = QUICK_STEPS if settings["quick"] else task.steps
    facts = {"title": task.title, "noise": task.noise, "train": task.train, "steps": steps, "lrs": task.lrs}
    found = record["tasks"].setdefault(name, {**facts, "step_of_sgd": {}, "variants": {}})
    costs = found["step_of_sgd"]
    if any(who not in costs for who in entrants):
        times = step_times(
            task, {w: one for w, one in entrants.items() if w == "SGD" or w not in costs}, settings["rounds"]
        )
        costs |= {who: times[who] / times["SGD"] for who in times if who not in costs}
        shown = ", ".join(f"{who} {cost:.2f}" for who, cost in costs.items())
        print(f"{name}: a step of SGD takes {times['SGD'] * 1e3:.2f} ms; in its units: {shown}", flush=True)
    for who, contender in entrants.items():
        if who in found["variants"]:
            continue
        own = round(contender.share * steps)
        fewer = min(own, steps_in_equal_time(steps, costs[who]))
        found["variants"][who] = _entry(task, contender, settings, own, fewer)
        environment.write(record, path)
        row = found["variants"][who]
        means = [statistics.fmean(row[protocol]["accuracy"]) for protocol in ("steps", "time")]
        best = row["grid"][0]
        print(
            f"{name}, {who}: lr {best['lr']}, {row['second']} {best['value']}; accuracy {means[0]:.3f}, "
            f"in SGD's time ({fewer} steps) {means[1]:.3f}",
            flush=True,
        )


def _entry(task: Task, contender: Contender, settings: dict[str, Any], steps: int, fewer: int) -> dict[str, Any]:
    """The grid, best first, and the runs of the best trial by both protocols."""
    grid = tune(task, contender, settings["tuning_seeds"], steps)
    trial = Trial(grid[0]["lr"], grid[0]["value"])
    made: dict[int, dict[str, Any]] = {}
    for count in dict.fromkeys((steps, fewer)):
        runs = [asdict(run(task, contender, trial, seed, count, sharp=True)) for seed in settings["seeds"]]
        made[count] = {"steps": count} | {key: [one[key] for one in runs] for key in ("accuracy", "sharpness")}
    return {"second": contender.second, "grid": grid, "steps": made[steps], "time": made[fewer]}


if __name__ == "__main__":
    sys.exit(main())
