"""Finished runs, read back from their directories for figures. Runs started from Python are included."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastsam.fed.common.atomic_files import make_directory, read_bytes, read_json
from fastsam.lab.report.document import Figure
from fastsam.lab.report.files import draw_curves
from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.run_config import short_name

_SEED = re.compile(r"-seed\d+$")


def runs_in(directory: str | Path) -> list[FinishedRun]:
    """Return the run of a run directory, or all runs below any other directory, sorted by their paths.

    A single run is named after its algorithm. One of several runs is named after its directory, without its seed. The
    summary of a run that is not finished is empty. Raises ValueError if the directory has no run.
    """
    top = Path(directory)
    places = [top] if (top / "metrics.jsonl").is_file() else sorted(p.parent for p in top.rglob("metrics.jsonl"))
    if not places:
        raise ValueError(f"{top} holds no run: a run directory has a file metrics.jsonl")
    return [_read(place, top) for place in places]


def _read(place: Path, top: Path) -> FinishedRun:
    config, summary = (_json(place / name) for name in ("config.json", "summary.json"))
    algorithm = short_name(str(config.get("algorithm", place.name)))
    label = algorithm if place == top else _SEED.sub("", place.relative_to(top).as_posix())
    history = [json.loads(line) for line in read_bytes(place / "metrics.jsonl").decode().splitlines()]
    return FinishedRun(label, int(config.get("seed", 0)), summary, history, place, label)


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file, or nothing if the file does not exist yet."""
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def draw(directories: Sequence[Path], out: Path | None) -> list[Figure]:
    """Draw curves.png of all runs of the directories, and curve-KEY.png of each measure and metric.

    Each figure is also saved as SVG and PDF. Raises ValueError if a directory has no run, or there are several
    directories and no `out`.

    Args:
        directories: run directories, or directories above them.
        out: directory of the figures; by default `directories[0]`, if it is the only one.
    """
    if out is None and len(directories) > 1:
        raise ValueError(f"{len(directories)} directories: say with --out where the figures of all of them shall go")
    runs: list[FinishedRun] = []
    for directory in dict.fromkeys(directories):
        new_runs = runs_in(directory)
        if len(directories) > 1:
            new_runs = [_rename(run, directory.name, len(new_runs)) for run in new_runs]
        runs += new_runs
    folder = directories[0] if out is None else out
    make_directory(folder, "choose another --out")
    title = ", ".join(directory.resolve().name for directory in directories)
    return draw_curves(runs, folder, title)


def _rename(run: FinishedRun, directory: str, runs: int) -> FinishedRun:
    """Return the run renamed after its directory, followed by its label if the directory has several runs."""
    label = directory if runs == 1 else f"{directory} {run.label}"
    return replace(run, label=label, algorithm=label)
