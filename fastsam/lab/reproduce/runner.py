"""The runs of a table's parts. Each part is a comparison in a separate directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastsam.fed.clients.labels import accuracy_of, verdicts
from fastsam.fed.clients.samples import IGNORED
from fastsam.fed.data import FederatedData
from fastsam.fed.loop.options import RESUMABLE
from fastsam.lab import compare, experiment
from fastsam.lab.compare import Plan
from fastsam.lab.config import parse_flags, resolve
from fastsam.lab.report.files import write_comparison
from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.reproduce.table import PaperTable, Part, source
from fastsam.lab.run_config import RunConfig, short_name

if TYPE_CHECKING:
    from rich.console import Console

# Keys that affect only the place and the method of a computation. They do not count as deviations from a paper.
TECHNICAL = RESUMABLE - {"rounds", "max_excluded", "on_client_error"}
TECHNICAL |= {"name", "data_dir", "download", "device", "backend", "eval_every", "seed"}


@dataclass(frozen=True)
class Outcome:
    """The finished runs of a part, and facts of its data."""

    runs: Sequence[FinishedRun]
    failures: Mapping[str, str]  # reason of each failed run, by the run's name
    counts: np.ndarray  # numbers of samples, `[clients, classes]`
    samples: int = 0  # number of test samples, 0 if unknown
    seeds: Sequence[int] = ()  # seeds of the runs, failed runs included


def plans(table: PaperTable, flags: Sequence[str], seeds: Sequence[int | str]) -> dict[Part, Plan]:
    """Return the comparison of each part, all checked.

    `flags` override keys of config files. A key in an algorithm's table applies to the parts that run this algorithm.
    Raises ConfigError if a key or a seed cannot be used.
    """
    flat, tables = parse_flags(flags)
    plans_by_part = {}
    for part in table.parts:
        part_tables = {name: options for name, options in tables.items() if name in part.algorithms}
        part_source = replace(source(part, table.name), flags=flat, flag_tables=part_tables)
        plan = compare.plan(part_source, part.algorithms, [str(s) for s in seeds], part.sweep)
        for config in plan.configs:
            experiment.keywords(config)
        plans_by_part[part] = plan
    return plans_by_part


def check_data(plans: Mapping[Part, Plan]) -> None:
    """Open each data set once, so that a missing archive raises FileNotFoundError before anything runs."""
    configs = [plan.configs[0] for plan in plans.values()]
    for config in {(config.data, config.data_dir): config for config in configs}.values():
        experiment.load_data(config)


def run(
    table: PaperTable, plans: Mapping[Part, Plan], directory: Path, resume: bool, console: Console, command: str = ""
) -> dict[Part, Outcome]:
    """Run all parts, one after the other. The parts of a figure get reports, which name `command`.

    A run that fails does not stop the remaining runs. If no run of a part was finished, its outcome has no runs.
    """
    outcomes = {}
    for number, (part, plan) in enumerate(plans.items(), 1):
        console.print(f"[{number}/{len(plans)}] {part.title}: {len(plan.runs)} runs", soft_wrap=True)
        outcomes[part] = _run_part(table, part, plan, directory / part.slug, resume, command)
    return outcomes


def _run_part(
    table: PaperTable, part: Part, plan: Plan, directory: Path, resume: bool, command: str
) -> Outcome:  # fmt: skip
    from rich.console import Console

    data = compare.load_all(plan)
    compare.write_record(plan, directory)
    quiet = Console(quiet=table.scale is not None)
    finished_runs, errors = compare.train_all(plan, data, directory, resume, quiet, "")
    points = ({part.same_axis.get(key, key): value for key, value in run.point.items()} for run in finished_runs)
    finished_runs = [replace(run, point=point) for run, point in zip(finished_runs, points, strict=True)]
    data_set = data[compare.data_key(plan.configs[0])]
    if "train" in table.metrics:
        finished_runs = [_with_train_accuracy(run, plan, data) for run in finished_runs]
    if table.figures and finished_runs:
        has_surfaces = "surfaces" in table.figures
        grids = compare.surfaces(plan, data, finished_runs, table.surface_points, directory) if has_surfaces else {}
        title = part.title if table.scale is None else f"{part.title} (scaled to {table.scale})"
        write_comparison(finished_runs, directory, title, compare.facts(plan, data), command, grids)
    samples = len(data_set.test[1]) if isinstance(data_set.test, tuple) else 0
    return Outcome(finished_runs, errors, data_set.class_counts(), samples, plan.seeds)


@torch.no_grad()
def _with_train_accuracy(run: FinishedRun, plan: Plan, data: compare.Data) -> FinishedRun:
    """Return the run with the accuracy of its final model on training samples in its summary: the mean and the standard
    deviation over clients."""
    run_setup = compare.load_trained(plan, data, run)
    accuracies = client_accuracies(run_setup.model.eval().to(run_setup.config.device or "cpu"), run_setup.data)
    summary = {"train_accuracy_mean": float(accuracies.mean()), "train_accuracy_std": float(accuracies.std())}
    return replace(run, summary={**run.summary, **summary})


def client_accuracies(model: torch.nn.Module, data: FederatedData) -> np.ndarray:
    """Return the accuracy on each client's training samples, `[clients]` in 0..1."""
    first, accuracies = next(model.parameters()), []
    for x, y in data.clients:
        inputs = x.to(first.dtype) if x.is_floating_point() else x
        parts = zip(inputs.split(512), y.split(512), strict=True)
        judged = [verdicts(model(a.to(first.device)), b.to(first.device), IGNORED) for a, b in parts]
        accuracies.append(accuracy_of(torch.cat(judged)))
    return np.array(accuracies, dtype=np.float64)


def changes(table: PaperTable, plans: Mapping[Part, Plan]) -> list[list[str]]:
    """Return our changes to the paper's setting, from the resolved configs: key, the paper's value, our value, and the
    algorithms and the number of parts that it affects."""
    places: dict[tuple[str, str, str], set[tuple[Part, str]]] = {}
    for part, plan in plans.items():
        configs = {short_name(p.config.algorithm): p.config for p in reversed(plan.runs)}
        swept_keys = {axis.key for axis in plan.sweep}
        for name in part.algorithms:
            paper = resolve(source(part, table.name, at_paper=True), name, part.algorithms)
            for change in _differences(paper, configs[name], swept_keys):
                places.setdefault(change, set()).add((part, name))
    return [[*change, _where(place, list(plans))] for change, place in places.items()]


def _where(place: set[tuple[Part, str]], parts: Sequence[Part]) -> str:
    affected_parts, names = {part for part, _ in place}, sorted({name for _, name in place})
    text = "everywhere" if len(affected_parts) == len(parts) else f"{len(affected_parts)} of {len(parts)} parts"
    is_of_all = len(place) == sum(len(part.algorithms) for part in affected_parts)
    return text if is_of_all else f"{', '.join(names)}: {text}"


def _differences(paper: RunConfig, config: RunConfig, swept_keys: set[str]) -> list[tuple[str, str, str]]:
    algorithm = short_name(paper.algorithm)
    records = [c.record() | {f"{algorithm}.{key}": value for key, value in c.options.items()} for c in (paper, config)]
    ignored_keys = TECHNICAL | swept_keys | {algorithm} | {f"{algorithm}.{key}" for key in swept_keys}
    keys = [key for key in dict.fromkeys(key for record in records for key in record) if key not in ignored_keys]
    texts = [(key, *("–" if r.get(key) in (None, {}) else str(r[key]) for r in records)) for key in keys]
    return [(key, old, new) for key, old, new in texts if old != new]
