"""`fastsam reproduce`: from a table's name to its directory with reports."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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

    Without `scale` the setting is the paper's; without `seeds` the seeds are the table's. `flags` override keys of the
    config. Raises ConfigError if one of them cannot be used, RunDirectoryError if the directory has other runs, and
    FileNotFoundError if data are missing.
    """
    if seeds is not None and not seeds:
        raise ConfigError("--seeds takes integers such as 0,1,2, got ''")
    table = load(name, scale)
    plans = runner.plans(table, flags, table.seeds if seeds is None else seeds)
    numbers = list(next(iter(plans.values())).seeds)
    request = {"reproduce": name, "scale": scale, "seeds": numbers, "flags": list(flags)}
    if not compare.is_new(directory, resume):
        old_request = compare.config_of(directory)
        if (old_request.get("reproduce"), old_request.get("scale")) != (name, scale):
            command = _command({**request, "flags": [], "seeds": []})
            raise RunDirectoryError(f"{directory} is not a directory of `{command}`; choose another --run-dir")
        for part, plan in plans.items():
            compare.check_directory(plan, directory / part.slug, resume)
    runner.check_data(plans)
    make_directory(directory)
    write_json(directory / "config.json", request)
    repeat_command = _command(request)
    try:
        outcomes = runner.run(table, plans, directory, resume, console, repeat_command)
    except KeyboardInterrupt:
        resume_command = f"{repeat_command} --run-dir {shlex.quote(str(directory))} --resume"
        raise KeyboardInterrupt(f"Continue with:\n  {resume_command}") from None
    report = document(table, plans, outcomes, repeat_command)
    report.write(directory)
    claims = [asdict(claim) | {"verdict": claim.verdict} for claim in ordering.claims(table, outcomes)]
    results = {"title": report.title, "cells": record(table, outcomes), "claims": claims}
    write_json(directory / "summary.json", request | results)
    console.print(report.title, soft_wrap=True)
    for text_table in report.tables:
        text_table.show(console)
    has_failed = any(outcome.failures for outcome in outcomes.values())
    return int(has_failed), {name: directory / file for name, file in COMPARISON_FILES.items()}


def _command(request: Mapping[str, Any]) -> str:
    words = ["fastsam", "reproduce", request["reproduce"]]
    words += ["--scale", request["scale"]] if request["scale"] else []
    words += ["--seeds", ",".join(map(str, request["seeds"]))] if request["seeds"] else []
    return shlex.join([*words, *request["flags"]])
