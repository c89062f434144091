"""The runs of a table's parts. Each part is a comparison in a separate directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

from fastsam.fed.data import FederatedData
from fastsam.fed.loop.options import FREE
from fastsam.lab import compare, experiment
from fastsam.lab.compare import Plan
from fastsam.lab.config import Source, parse_flags, resolve
from fastsam.lab.report import FinishedRun
from fastsam.lab.reproduce.table import Part, Table, source
from fastsam.lab.run_config import RunConfig, short_name

if TYPE_CHECKING:
    from rich.console import Console

# Keys that affect only the place and the method of a computation. They do not count as deviations from a paper.
TECHNICAL = FREE - {"rounds", "max_excluded", "on_client_error"} | {
    "name",
    "data_dir",
    "download",
    "device",
    "backend",
    "eval_every",
    "seed",
}

_NAMED = 4  # places that a change names before it counts the others


@dataclass(frozen=True)
class Outcome:
    """The finished runs of a part, and the data of its figures."""

    runs: Sequence[FinishedRun]
    failed: Mapping[str, str]  # reason of each failed run, by the run's name
    counts: np.ndarray  # numbers of samples, `[clients, classes]`
    surfaces: Mapping[str, np.ndarray]  # loss surfaces by label
    samples: int = 0  # number of test samples, 0 if unknown


def sources(table: Table, flags: Sequence[str]) -> dict[Part, Source]:
    """Return the config of each part.

    Args:
        flags: keys that override the keys of config files. A key in an algorithm's table applies to the parts that run
            this algorithm.
    """
    flat, tables = parse_flags(flags)
    owns = ({name: own for name, own in tables.items() if name in part.algorithms} for part in table.parts)
    return {
        part: replace(source(part, table.name), flags=flat, flag_tables=own)
        for part, own in zip(table.parts, owns, strict=True)
    }


def plans(sources: Mapping[Part, Source], seeds: Sequence[int]) -> dict[Part, Plan]:
    """Return the comparison of each part, all checked. Raises ConfigError."""
    made = {}
    for part, own in sources.items():
        plan = compare.plan(own, part.algorithms, [str(s) for s in seeds], part.sweep)
        for config in plan.configs:
            experiment.keywords(config)
        made[part] = plan
    return made


def check_data(plans: Mapping[Part, Plan]) -> None:
    """Open each data set once, so that a missing archive is reported before anything runs.

    Raises FileNotFoundError if the files of a data set are missing.
    """
    seen: dict[Any, RunConfig] = {}
    for plan in plans.values():
        config = plan.configs[0]
        seen.setdefault((config.data, config.data_dir), config)
    for config in seen.values():
        experiment.load_data(config)


def run(
    table: Table, plans: Mapping[Part, Plan], directory: Path, resume: bool, console: Console
) -> dict[Part, Outcome]:
    """Run all parts, one after the other.

    A run that fails does not stop the remaining runs. If no run of a part was finished, its outcome has no runs.
    """
    outcomes = {}
    for number, (part, plan) in enumerate(plans.items(), 1):
        text = f"[{number}/{len(plans)}] {part.title}: {len(plan.runs)} runs"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        outcomes[part] = _run_part(table, part, plan, directory / part.slug, resume)
    return outcomes


def _run_part(table: Table, part: Part, plan: Plan, directory: Path, resume: bool) -> Outcome:
    from rich.console import Console

    data = compare.load_all(plan)
    compare.write_record(plan, directory)
    quiet = Console(quiet=table.scale is not None)
    finished, failed = compare.train_all(plan, data, directory, resume, quiet, "")
    points = ({part.same_axis.get(key, key): value for key, value in run.point.items()} for run in finished)
    finished = [replace(run, point=point) for run, point in zip(finished, points, strict=True)]
    shown = data[compare.data_key(plan.configs[0])]
    if "train" in table.metrics:
        finished = [_with_train_accuracy(run, plan, data) for run in finished]
    grids: Mapping[str, np.ndarray] = {}
    if "surfaces" in table.figures and finished:
        grids = compare.surfaces(plan, data, finished, table.surface_points, directory)
    samples = len(shown.test[1]) if isinstance(shown.test, tuple) else 0
    return Outcome(finished, failed, shown.class_counts(), grids, samples)


def _with_train_accuracy(run: FinishedRun, plan: Plan, data: compare.Data) -> FinishedRun:
    """Return the run with the accuracy of its final model on training samples in its summary.

    The numbers are the mean and standard deviation over clients.
    """
    config = next(p.config for p in plan.runs if (p.label, p.config.seed) == (run.label, run.seed))
    shown = data[compare.data_key(config)]
    built = experiment.build(config, shown)
    built.model.load_state_dict(safetensors.torch.load_file(run.run_dir / "model.safetensors"))
    accuracies = _client_accuracies(built.model, shown, config.device)
    found = {"train_accuracy_mean": float(accuracies.mean()), "train_accuracy_std": float(accuracies.std())}
    return replace(run, summary={**run.summary, **found})


@torch.no_grad()
def _client_accuracies(model: torch.nn.Module, data: FederatedData, device: torch.device | str | None) -> np.ndarray:
    """Return the accuracy on each client's training samples, `[clients]` in 0..1."""
    model.eval().to(device or "cpu")
    first = next(model.parameters())
    accuracies = []
    for x, y in data.clients:
        right = 0
        for part, labels in zip(x.split(512), y.split(512), strict=True):
            moved = part.to(first.device, first.dtype) if part.is_floating_point() else part.to(first.device)
            right += int((model(moved).argmax(1).cpu() == labels).sum())
        accuracies.append(right / len(y))
    return np.array(accuracies)


def changes(table: Table, plans: Mapping[Part, Plan]) -> list[tuple[str, str, str, str]]:
    """Return our changes to the paper's setting, from the resolved configs.

    Each is a tuple (key, the paper's value, our value, affected parts).
    """
    found: dict[tuple[str, str, str], dict[str, set[str]]] = {}
    for part, plan in plans.items():
        ours = {short_name(p.config.algorithm): p.config for p in reversed(plan.runs)}
        swept = {axis.key for axis in plan.sweep}
        own = source(part, table.name, at_paper=True)
        for name in part.algorithms:
            for change in _differences(resolve(own, name, part.algorithms), ours[name], swept):
                found.setdefault(change, {}).setdefault(part.title, set()).add(name)
    algorithms = {part.title: set(part.algorithms) for part in plans}
    return [(*change, _where(where, algorithms)) for change, where in found.items()]


def _differences(paper: RunConfig, ours: RunConfig, swept: set[str]) -> list[tuple[str, str, str]]:
    short = short_name(paper.algorithm)
    before, after = paper.record(), ours.record()
    pairs = [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    pairs += [(f"{short}.{key}", paper.options[key], ours.options[key]) for key in paper.options]
    ignored = TECHNICAL | swept | {short} | {f"{short}.{key}" for key in swept}
    shown = [(key, _text(a), _text(b)) for key, a, b in pairs if key not in ignored]
    return [(key, a, b) for key, a, b in shown if a != b]


def _text(value: Any) -> str:
    return "–" if value is None or value == {} else str(value)


def _where(found: Mapping[str, set[str]], every: Mapping[str, set[str]]) -> str:
    """Return the names of parts or whole sections, and of algorithms if a change does not affect all of them."""
    names = []
    for part in found:
        section = part.rpartition(", ")[0]
        together = {other for other in every if section and other.startswith(f"{section}, ")}
        names.append(section if len(together) > 1 and together <= found.keys() else part)
    names = list(dict.fromkeys(names))
    where = "everywhere" if len(found) == len(every) else "; ".join(names[:_NAMED])
    if len(names) > _NAMED and len(found) < len(every):
        where += f"; and {len(names) - _NAMED} more"
    if all(found[part] == every[part] for part in found):
        return where
    return f"{', '.join(sorted(set().union(*found.values())))}: {where}"
