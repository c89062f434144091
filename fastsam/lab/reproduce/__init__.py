"""The papers' tables and figures as config files, run at their own scale or in small, with the published numbers beside
ours."""

from __future__ import annotations

from fastsam.lab.reproduce.command import FILES, listing, reproduce
from fastsam.lab.reproduce.table import Column, Distrust, Part, Section, Table, load, names

__all__ = ["FILES", "Column", "Distrust", "Part", "Section", "Table", "listing", "load", "names", "reproduce"]
