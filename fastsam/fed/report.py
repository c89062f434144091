"""What a run or a comparison ends with: a table, report.md, summary.json and the plots."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastsam.fed import plots
from fastsam.fed.checkpoint import write_bytes, write_json

if TYPE_CHECKING:
    from rich.table import Table

# What a comparison's directory holds besides one sub-directory per run.
COMPARISON_FILES = {"report": "report.md", "summary": "summary.json", "curves": "curves.png", "classes": "classes.png"}


@dataclass(frozen=True)
class Finished:
    """A finished run: `label` is the algorithm's name in the report, `summary` and `history` are the run's own."""

    label: str
    seed: int
    summary: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    run_dir: Path


def by_label(runs: Iterable[Finished]) -> dict[str, list[Finished]]:
    """The runs (one per seed) of each label, in order of appearance."""
    groups: dict[str, list[Finished]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def table(runs: Sequence[Finished]) -> tuple[list[str], list[list[str]]]:
    """Heads (of two lines, so that the table is narrow) and rows, one per algorithm.

    With several seeds a number is the mean ± population standard deviation over them.

    "clients" is mean ± standard deviation of the accuracy over clients (averaged over seeds), on what the validation
    mode of the header gives each client. "MB sent" counts both directions.
    """
    validation = next((run.summary.get("validation") for run in runs), None)
    target = next((run.summary.get("target") for run in runs if run.summary.get("target") is not None), None)
    header = ["algorithm", "test\nfinal %", "test\nbest %", f"clients %\n({validation})", "s per\nround", "MB\nsent"]
    if target is not None:
        header.insert(4, f"rounds\nto {100 * target:g} %")
    rows = []
    for label, group in by_label(runs).items():
        row = [label, _percent(group, "accuracy_final"), _percent(group, "accuracy_best"), _clients(group)]
        row += [_rounds_to_target(group)] if target is not None else []
        rows.append([*row, _mean(group, "seconds_per_round", ".3f"), _mean(group, "megabytes", ".1f")])
    return header, rows


def _values(group: Sequence[Finished], key: str) -> list[float]:
    return [run.summary[key] for run in group if run.summary.get(key) is not None]


def _percent(group: Sequence[Finished], key: str) -> str:
    values = 100 * np.array(_values(group, key))
    if not values.size:
        return "–"
    return f"{values.mean():.2f}" + (f" ± {values.std():.2f}" if values.size > 1 else "")


def _clients(group: Sequence[Finished]) -> str:
    means, spreads = _values(group, "client_accuracy_mean"), _values(group, "client_accuracy_std")
    return f"{100 * np.mean(means):.2f} ± {100 * np.mean(spreads):.2f}" if means and spreads else "–"


def _rounds_to_target(group: Sequence[Finished]) -> str:
    """The mean over seeds; "–" where a seed did not get there, e.g. "12 / –"."""
    reached = _values(group, "rounds_to_target")
    if len(reached) == len(group):
        return f"{np.mean(reached):g}" if len(group) == 1 else f"{np.mean(reached):.1f}"
    return " / ".join("–" if (r := run.summary.get("rounds_to_target")) is None else str(r) for run in group)


def _mean(group: Sequence[Finished], key: str, form: str) -> str:
    values = _values(group, key)
    return format(float(np.mean(values)), form) if values else "–"


def rich_table(runs: Sequence[Finished], title: str) -> Table:
    """The table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    header, rows = table(runs)
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        made.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def markdown(runs: Sequence[Finished], title: str, facts: Mapping[str, Any], command: str, directory: Path) -> str:
    """report.md of a comparison: what was run, the table, the plots, where each run lies and how to repeat it."""
    header, rows = table(runs)
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    lines += [
        _row(head.replace("\n", " ") for head in header),
        _row(["---", *["---:"] * (len(header) - 1)]),
        *map(_row, rows),
        "",
    ]
    seeds = sorted({run.seed for run in runs})
    if len(seeds) > 1:
        lines += [f"Mean ± standard deviation over the seeds {', '.join(map(str, seeds))}.", ""]
    lines += ["![test accuracy by round](curves.png)", "", "![who holds which classes](classes.png)", "", "Runs:", ""]
    lines += [f"- {run.label}, seed {run.seed}: `{os.path.relpath(run.run_dir, directory)}`" for run in runs]
    return "\n".join([*lines, "", "Repeat with", "", f"    {command}", ""])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def summary(runs: Sequence[Finished], directory: Path) -> dict[str, Any]:
    """summary.json of a comparison: each run's own summary, and per algorithm the mean and standard deviation over seeds of its numbers."""
    averaged: dict[str, Any] = {}
    for label, group in by_label(runs).items():
        numbers = [
            k
            for k, v in group[0].summary.items()
            if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "seed"
        ]
        complete = [k for k in numbers if len(_values(group, k)) == len(group)]
        averaged[label] = {"seeds": [run.seed for run in group]}
        averaged[label] |= {
            k: {"mean": float(np.mean(_values(group, k))), "std": float(np.std(_values(group, k)))} for k in complete
        }
    listed = [{"label": run.label, "run_dir": os.path.relpath(run.run_dir, directory), **run.summary} for run in runs]
    return {"algorithms": averaged, "runs": listed}


def draw_plots(runs: Sequence[Finished], counts: np.ndarray, directory: Path, title: str) -> list[Path]:
    """curves.png and classes.png in `directory`. counts: [clients, classes]."""
    target = next((run.summary.get("target") for run in runs if run.summary.get("target") is not None), None)
    histories = {label: [run.history for run in group] for label, group in by_label(runs).items()}
    made = plots.curves(histories, directory / "curves.png", target, title)
    return [made, plots.classes(counts, directory / "classes.png", "who holds which classes")]


def write_comparison(
    runs: Sequence[Finished], counts: np.ndarray, directory: Path, title: str, facts: Mapping[str, Any], command: str
) -> None:
    """summary.json, report.md and the plots into the comparison's directory."""
    write_json(directory / "summary.json", summary(runs, directory))
    draw_plots(runs, counts, directory, title)
    write_bytes(directory / "report.md", markdown(runs, title, facts, command, directory).encode())
