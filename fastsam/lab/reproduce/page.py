"""The report of a table: published cells next to our cells, the changes of a scaled run, and the order of methods."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from fastsam.lab.compare import Plan
from fastsam.lab.report.document import Document
from fastsam.lab.report.finished import spelled
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce import ordering
from fastsam.lab.reproduce.metrics import DASH, METRICS, cell, groups_of
from fastsam.lab.reproduce.runner import Outcome, changes
from fastsam.lab.reproduce.table import Column, PaperTable, Part, Section

Outcomes = Mapping[Part, Outcome]


def document(table: PaperTable, plans: Mapping[Part, Plan], outcomes: Outcomes, command: str) -> Document:
    """Return the report. The parts of a figure have reports of their own, with the figures."""
    title, scale = f"{table.name}: {table.title}", "the paper's"
    if table.scale is not None:
        title += f" (scaled to {table.scale}: not the paper's setting)"
        scale = f"{table.scale}, in another setting. Our numbers cannot be compared with the paper's in size"
    facts: dict[str, Any] = {"source": table.source, "scale": scale}
    facts["seeds"] = ", ".join(map(str, next(iter(plans.values())).seeds))
    facts |= {"data at the paper's scale": ", ".join(table.needs)} | ({"note": table.note} if table.note else {})
    facts |= {f"failed: {name}": text for outcome in outcomes.values() for name, text in outcome.failures.items()}
    tables = [_cells(table, section, outcomes) for section in table.sections if table.metrics]
    tables += [_classes(part, outcome.counts) for part, outcome in outcomes.items() if "classes" in table.figures]
    if rows := changes(table, plans):
        note = "From the resolved configs of both; what only says where and how a run is computed is left out."
        head = ["key", "paper", "here", "where"]
        tables.append(TextTable("What this run changes in the paper's setting", head, rows, note))
    tables += ordering.text_tables(table, outcomes)
    return Document(title, facts, tables, (), [(part.title, part.slug) for part in outcomes], command)


def _cells(table: PaperTable, section: Section, outcomes: Outcomes) -> TextTable:
    """Return a section's published cells next to ours. Cells that cannot be trusted are numbered; the note has
    reasons."""
    head, reasons = ["algorithm"], dict[str, int]()
    pairs = list(product(enumerate(section.columns), table.metrics))
    for (_, column), name in pairs:
        label = ", ".join([column.name, METRICS[name].head][: len(table.metrics)])
        ours = "ours" if table.scale is None else f"ours ({table.scale}"
        if table.scale is not None:
            is_until = METRICS[name].uses_target and column.target is not None
            ours += f", to {100 * (column.target or 0):g} %)" if is_until else ")"
        head += [f"{label}: paper", f"{label}: {ours}"]
    rows = []
    for algorithm in table.algorithms:
        row = [spelled(algorithm)]
        for (i, column), name in pairs:
            text, doubts = table.published(section, i, algorithm, name)
            marks = "".join(f" †{reasons.setdefault(reason, len(reasons) + 1)}" for reason in doubts if text)
            row += [(text or DASH) + marks, measured_cell(column, algorithm, name, outcomes)[1]]
        rows.append(row)
    note = "Ours: means over the seeds, of accuracies with ± their standard deviation over the seeds. In parentheses: "
    note += f"standard deviation over the clients, or the multiple of FedAvg's number. {table.note}".strip()
    reason_list = "; ".join(f"†{number}: {reason}" for reason, number in reasons.items())
    return TextTable(section.title, head, rows, f"{note} Not to be trusted – {reason_list}." if reason_list else note)


def measured_cell(column: Column, algorithm: str, metric: str, outcomes: Outcomes) -> tuple[float | None, str]:
    """Return our number and its text."""
    groups, base = (groups_of(column, name, outcomes) for name in (algorithm, "fedavg"))
    seeds = {seed for part in column.parts for seed in outcomes[part].seeds}
    return cell(METRICS[metric], groups, base, column.target, len(seeds))


def _classes(part: Part, counts: np.ndarray) -> TextTable:
    """Return the folded table of the numbers of samples `[clients, classes]` of a part."""
    rows = [[str(client), *map(str, row)] for client, row in enumerate(counts)]
    head = ["client", *map(str, range(counts.shape[1]))]
    return TextTable(f"{part.title}: who holds which classes", head, rows, is_folded=True)


def record(table: PaperTable, outcomes: Outcomes) -> list[dict[str, Any]]:
    """Return every cell, for summary.json."""
    cells = []
    for section in table.sections:
        for (i, column), metric, algorithm in product(enumerate(section.columns), table.metrics, table.algorithms):
            names = {"section": section.title, "column": column.name, "algorithm": algorithm, "metric": metric}
            paper, doubts = table.published(section, i, algorithm, metric)
            number, text = measured_cell(column, algorithm, metric, outcomes)
            cells.append({**names, "paper": paper, "not_to_be_trusted": doubts, "ours": number, "text": text})
    return cells
