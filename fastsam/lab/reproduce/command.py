"""`fastsam reproduce`: from a table's name to its directory with reports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastsam.fed.common.atomic_files import make_directory, write_json
from fastsam.fed.rundir.checkpoint import RunDirectoryError
from fastsam.lab import compare
from fastsam.lab.config import ConfigError
from fastsam.lab.report.files import COMPARISON_FILES
from fastsam.lab.reproduce import ordering, runner
from fastsam.lab.reproduce.page import document, record
from fastsam.lab.reproduce.table import load

if TYPE_CHECKING:
    from rich.console import Console


def reproduce(
    name: str, scale: str | None, seeds: Sequence[str] | None, flags: Sequence[str], directory: Path, resume: bool,
    console: Console,
) -> tuple[int, dict[str, Path]]:  # fmt: skip
    """Run a table and write its report. Return 1 if a run failed, else 0; and the report's files by name.

    Args:
        name: name of the table.
        scale: scale of the runs; None for the paper's.
        seeds: seeds of the runs; None for the table's.
        flags: keys of the config that override the table's.
        directory: directory of the runs and the report.
        resume: continue interrupted runs in `directory`.
        console: console of the progress.

    Raises:
        ConfigError: a key, a seed or a flag cannot be used.
        RunDirectoryError: the directory is in use by other runs.
        FileNotFoundError: data are missing.
    """
    table = load(name, scale)
    numbers = table.seeds if seeds is None else _numbers(seeds)
    plans = runner.plans(table, flags, numbers)
    request = {"reproduce": name, "scale": scale, "seeds": list(numbers), "flags": list(flags)}
    _check_directory(plans, request, directory, resume)
    runner.check_data(plans)
    make_directory(directory)
    write_json(directory / "config.json", request)
    repeat_command = _command(request)
    try:
        outcomes = runner.run(table, plans, directory, resume, console)
    except KeyboardInterrupt:
        resume_command = f"{repeat_command} --run-dir {shlex.quote(str(directory))} --resume"
        raise KeyboardInterrupt(f"Continue with:\n  {resume_command}") from None
    report = document(table, plans, outcomes, directory, repeat_command)
    report.write(directory)
    results = {"cells": record(table, outcomes), "ordering": ordering.record(table, outcomes)}
    write_json(directory / "summary.json", {**request, "title": report.title, **results})
    console.print(report.title, soft_wrap=True)
    for part in report.tables:
        part.show(console)
    paths = {name: directory / file for name, file in COMPARISON_FILES.items()}
    paths |= {figure.path.stem: figure.path for figure in report.figures}
    return 1 if any(outcome.failures for outcome in outcomes.values()) else 0, paths


def _numbers(seeds: Sequence[str]) -> list[int]:
    try:
        numbers = [int(seed) for seed in seeds]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"--seeds takes integers such as 0,1,2, got {','.join(seeds)!r}")
    return numbers


def _check_directory(plans: Mapping[Any, Any], request: Mapping[str, Any], directory: Path, resume: bool) -> None:
    """Check that the directory is new or empty, or has earlier runs of the same table at the same scale.

    Raises RunDirectoryError if the directory has other content, or it is not empty and `resume` is False.
    """
    if compare.is_new(directory, resume):
        return
    try:
        old_request = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        old_request = {}
    keys = ("reproduce", "scale")
    if not isinstance(old_request, dict) or any(old_request.get(key) != request[key] for key in keys):
        command = _command({**request, "flags": [], "seeds": []})
        raise RunDirectoryError(f"{directory} is not a directory of `{command}`; choose another --run-dir")
    for part, plan in plans.items():
        compare.check_directory(plan, directory / part.slug, resume)


def _command(request: Mapping[str, Any]) -> str:
    words = ["fastsam", "reproduce", request["reproduce"]]
    words += ["--scale", request["scale"]] if request["scale"] else []
    words += ["--seeds", ",".join(map(str, request["seeds"]))] if request["seeds"] else []
    return shlex.join([*words, *request["flags"]])
