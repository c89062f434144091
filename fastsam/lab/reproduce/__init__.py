"""The papers' tables and figures as config files, run at the paper's scale or a small one, with published numbers next
to
ours."""

from __future__ import annotations

from fastsam.lab.reproduce.command import FILES, listing, reproduce
from fastsam.lab.reproduce.table import Column, Distrust, Part, Section, Table, load, names

__all__ = ["FILES", "Column", "Distrust", "Part", "Section", "Table", "listing", "load", "names", "reproduce"]
