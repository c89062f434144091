"""The runs of a table's parts. Each part is a comparison in a separate directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastsam.fed.clients.labels import accuracy_of, verdicts
from fastsam.fed.clients.samples import IGNORED
from fastsam.fed.data import FederatedData
from fastsam.fed.loop.options import RESUMABLE
from fastsam.lab import compare, experiment
from fastsam.lab.compare import Plan
from fastsam.lab.config import parse_flags, resolve
from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.reproduce.table import PaperTable, Part, source
from fastsam.lab.run_config import RunConfig, short_name

if TYPE_CHECKING:
    from rich.console import Console

# Keys that affect only the place and the method of a computation. They do not count as deviations from a paper.
TECHNICAL = RESUMABLE - {"rounds", "max_excluded", "on_client_error"}
TECHNICAL |= {"name", "data_dir", "download", "device", "backend", "eval_every", "seed"}

_MOST_PLACES = 4  # places that a change names before it counts the others


@dataclass(frozen=True)
class Outcome:
    """The finished runs of a part, and the data of its figures."""

    runs: Sequence[FinishedRun]
    failures: Mapping[str, str]  # reason of each failed run, by the run's name
    counts: np.ndarray  # numbers of samples, `[clients, classes]`
    surfaces: Mapping[str, np.ndarray]  # loss surfaces by label
    samples: int = 0  # number of test samples, 0 if unknown
    seeds: Sequence[int] = ()  # seeds of the runs, failed runs included


def plans(table: PaperTable, flags: Sequence[str], seeds: Sequence[int]) -> dict[Part, Plan]:
    """Return the comparison of each part, all checked.

    Args:
        table: the table.
        flags: keys that override the keys of config files. A key in an algorithm's table applies to the parts that
            run this algorithm.
        seeds: seeds of the runs.

    Raises:
        ConfigError: a key cannot be used.
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
    first_configs: dict[Any, RunConfig] = {}
    for config in (plan.configs[0] for plan in plans.values()):
        first_configs.setdefault((config.data, config.data_dir), config)
    for config in first_configs.values():
        experiment.load_data(config)


def run(
    table: PaperTable, plans: Mapping[Part, Plan], directory: Path, resume: bool, console: Console
) -> dict[Part, Outcome]:
    """Run all parts, one after the other.

    A run that fails does not stop the remaining runs. If no run of a part was finished, its outcome has no runs.
    """
    outcomes = {}
    for number, (part, plan) in enumerate(plans.items(), 1):
        text = f"[{number}/{len(plans)}] {part.title}: {len(plan.runs)} runs"
        console.print(text, soft_wrap=True)
        outcomes[part] = _run_part(table, part, plan, directory / part.slug, resume)
    return outcomes


def _run_part(table: PaperTable, part: Part, plan: Plan, directory: Path, resume: bool) -> Outcome:
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
    grids: Mapping[str, np.ndarray] = {}
    if "surfaces" in table.figures and finished_runs:
        grids = compare.surfaces(plan, data, finished_runs, table.surface_points, directory)
    samples = len(data_set.test[1]) if isinstance(data_set.test, tuple) else 0
    return Outcome(finished_runs, errors, data_set.class_counts(), grids, samples, plan.seeds)


def _with_train_accuracy(run: FinishedRun, plan: Plan, data: compare.Data) -> FinishedRun:
    """Return the run with the accuracy of its final model on training samples in its summary.

    The numbers are the mean and standard deviation over clients.
    """
    run_setup = compare.load_trained(plan, data, run)
    accuracies = _client_accuracies(run_setup.model, run_setup.data, run_setup.config.device)
    accuracy_summary = {"train_accuracy_mean": float(accuracies.mean()), "train_accuracy_std": float(accuracies.std())}
    return replace(run, summary={**run.summary, **accuracy_summary})


@torch.no_grad()
def _client_accuracies(model: torch.nn.Module, data: FederatedData, device: torch.device | str | None) -> np.ndarray:
    """Return the accuracy on each client's training samples, `[clients]` in 0..1."""
    model.eval().to(device or "cpu")
    first = next(model.parameters())
    accuracies = []
    for x, y in data.clients:
        inputs = x.to(first.dtype) if x.is_floating_point() else x
        parts = zip(inputs.split(512), y.split(512), strict=True)
        judged = [verdicts(model(a.to(first.device)), b.to(first.device), IGNORED) for a, b in parts]
        accuracies.append(accuracy_of(torch.cat(judged)))
    return np.array(accuracies, dtype=np.float64)


def changes(table: PaperTable, plans: Mapping[Part, Plan]) -> list[tuple[str, str, str, str]]:
    """Return our changes to the paper's setting, from the resolved configs.

    Each is a tuple (key, the paper's value, our value, affected parts).
    """
    parts_by_change: dict[tuple[str, str, str], dict[str, set[str]]] = {}
    for part, plan in plans.items():
        part_configs = {short_name(p.config.algorithm): p.config for p in reversed(plan.runs)}
        swept_keys = {axis.key for axis in plan.sweep}
        paper_source = source(part, table.name, at_paper=True)
        for name in part.algorithms:
            for change in _differences(resolve(paper_source, name, part.algorithms), part_configs[name], swept_keys):
                parts_by_change.setdefault(change, {}).setdefault(part.title, set()).add(name)
    algorithms = {part.title: set(part.algorithms) for part in plans}
    return [(*change, _affected_places(parts, algorithms)) for change, parts in parts_by_change.items()]


def _differences(paper: RunConfig, config: RunConfig, swept_keys: set[str]) -> list[tuple[str, str, str]]:
    algorithm = short_name(paper.algorithm)
    paper_record, config_record = paper.record(), config.record()
    keys = dict.fromkeys([*paper_record, *config_record])
    pairs = [(key, paper_record.get(key), config_record.get(key)) for key in keys]
    pairs += [(f"{algorithm}.{key}", paper.options[key], config.options[key]) for key in paper.options]
    ignored_keys = TECHNICAL | swept_keys | {algorithm} | {f"{algorithm}.{key}" for key in swept_keys}
    text_pairs = [(key, _text(a), _text(b)) for key, a, b in pairs if key not in ignored_keys]
    return [(key, a, b) for key, a, b in text_pairs if a != b]


def _text(value: Any) -> str:
    return "–" if value is None or value == {} else str(value)


def _affected_places(affected_parts: Mapping[str, set[str]], all_parts: Mapping[str, set[str]]) -> str:
    """Return the names of parts or whole sections, and of algorithms if a change does not affect all of them."""
    names = []
    for part in affected_parts:
        section = part.rpartition(", ")[0]
        section_parts = {title for title in all_parts if section and title.startswith(f"{section}, ")}
        names.append(section if len(section_parts) > 1 and section_parts <= affected_parts.keys() else part)
    names = list(dict.fromkeys(names))
    place_text = "everywhere" if len(affected_parts) == len(all_parts) else "; ".join(names[:_MOST_PLACES])
    if len(names) > _MOST_PLACES and len(affected_parts) < len(all_parts):
        place_text += f"; and {len(names) - _MOST_PLACES} more"
    if all(affected_parts[part] == all_parts[part] for part in affected_parts):
        return place_text
    return f"{', '.join(sorted(set().union(*affected_parts.values())))}: {place_text}"
