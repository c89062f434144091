"""The report of a table: published cells next to our cells, the changes of a scaled run, and the figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastsam.fed.algorithms import registry
from fastsam.fed.measures.surface import RADIUS
from fastsam.lab import plots, report
from fastsam.lab.compare import Plan
from fastsam.lab.report.document import Document, Figure
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.report.tables import accuracy, last_measures
from fastsam.lab.reproduce import ordering
from fastsam.lab.reproduce.metrics import METRICS, NONE, cell, groups_of
from fastsam.lab.reproduce.runner import Outcome, changes
from fastsam.lab.reproduce.table import Column, Part, Section, Table

_WIDEST = 4  # pairs of columns side by side: more do not fit a page
Outcomes = Mapping[Part, Outcome]


def algorithm_name(name: str) -> str:
    """Return the algorithm's name as the papers spell it."""
    return registry[name].__name__.replace("_", "-")


def document(
    table: Table,
    plans: Mapping[Part, Plan],
    outcomes: Outcomes,
    directory: Path,
    command: str,
    beside: Sequence[TextTable] = (),
) -> Document:
    """Return the report. Its figures are drawn into `directory`.

    Args:
        beside: further tables, of work done before the runs.
    """
    title = f"{table.name}: {table.title}"
    if table.scale is not None:
        title += f" (scaled to {table.scale}: not the paper's setting)"
    comparisons = text_tables(table, outcomes) or _plain_tables(table, outcomes)
    difference = _changes(table, plans)
    facts: dict[str, Any] = {"source": table.source, "scale": _scale(table)}
    facts["seeds"] = ", ".join(map(str, next(iter(plans.values())).seeds))
    facts |= {"data at the paper's scale": ", ".join(table.needs)} | ({"note": table.note} if table.note else {})
    facts |= {f"failed: {name}": text for outcome in outcomes.values() for name, text in outcome.failed.items()}
    where = [
        (f"{part.title}: {run.label}, seed {run.seed}", os.path.relpath(run.run_dir, directory))
        for part, outcome in outcomes.items()
        for run in outcome.runs
    ]
    every = [*comparisons, *beside, *([difference] if difference else []), *ordering.text_tables(table, outcomes)]
    return Document(title, facts, every, _figures(table, outcomes, directory), where, command)


def _scale(table: Table) -> str:
    if table.scale is None:
        return "the paper's"
    return (
        f"{table.scale}: small data, small models, few clients and rounds. Our numbers cannot be compared with the "
        f"paper's in size"
    )


def text_tables(table: Table, outcomes: Outcomes) -> list[TextTable]:
    """Return the tables of published cells next to our cells, in blocks narrow enough to be read.

    The list is empty for a table without metrics.
    """
    found = []
    for section in table.sections if table.metrics else ():
        each = max(1, _WIDEST // len(table.metrics))
        blocks = -(-len(section.columns) // each)
        size = -(-len(section.columns) // blocks)
        starts = range(0, len(section.columns), size)
        found += [_block(table, section, range(s, min(s + size, len(section.columns))), outcomes) for s in starts]
    return found


def _block(table: Table, section: Section, columns: range, outcomes: Outcomes) -> TextTable:
    """Return a table of some columns of a section. Cells that cannot be trusted are numbered; the note has reasons."""
    head, reasons = ["algorithm"], dict[str, int]()
    for i in columns:
        for name in table.metrics:
            metric = METRICS[name].head if len(table.metrics) > 1 else ""
            about = ", ".join(part for part in (section.columns[i].name, metric) if part)
            head += [f"{about}: paper", f"{about}: {_ours(table, section.columns[i], name)}"]
    rows = []
    for algorithm in table.algorithms:
        row = [algorithm_name(algorithm)]
        for i in columns:
            for j, name in enumerate(table.metrics):
                row.append(_published_cell(table, section, i, algorithm, j, reasons))
                row.append(ours_cell(section.columns[i], algorithm, name, outcomes)[1])
        rows.append(row)
    note = f"{_cells_note(table)} {table.note}".strip()
    marks = "; ".join(f"†{number}: {reason}" for reason, number in reasons.items())
    return TextTable(section.title, head, rows, f"{note} Not to be trusted – {marks}." if marks else note)


def _ours(table: Table, column: Column, metric: str) -> str:
    """Return the head of our cells, which names differences from the paper's."""
    if table.scale is None:
        return "ours"
    reached = METRICS[metric].timed and column.target is not None
    return f"ours ({table.scale}, to {100 * (column.target or 0):g} %)" if reached else f"ours ({table.scale})"


def _cells_note(table: Table) -> str:
    seeds = (
        "with several seeds the mean ± their standard deviation"
        if METRICS[table.metrics[0]].seeds
        else "means over the seeds"
    )
    relative = (
        ", and in parentheses the multiple of FedAvg's" if any(METRICS[m].relative for m in table.metrics) else ""
    )
    warning = (
        ""
        if table.scale is None
        else f" Ours are of the scaled run on {table.scale}, in another setting than the paper's."
    )
    return f"Ours: {seeds}{relative}.{warning}"


def _published_cell(
    table: Table, section: Section, column: int, algorithm: str, metric: int, reasons: dict[str, int]
) -> str:
    cells = section.published.get(algorithm)
    if cells is None:
        return NONE
    about = (section.title, section.columns[column].name, algorithm, table.metrics[metric])
    doubts = [entry.reason for entry in table.distrust if entry.covers(*about)]
    marks = "".join(f" †{reasons.setdefault(reason, len(reasons) + 1)}" for reason in doubts)
    return cells[column * len(table.metrics) + metric] + marks


def ours_cell(column: Column, algorithm: str, metric: str, outcomes: Outcomes) -> tuple[float | None, str]:
    """Return our number and its text."""
    groups, base = (groups_of(column, name, outcomes) for name in (algorithm, "fedavg"))
    return cell(METRICS[metric], groups, base, column.target)


def _plain_tables(table: Table, outcomes: Outcomes) -> list[TextTable]:
    """Return tables of our numbers, for figures, because these print no numbers."""
    found = []
    for part, outcome in outcomes.items():
        made = [accuracy(outcome.runs), last_measures(outcome.runs)] if outcome.runs else []
        found += [
            replace(one, title=f"{_part_name(table, part)}: {one.title.lower()}") for one in made if one is not None
        ]
    return found


def _changes(table: Table, plans: Mapping[Part, Plan]) -> TextTable | None:
    """Return the table of our changes to the paper's setting, key by key."""
    rows = changes(table, plans)
    if not rows:
        return None
    note = "From the resolved configs of both; what only says where and how a run is computed is left out."
    return TextTable("What this run changes in the paper's setting", ["key", "paper", "here", "where"], rows, note)


def _figures(table: Table, outcomes: Outcomes, directory: Path) -> list[Figure]:
    """Draw the figures that the table names: the figures of each part, and all surfaces in one scale."""
    found: list[Figure] = []
    for part, outcome in outcomes.items():
        if not outcome.runs:
            continue
        drawn = report.draw_plots(outcome.runs, {"": outcome.counts}, directory, _part_name(table, part))
        drawn += report.ablations(outcome.runs, directory, _part_name(table, part))
        for figure in drawn:
            kind = figure.path.stem.partition("-")[0]
            if kind in table.figures or f"{kind}s" in table.figures:
                path = plots.figure.rename(figure.path, f"{part.slug}-{figure.path.stem}")
                found.append(
                    Figure(path, f"{_part_name(table, part)}: {figure.caption[0].lower()}{figure.caption[1:]}")
                )
            else:
                plots.figure.remove(figure.path)
    grids = {
        _surface_label(part, label, outcomes): grid
        for part, o in outcomes.items()
        for label, grid in o.surfaces.items()
    }
    if grids:
        title = "" if table.scale is None else f"scaled to {table.scale}"
        path = plots.surfaces(grids, RADIUS, directory / "surfaces.png", title)
        found.append(Figure(path, "Training loss around the final models of the first seed, in two random directions"))
    return found


def _part_name(table: Table, part: Part) -> str:
    """Return the part's name in figures and above our tables.

    It names the scale, so that a scaled result is not taken for the paper's.
    """
    return part.title if table.scale is None else f"{part.title} (scaled to {table.scale})"


def _surface_label(part: Part, label: str, outcomes: Outcomes) -> str:
    return label if len(outcomes) == 1 else f"{label}, {part.title.rpartition(', ')[2]}"


def record(table: Table, outcomes: Outcomes) -> list[dict[str, Any]]:
    """Return every cell, for summary.json."""
    cells = []
    for section in table.sections:
        for i, column in enumerate(section.columns):
            for j, metric in enumerate(table.metrics):
                for algorithm in table.algorithms:
                    about = {"section": section.title, "column": column.name, "algorithm": algorithm, "metric": metric}
                    published = section.published.get(algorithm)
                    paper = None if published is None else published[i * len(table.metrics) + j]
                    doubts = [entry.reason for entry in table.distrust if entry.covers(**about)]
                    ours = ours_cell(column, algorithm, metric, outcomes)[0]
                    cells.append({**about, "paper": paper, "not_to_be_trusted": doubts, "ours": ours})
    return cells
