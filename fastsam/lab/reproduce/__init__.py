"""The papers' tables and figures as config files, run at the paper's scale or a small one, with published numbers next
to
ours."""

from __future__ import annotations

from fastsam.lab.reproduce.command import FILES, listing, reproduce
from fastsam.lab.reproduce.table import Column, Distrust, PaperTable, Part, Section, load, names

__all__ = ["FILES", "Column", "Distrust", "PaperTable", "Part", "Section", "listing", "load", "names", "reproduce"]
