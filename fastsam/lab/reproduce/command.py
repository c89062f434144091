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
from fastsam.lab.report.document import Document
from fastsam.lab.reproduce import ordering, runner, tuning
from fastsam.lab.reproduce.page import algorithm_name, document, record
from fastsam.lab.reproduce.table import load, names

if TYPE_CHECKING:
    from rich.console import Console

_NUMBER = 20  # longer texts may break in a terminal
_PAGE = 400  # no table is wider
FILES = {"report": "report.html", "report (text)": "report.md", "summary": "summary.json"}


def listing() -> list[tuple[str, str, str, str]]:
    """Return a row for each table: its name, its title, the data sets at the paper's scale, and the numbers of runs.

    The numbers of runs are one text: paper's scale; scaled.
    """
    rows = []
    for name in names():
        full, small = load(name), load(name, "digits")
        counts = [
            sum(len(plan.runs) for plan in runner.plans(runner.sources(t, ()), t.seeds).values()) for t in (full, small)
        ]
        rows.append((name, full.title, ", ".join(full.needs), f"{counts[0]}; {counts[1]}"))
    return rows


def reproduce(
    name: str, scale: str | None, seeds: Sequence[str] | None, flags: Sequence[str], directory: Path, resume: bool,
    console: Console, tune: Sequence[str] | None = None,
) -> int:  # fmt: skip
    """Run a table and write its report. Return 1 if a run failed, else 0.

    Args:
        name: name of the table.
        scale: scale of the runs; None for the paper's.
        seeds: seeds in place of the table's.
        flags: keys of the config that override the table's.
        directory: directory of the results.
        resume: continue interrupted runs in `directory`.
        console: terminal for progress and tables.
        tune: values that each method is tuned over before the runs, see `tuning.grid`; None to tune nothing.

    Raises:
        ConfigError: a key, a seed or a flag cannot be used.
        RunDirectoryError: the directory is in use by other runs.
        FileNotFoundError: data are missing.
    """
    table = load(name, scale)
    numbers = table.seeds if seeds is None else _numbers(seeds)
    sources = runner.sources(table, flags)
    plans = runner.plans(sources, numbers)
    grid = None if tune is None else tuning.grid(tune, numbers, flags)
    asked = {"reproduce": name, "scale": scale, "seeds": list(numbers), "flags": list(flags)}
    asked |= {"tune": grid.texts} if grid else {}
    _check_directory({} if grid else plans, asked, directory, resume)
    runner.check_data(plans)
    make_directory(directory)
    write_json(directory / "config.json", asked)
    again, tuned = _command(asked), dict[Any, tuning.Found]()
    try:
        if grid:
            sources, tuned = tuning.tune(sources, grid, directory, resume, console)
            plans = runner.plans(sources, numbers)
            _check_directory(plans, asked, directory, True)
        outcomes = runner.run(table, plans, directory, resume, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Continue with:\n  {again} --run-dir {shlex.quote(str(directory))} --resume") from None
    beside = tuning.text_tables(tuned, grid, algorithm_name) if grid else []
    made = document(table, plans, outcomes, directory, again, beside)
    made.write(directory)
    found = {"cells": record(table, outcomes), "ordering": ordering.record(table, outcomes)}
    found |= {"tuning": tuning.record(tuned, grid)} if grid else {}
    write_json(directory / "summary.json", {**asked, "title": made.title, **found})
    show(made, console)
    return 1 if any(outcome.failed for outcome in outcomes.values()) else 0


def show(made: Document, console: Console) -> None:
    """Print the tables of a report on a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table as RichTable

    console.print(made.title, markup=False, highlight=False, soft_wrap=True)
    for table in made.tables:
        printed = RichTable(title=table.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        rows = [[cell.replace(" ± ", "±") for cell in row] for row in table.rows]
        for i, head in enumerate(table.head):
            numbers = max((len(row[i]) for row in rows if len(row[i]) <= _NUMBER), default=0)
            printed.add_column(head, justify="left" if i == 0 else "right", min_width=numbers, overflow="fold")
        for row in rows:
            printed.add_row(*row)
        # Numbers are never cut: where the terminal is too narrow, lines run over its edge.
        least = Measurement.get(console, console.options.update(max_width=_PAGE), printed).minimum
        console.print(printed, width=max(console.width, least), crop=False)
        console.print(table.note, markup=False, highlight=False, soft_wrap=True)


def _numbers(seeds: Sequence[str]) -> list[int]:
    try:
        numbers = [int(seed) for seed in seeds]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"--seeds takes integers such as 0,1,2, got {','.join(seeds)!r}")
    return numbers


def _check_directory(plans: Mapping[Any, Any], asked: Mapping[str, Any], directory: Path, resume: bool) -> None:
    """Check that the directory is new or empty, or has earlier runs of the same table at the same scale.

    Raises:
        RunDirectoryError: the directory has other content, or it is not empty and `resume` is False.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not resume:
        raise RunDirectoryError(
            f"the directory {directory} exists; continue it with --resume, or choose another --run-dir"
        )
    try:
        before = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        before = {}
    if (
        not isinstance(before, dict)
        or before.get("reproduce") != asked["reproduce"]
        or before.get("scale") != asked["scale"]
    ):
        raise RunDirectoryError(
            f"{directory} is not a directory of `{_command({**asked, 'flags': [], 'seeds': []})}`; choose another "
            f"--run-dir"
        )
    for part, plan in plans.items():
        compare.check_directory(plan, directory / part.slug, resume)


def _command(asked: Mapping[str, Any]) -> str:
    words = ["fastsam", "reproduce", asked["reproduce"]]
    words += ["--scale", asked["scale"]] if asked["scale"] else []
    words += ["--seeds", ",".join(map(str, asked["seeds"]))] if asked["seeds"] else []
    words += [word for text in asked.get("tune", ()) for word in ("--tune", text)]
    return shlex.join([*words, *asked["flags"]])
