"""The report of a table: published cells next to our cells, the changes of a scaled run, and the figures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fastsam.fed.measures.surface import RADIUS
from fastsam.lab.compare import Plan
from fastsam.lab.plots import surfaces
from fastsam.lab.report.document import Document, Figure
from fastsam.lab.report.files import draw_curves, draw_sweeps
from fastsam.lab.report.finished import spelled
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.report.tables import accuracy, last_measures
from fastsam.lab.reproduce import ordering
from fastsam.lab.reproduce.metrics import DASH, METRICS, cell, failed_seeds, groups_of, seeds_of
from fastsam.lab.reproduce.runner import Outcome, changes
from fastsam.lab.reproduce.table import Column, PaperTable, Part, Section

_MOST_PAIRS = 4  # pairs of columns side by side: more do not fit a page
Outcomes = Mapping[Part, Outcome]


def document(
    table: PaperTable, plans: Mapping[Part, Plan], outcomes: Outcomes, directory: Path, command: str
) -> Document:
    """Return the report. Its figures are drawn into `directory`."""
    title = f"{table.name}: {table.title}"
    if table.scale is not None:
        title += f" (scaled to {table.scale}: not the paper's setting)"
    comparisons = text_tables(table, outcomes) or _plain_tables(table, outcomes)
    difference = _changes(table, plans)
    facts: dict[str, Any] = {"source": table.source, "scale": _scale(table)}
    facts["seeds"] = ", ".join(map(str, next(iter(plans.values())).seeds))
    facts |= {"data at the paper's scale": ", ".join(table.needs)} | ({"note": table.note} if table.note else {})
    facts |= {f"failed: {name}": text for outcome in outcomes.values() for name, text in outcome.failures.items()}
    run_paths = [
        (f"{part.title}: {spelled(run.label)}, seed {run.seed}", os.path.relpath(run.run_dir, directory))
        for part, outcome in outcomes.items()
        for run in outcome.runs
    ]
    all_tables = [*comparisons, *([difference] if difference else [])]
    all_tables += ordering.text_tables(table, outcomes)
    return Document(title, facts, all_tables, _figures(table, outcomes, directory), run_paths, command)


def _scale(table: PaperTable) -> str:
    if table.scale is None:
        return "the paper's"
    return (
        f"{table.scale}: small data, small models, few clients and rounds. Our numbers cannot be compared with the "
        f"paper's in size"
    )


def text_tables(table: PaperTable, outcomes: Outcomes) -> list[TextTable]:
    """Return the tables of published cells next to our cells, in blocks narrow enough to be read.

    The list is empty for a table without metrics.
    """
    tables = []
    for section in table.sections if table.metrics else ():
        columns_per_block = max(1, _MOST_PAIRS // len(table.metrics))
        blocks = -(-len(section.columns) // columns_per_block)
        size = -(-len(section.columns) // blocks)
        starts = range(0, len(section.columns), size)
        tables += [_block(table, section, range(s, min(s + size, len(section.columns))), outcomes) for s in starts]
    return tables


def _block(table: PaperTable, section: Section, columns: range, outcomes: Outcomes) -> TextTable:
    """Return a table of some columns of a section. Cells that cannot be trusted are numbered; the note has reasons."""
    head, reasons = ["algorithm"], dict[str, int]()
    for i in columns:
        for name in table.metrics:
            metric = METRICS[name].head if len(table.metrics) > 1 else ""
            label = ", ".join(part for part in (section.columns[i].name, metric) if part)
            head += [f"{label}: paper", f"{label}: {_measured_head(table, section.columns[i], name)}"]
    rows = []
    for algorithm in table.algorithms:
        row = [spelled(algorithm)]
        for i in columns:
            for name in table.metrics:
                text, doubts = table.published(section, i, algorithm, name)
                marks = "".join(f" †{reasons.setdefault(reason, len(reasons) + 1)}" for reason in doubts if text)
                row.append((text or DASH) + marks)
                row.append(measured_cell(section.columns[i], algorithm, name, outcomes)[1])
        rows.append(row)
    note = f"{_cells_note(table)} {table.note}".strip()
    reason_list = "; ".join(f"†{number}: {reason}" for reason, number in reasons.items())
    return TextTable(section.title, head, rows, f"{note} Not to be trusted – {reason_list}." if reason_list else note)


def _measured_head(table: PaperTable, column: Column, metric: str) -> str:
    """Return the head of our cells, which names differences from the paper's."""
    if table.scale is None:
        return "ours"
    has_target = METRICS[metric].uses_target and column.target is not None
    return f"ours ({table.scale}, to {100 * (column.target or 0):g} %)" if has_target else f"ours ({table.scale})"


def _cells_note(table: PaperTable) -> str:
    spread = METRICS[table.metrics[0]].shows_deviation
    text = "with several seeds the mean ± their standard deviation" if spread else "means over the seeds"
    if any(METRICS[m].shows_multiple for m in table.metrics):
        text += ", and in parentheses the multiple of FedAvg's"
    if table.scale is None:
        return f"Ours: {text}."
    return f"Ours: {text}. Ours are of the scaled run on {table.scale}, in another setting than the paper's."


def measured_cell(column: Column, algorithm: str, metric: str, outcomes: Outcomes) -> tuple[float | None, str]:
    """Return our number and its text."""
    groups, base = (groups_of(column, name, outcomes) for name in (algorithm, "fedavg"))
    return cell(METRICS[metric], groups, base, column.target, seeds_of(column, outcomes))


def _plain_tables(table: PaperTable, outcomes: Outcomes) -> list[TextTable]:
    """Return tables of our numbers, for figures, because these print no numbers."""
    tables = []
    for part, outcome in outcomes.items():
        candidates = [accuracy(outcome.runs), last_measures(outcome.runs)] if outcome.runs else []
        part_tables = [part_table for part_table in candidates if part_table is not None]
        part_tables += [_classes(outcome)] if "classes" in table.figures else []
        tables += [replace(t, title=f"{_part_name(table, part)}: {t.title.lower()}") for t in part_tables]
    return tables


def _classes(outcome: Outcome) -> TextTable:
    """Return the folded table of the numbers of samples of each class on each client."""
    head = ["client", *map(str, range(outcome.counts.shape[1]))]
    rows = [[str(client), *map(str, counts)] for client, counts in enumerate(outcome.counts)]
    return TextTable("Who holds which classes", head, rows, is_folded=True)


def _changes(table: PaperTable, plans: Mapping[Part, Plan]) -> TextTable | None:
    """Return the table of our changes to the paper's setting, key by key."""
    rows = changes(table, plans)
    if not rows:
        return None
    note = "From the resolved configs of both; what only says where and how a run is computed is left out."
    return TextTable("What this run changes in the paper's setting", ["key", "paper", "here", "where"], rows, note)


def _figures(table: PaperTable, outcomes: Outcomes, directory: Path) -> list[Figure]:
    """Draw the figures that the table names: the figures of each part, and all surfaces in one scale."""
    figures: list[Figure] = []
    for part, outcome in outcomes.items():
        if not outcome.runs:
            continue
        name, prefix = _part_name(table, part), f"{part.slug}-"
        part_figures = draw_curves(outcome.runs, directory, name, prefix) if "curves" in table.figures else []
        part_figures += draw_sweeps(outcome.runs, directory, name, prefix) if "sweeps" in table.figures else []
        figures += [Figure(f.path, f"{name}: {f.caption[0].lower()}{f.caption[1:]}") for f in part_figures]
    grids = {
        _surface_label(part, label, outcomes): grid
        for part, o in outcomes.items()
        for label, grid in o.surfaces.items()
    }
    if grids:
        title = "" if table.scale is None else f"scaled to {table.scale}"
        path = surfaces.surfaces(grids, RADIUS, directory / "surfaces.png", title)
        caption = "Training loss around the final models of the first seed, in two random directions"
        figures.append(Figure(path, caption))
    return figures


def _part_name(table: PaperTable, part: Part) -> str:
    """Return the part's name in figures and above our tables.

    It names the scale, so that a scaled result is not taken for the paper's.
    """
    return part.title if table.scale is None else f"{part.title} (scaled to {table.scale})"


def _surface_label(part: Part, label: str, outcomes: Outcomes) -> str:
    return spelled(label) if len(outcomes) == 1 else f"{spelled(label)}, {part.title.rpartition(', ')[2]}"


def record(table: PaperTable, outcomes: Outcomes) -> list[dict[str, Any]]:
    """Return every cell, for summary.json."""
    cells = []
    for section in table.sections:
        for (i, column), metric, algorithm in product(enumerate(section.columns), table.metrics, table.algorithms):
            head = {"section": section.title, "column": column.name, "algorithm": algorithm, "metric": metric}
            paper, doubts = table.published(section, i, algorithm, metric)
            number = measured_cell(column, algorithm, metric, outcomes)[0]
            failed = failed_seeds(groups_of(column, algorithm, outcomes), seeds_of(column, outcomes))
            cells.append(
                {**head, "paper": paper, "not_to_be_trusted": doubts, "ours": number, "failed_seeds": list(failed)}
            )
    return cells
