"""The config files of tables and figures: their runs and the paper's numbers.

`tables/NAME.toml` has sections with columns; its numbers are the paper's as printed. A number ends with `DOUBT` if it
contradicts another statement of the paper; a comment has the reason. A section names a protocol, `protocols/NAME.toml`.
A protocol has the keys of a run as in a config file. Its table `scaled` has the keys that differ at the small scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

from fastsam.fed.common.checks import nearest
from fastsam.lab.config import ConfigError, tomllib
from fastsam.lab.run_config import OPTION_TABLES, TABLES

SCALES = ("digits",)
DOUBT = "†"


@dataclass(frozen=True)
class Part:
    """One comparison."""

    title: str
    algorithms: tuple[str, ...]
    keys: Mapping[str, Any] = field(hash=False)  # keys of the config, with the algorithms' tables
    sweep: tuple[str, ...]  # swept keys with their values

    @property
    def slug(self) -> str:
        """Return the name of the part's directory."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-")


class Column(NamedTuple):
    """A column, whose numbers are means over its parts."""

    name: str  # text in the head
    parts: tuple[Part, ...]
    target: float | None = None  # accuracy in 0..1 for numbers of rounds, or None


class Section(NamedTuple):
    """A block of a table."""

    title: str
    columns: tuple[Column, ...]
    # the paper's cells as printed, by algorithm: for each column one cell per metric
    published: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper at one scale."""

    name: str
    scale: str | None  # name of the scale; None for the paper's
    sections: tuple[Section, ...]
    title: str
    source: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...] = ()  # names of `fastsam.lab.reproduce.numbers.METRICS`
    figures: tuple[str, ...] = ()  # in the parts' reports: curves, sweeps, surfaces, classes (a table)
    note: str = ""
    surface_points: int = 51

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return all parts, each once; columns may share parts."""
        columns = [column for section in self.sections for column in section.columns]
        return tuple(dict.fromkeys(part for column in columns for part in column.parts))

    @property
    def data(self) -> str:
        """Return the names of the data sets."""
        return ", ".join(dict.fromkeys(str(part.keys["data"]) for part in self.parts))

    def published(self, section: Section, column: int, algorithm: str, metric: str) -> str:
        """Return a published cell as printed, "" if the paper has no such cell."""
        cells = section.published.get(algorithm)
        return "" if cells is None else cells[column * len(self.metrics) + self.metrics.index(metric)]


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
    content = _at_scale(_read("tables", name), scale)
    sections = tuple(_section(section, content, scale) for section in content.pop("section"))
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items()}
    return PaperTable(name, scale, sections, **fields)


def is_algorithm_table(key: str, value: Any) -> bool:
    """Return True if a key of a config has the options of an algorithm."""
    return isinstance(value, dict) and key not in {*TABLES, *OPTION_TABLES}


def _read(folder: str, name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / folder / f"{name}.toml").read_text(encoding="utf-8"))


def _at_scale(content: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """Return the keys at a scale: at a small one, `scaled_KEY` replaces KEY."""
    scaled = {key[7:]: value for key, value in content.items() if key.startswith("scaled_")}
    keys = {key: value for key, value in content.items() if not key.startswith("scaled_")}
    return keys if scale is None else keys | scaled


def _section(section: Mapping[str, Any], table: Mapping[str, Any], scale: str | None) -> Section:
    columns = tuple(_column(_at_scale(column, scale), section, table, scale) for column in section["columns"])
    return Section(section["title"], columns, {k: tuple(v) for k, v in section.get("published", {}).items()})


def _column(
    column: Mapping[str, Any], section: Mapping[str, Any], table: Mapping[str, Any], scale: str | None
) -> Column:
    if "average" in column:  # the parts of another table whose sections have this protocol, for our algorithms
        other = _read("tables", column["average"])
        kin = [s | {"algorithms": table["algorithms"]} for s in other["section"] if s["protocol"] == column["protocol"]]
        columns = [c for s in kin for c in _section(s, other, scale).columns]
        return Column(column["name"], tuple(part for c in columns for part in c.parts))
    protocol = _read("protocols", section["protocol"])
    layers = [{"keys": protocol, "scaled": protocol.pop("scaled")}, section, column]
    kinds = ("keys",) if scale is None else ("keys", "scaled")
    keys = _merge(layer.get(kind, {}) for kind in kinds for layer in layers)
    algorithms = column.get("algorithms", section.get("algorithms", table["algorithms"]))
    is_distinct = column.get("keys") or column.get("algorithms") or column.get("sweep")
    title = f"{section['title']}, {column['name']}" if is_distinct else section["title"]
    part = Part(title, tuple(algorithms), keys, tuple(column.get("sweep", ())))
    return Column(column["name"], (part,), column.get("target"))


def _merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers; the later wins. The tables of algorithms are merged key by key, other values replaced."""
    result: dict[str, Any] = {}
    for key, value in (item for layer in layers for item in layer.items()):
        result[key] = {**result.get(key, {}), **value} if is_algorithm_table(key, value) else value
    return result
