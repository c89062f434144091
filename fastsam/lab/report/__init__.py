"""The report of a run or a comparison: tables, report.md, report.html, summary.json and the figures."""

from __future__ import annotations

from fastsam.lab.report.files import (
    COMPARISON_FILES,
    Context,
    ablations,
    draw_curves,
    draw_plots,
    summary,
    write_comparison,
)
from fastsam.lab.report.finished import FinishedRun, by_label, title
from fastsam.lab.report.surface import loss_surface
from fastsam.lab.report.table import Table
from fastsam.lab.report.tables import all_tables, sentences, short_table

__all__ = [
    "COMPARISON_FILES",
    "Context",
    "FinishedRun",
    "Table",
    "ablations",
    "all_tables",
    "by_label",
    "draw_curves",
    "draw_plots",
    "loss_surface",
    "sentences",
    "short_table",
    "summary",
    "title",
    "write_comparison",
]
