"""`fastsam reproduce`: from a table's name to its directory with a report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastsam.fed.common.atomic_files import make_directory, write_json
from fastsam.fed.rundir.checkpoint import RunDirectoryError
from fastsam.lab import compare, experiment
from fastsam.lab.compare import Plan
from fastsam.lab.config import ConfigError, ConfigSource, parse_flags
from fastsam.lab.report.document import Document
from fastsam.lab.report.files import COMPARISON_FILES, write_comparison
from fastsam.lab.report.finished import spelled
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce.numbers import DASH, METRICS, Outcome, Outcomes, cell, claims, claims_table
from fastsam.lab.reproduce.table import DOUBT, PaperTable, Part, Section, is_algorithm_table, load

if TYPE_CHECKING:
    from rich.console import Console

NOTE = (
    "Ours: means over the seeds, of accuracies with ± their standard deviation over the seeds, with the multiple of "
    f"FedAvg's number in parentheses. A published cell with {DOUBT} contradicts another statement of the paper."
)


def reproduce(
    name: str, scale: str | None, seeds: Sequence[str] | None, flags: Sequence[str], directory: Path, resume: bool,
    console: Console,
) -> tuple[int, dict[str, Path]]:  # fmt: skip
    """Run a table and write its report. Return 1 if a run failed, else 0; and the report's files by name.

    Without `scale` the setting is the paper's; without `seeds` the seeds are the table's. `flags` override keys of the
    config. Raises ConfigError if one of them cannot be used, RunDirectoryError if the directory has other runs, and
    FileNotFoundError if data are missing.
    """
    if seeds is not None and not seeds:
        raise ConfigError("--seeds takes integers such as 0,1,2, got ''")
    table = load(name, scale)
    plans = make_plans(table, flags, table.seeds if seeds is None else seeds)
    numbers = list(next(iter(plans.values())).seeds)
    request = {"reproduce": name, "scale": scale, "seeds": numbers, "flags": list(flags)}
    if not compare.is_new(directory, resume):
        old_request = compare.config_of(directory)
        if (old_request.get("reproduce"), old_request.get("scale")) != (name, scale):
            command = _command({**request, "flags": [], "seeds": []})
            raise RunDirectoryError(f"{directory} is not a directory of `{command}`; choose another --run-dir")
        for part, plan in plans.items():
            compare.check_directory(plan, directory / part.slug, resume)
    check_data(plans)
    make_directory(directory)
    write_json(directory / "config.json", request)
    repeat_command = _command(request)
    try:
        outcomes = run(table, plans, directory, resume, console, repeat_command)
    except KeyboardInterrupt:
        resume_command = f"{repeat_command} --run-dir {shlex.quote(str(directory))} --resume"
        raise KeyboardInterrupt(f"Continue with:\n  {resume_command}") from None
    measured = [measure(table, section, outcomes, len(numbers)) for section in table.sections if table.metrics]
    tables, found = [text_table for text_table, _ in measured], claims(table, outcomes)
    tables += [_classes(part, outcome) for part, outcome in outcomes.items() if "classes" in table.figures]
    tables += [claims_table(found)] if found else []
    title = f"{name}: {table.title}" + (f" (scaled to {scale}: not the paper's setting)" if scale else "")
    folders = [(part.title, part.slug) for part in outcomes]
    Document(title, _facts(table, request, outcomes), tables, (), folders, repeat_command).write(directory)
    results = {"title": title, "cells": [entry for _, cells in measured for entry in cells]}
    results["claims"] = [claim._asdict() | {"verdict": claim.verdict} for claim in found]
    write_json(directory / "summary.json", request | results)
    console.print(title, soft_wrap=True)
    for text_table in tables:
        text_table.show(console)
    has_failed = any(outcome.failures for outcome in outcomes.values())
    return int(has_failed), {name: directory / file for name, file in COMPARISON_FILES.items()}


def make_plans(table: PaperTable, flags: Sequence[str], seeds: Sequence[int | str]) -> dict[Part, Plan]:
    """Return the comparison of each part, all checked.

    `flags` override keys of config files. A key in an algorithm's table applies to the parts that run this algorithm.
    Raises ConfigError if a key or a seed cannot be used.
    """
    flat, flag_tables = parse_flags(flags)
    plans_by_part = {}
    for part in table.parts:
        tables = {key: value for key, value in part.keys.items() if is_algorithm_table(key, value)}
        keys = {key: value for key, value in part.keys.items() if key not in tables}
        part_flags = {name: options for name, options in flag_tables.items() if name in part.algorithms}
        source = ConfigSource(keys, tables, name=table.name, flags=flat, flag_tables=part_flags)
        plan = compare.plan(source, part.algorithms, [str(s) for s in seeds], part.sweep)
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
    from rich.console import Console

    outcomes, quiet = {}, Console(quiet=table.scale is not None)
    for number, (part, plan) in enumerate(plans.items(), 1):
        console.print(f"[{number}/{len(plans)}] {part.title}: {len(plan.runs)} runs", soft_wrap=True)
        data, folder = compare.load_all(plan), directory / part.slug
        compare.write_record(plan, folder)
        runs, errors = compare.train_all(plan, data, folder, resume, quiet, "")
        if table.figures and runs:
            has_surfaces = "surfaces" in table.figures
            grids = compare.surfaces(plan, data, runs, table.surface_points, folder) if has_surfaces else {}
            title = part.title if table.scale is None else f"{part.title} (scaled to {table.scale})"
            write_comparison(runs, folder, title, compare.facts(plan, data), command, grids)
        data_set = data[compare.data_key(plan.configs[0])]
        samples = len(data_set.test[1]) if isinstance(data_set.test, tuple) else 0
        outcomes[part] = Outcome(runs, errors, data_set.class_counts(), samples)
    return outcomes


def measure(
    table: PaperTable, section: Section, outcomes: Outcomes, seeds: int
) -> tuple[TextTable, list[dict[str, Any]]]:
    """Return a section's published cells next to ours, for reports and as data. `seeds` is the number of seeds."""
    head, rows, cells = ["algorithm"], [], []
    for column, metric in product(section.columns, table.metrics):
        label = ", ".join([column.name, METRICS[metric].head][: len(table.metrics)])
        target = f"to {100 * column.target:g} %" if METRICS[metric].uses_target and column.target else ""
        setting = ", ".join(filter(None, (table.scale, target)))
        head += [f"{label}: paper", f"{label}: ours" + (f" ({setting})" if setting else "")]
    for algorithm in table.algorithms:
        rows.append([spelled(algorithm)])
        for (i, column), metric in product(enumerate(section.columns), table.metrics):
            published = table.published(section, i, algorithm, metric)
            number, text = cell(metric, column, algorithm, outcomes, seeds)
            rows[-1] += [published or DASH, text]
            place = {"section": section.title, "column": column.name, "algorithm": algorithm, "metric": metric}
            cells.append({**place, "paper": published or None, "ours": number, "text": text})
    return TextTable(section.title, head, rows, f"{NOTE} {table.note}".strip()), cells


def _facts(table: PaperTable, request: Mapping[str, Any], outcomes: Outcomes) -> dict[str, str]:
    paper, scale = load(table.name), "the paper's"
    if table.scale is not None:
        scale = f"{table.scale}, in another setting. Our numbers cannot be compared with the paper's in size"
    pairs = [(part.keys, paper_part.keys) for part, paper_part in zip(table.parts, paper.parts, strict=True)]
    keys = sorted({key for part, paper_part in pairs for key in part if part[key] != paper_part.get(key)})
    facts = {"source": table.source, "scale": scale, "data at the paper's scale": paper.data}
    facts["keys with other values than the paper's"] = " ".join([*keys, *request["flags"]]) or "none"
    facts["seeds"] = ", ".join(map(str, request["seeds"]))
    facts |= {"note": table.note} if table.note else {}
    return facts | {f"failed: {name}": text for outcome in outcomes.values() for name, text in outcome.failures.items()}


def _classes(part: Part, outcome: Outcome) -> TextTable:
    """Return the folded table of the numbers of samples of a part's clients by class."""
    rows = [[str(client), *map(str, row)] for client, row in enumerate(outcome.counts)]
    head = ["client", *map(str, range(outcome.counts.shape[1]))]
    return TextTable(f"{part.title}: who holds which classes", head, rows, is_folded=True)


def _command(request: Mapping[str, Any]) -> str:
    words = ["fastsam", "reproduce", request["reproduce"]]
    words += ["--scale", request["scale"]] if request["scale"] else []
    words += ["--seeds", ",".join(map(str, request["seeds"]))] if request["seeds"] else []
    return shlex.join([*words, *request["flags"]])
