"""The config files of tables and figures: their runs, the paper's numbers, and the cells that cannot be trusted.

`tables/NAME.toml` has sections with columns; its numbers are the paper's as printed. A section names a protocol,
`protocols/NAME.toml`. A protocol has the keys of a run as in a config file. Its table `scaled` has the keys that differ
at the small scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from fastsam.fed.common.checks import nearest
from fastsam.lab.config import ConfigError, ConfigSource, tomllib
from fastsam.lab.run_config import TABLES

SCALES = ("digits",)


@dataclass(frozen=True)
class Part:
    """One comparison."""

    title: str
    algorithms: tuple[str, ...]
    keys: Mapping[str, Any] = field(hash=False)  # keys of the config at the chosen scale, with the algorithms' tables
    paper: Mapping[str, Any] = field(hash=False)  # keys of the config at the paper's scale
    sweep: tuple[str, ...] = ()  # swept keys with their values
    # swept keys that figures show on the axis of another key
    same_axis: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def slug(self) -> str:
        """Return the name of the part's directory."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Column:
    """A column, whose numbers are means over its parts."""

    name: str  # text in the head
    parts: tuple[Part, ...]
    target: float | None = None  # accuracy in 0..1 for numbers of rounds, or None


@dataclass(frozen=True)
class Section:
    """A block of a table."""

    title: str
    columns: tuple[Column, ...]
    # the paper's cells as printed, by algorithm: for each column one cell per metric
    published: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Distrust:
    """Published cells that cannot be right."""

    reason: str  # explanation for the report
    section: str = ""  # title of a section; empty for all
    columns: Sequence[str] = ()  # names of columns; empty for all
    algorithms: Sequence[str] = ()  # names of algorithms; empty for all
    metrics: Sequence[str] = ()  # names of metrics; empty for all

    def covers(self, section: str, column: str, algorithm: str, metric: str) -> bool:
        """Return True if this entry covers the cell."""
        return (
            self.section in ("", section)
            and column in (self.columns or [column])
            and algorithm in (self.algorithms or [algorithm])
            and metric in (self.metrics or [metric])
        )


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper at one scale."""

    name: str
    title: str
    source: str
    scale: str | None  # name of the scale; None for the paper's
    note: str
    metrics: tuple[str, ...]  # names of `fastsam.lab.reproduce.metrics.METRICS`
    figures: tuple[str, ...]  # names among curves, sweeps, surfaces, classes (a table); the parts then have reports
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    surface_points: int
    sections: tuple[Section, ...]
    distrust: tuple[Distrust, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return all parts, each once; columns may share parts."""
        columns = [column for section in self.sections for column in section.columns]
        return tuple(dict.fromkeys(part for column in columns for part in column.parts))

    def published(self, section: Section, column: int, algorithm: str, metric: str) -> tuple[str | None, list[str]]:
        """Return a published cell as printed, or None, and the reasons not to trust it."""
        cells = section.published.get(algorithm)
        text = None if cells is None else cells[column * len(self.metrics) + self.metrics.index(metric)]
        cell = (section.title, section.columns[column].name, algorithm, metric)
        return text, [entry.reason for entry in self.distrust if entry.covers(*cell)]

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the data sets at the paper's scale."""
        return tuple(dict.fromkeys(str(part.paper["data"]) for part in self.parts))


def names() -> list[str]:
    """Return the names of all tables and figures, paper by paper, in the order of the paper."""
    files = (resources.files(__package__) / "tables").iterdir()
    stems = [file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")]
    papers = ("fedsam", "fedlesam", "fedgmt")
    return sorted(stems, key=lambda name: (papers.index(name.partition("-")[0]), "fig" in name, name))


def load(name: str, scale: str | None = None) -> PaperTable:
    """Return a table at a scale. Raises ConfigError for a name or a scale that does not exist."""
    if name not in names():
        raise ConfigError(f"there is no table {name!r}{nearest(name, names())}; choose from {', '.join(names())}")
    if scale is not None and scale not in SCALES:
        raise ConfigError(f"--scale must be one of {', '.join(SCALES)}, got {scale!r}")
    content = _read("tables", name)
    sections = tuple(_section(section, content, scale) for section in content["section"])
    return PaperTable(
        name, content["title"], content["source"], scale, content.get("note", ""),
        tuple(content.get("metrics", ())), tuple(content.get("figures", ())), tuple(content["algorithms"]),
        tuple(content["seeds" if scale is None else "scaled_seeds"]),
        content.get("surface_points" if scale is None else "scaled_surface_points", 51),
        sections, tuple(Distrust(**entry) for entry in content.get("distrust", ())),
    )  # fmt: skip


def source(part: Part, name: str, at_paper: bool = False) -> ConfigSource:
    """Return the part's config, as `fastsam.lab.config.resolve` takes it."""
    content = part.paper if at_paper else part.keys
    tables = {key: value for key, value in content.items() if _is_table(key, value)}
    return ConfigSource({k: v for k, v in content.items() if k not in tables}, tables, name=name)


def _read(folder: str, name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / folder / f"{name}.toml").read_text(encoding="utf-8"))


def _section(section: Mapping[str, Any], table: Mapping[str, Any], scale: str | None) -> Section:
    columns = tuple(_column(column, section, table, scale) for column in section["columns"])
    return Section(section["title"], columns, {k: tuple(v) for k, v in section.get("published", {}).items()})


def _column(
    column: Mapping[str, Any], section: Mapping[str, Any], table: Mapping[str, Any], scale: str | None
) -> Column:
    if "average" in column:
        return Column(column["name"], _parts_of(column["average"], column["protocol"], table["algorithms"], scale))
    layers = [_read("protocols", section["protocol"])]
    scaled_layers = [layers[0].pop("scaled")]
    for layer in (section, column):
        layers.append(layer.get("keys", {}))
        scaled_layers.append(layer.get("scaled", {}))
    paper = _merge(layers)
    keys = paper if scale is None else _merge([*layers, *scaled_layers])
    algorithms = column.get("algorithms", section.get("algorithms", table["algorithms"]))
    sweep = column.get("sweep", ()) if scale is None else column.get("scaled_sweep", column.get("sweep", ()))
    is_distinct = column.get("keys") or column.get("algorithms") or column.get("sweep")
    title = f"{section['title']}, {column['name']}" if is_distinct else section["title"]
    target = column.get("target") if scale is None else column.get("scaled_target")
    part = Part(title, tuple(algorithms), keys, paper, tuple(sweep), column.get("same_axis", {}))
    return Column(column["name"], (part,), target)


def _parts_of(table_name: str, protocol: str, algorithms: Sequence[str], scale: str | None) -> tuple[Part, ...]:
    """Return the parts of another table whose sections have this protocol, for these algorithms."""
    content = _read("tables", table_name)
    sections = [
        _section(section | {"algorithms": algorithms}, content, scale)
        for section in content["section"]
        if section["protocol"] == protocol
    ]
    return tuple(part for section in sections for column in section.columns for part in column.parts)


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers; the later wins. The tables of algorithms are merged key by key, other values replaced."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            result[key] = {**result.get(key, {}), **value} if _is_table(key, value) else value
    return result


def _is_table(key: str, value: Any) -> bool:
    return isinstance(value, dict) and key not in TABLES
