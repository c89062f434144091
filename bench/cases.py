"""The one registry of cases, sizes times contenders: everything that measures takes its cases from here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from bench.contenders import Contender, contenders
from bench.problem import SIZES, Size

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    size: Size
    contender: Contender

    @property
    def name(self) -> str:
        return f"{self.size.name}-{self.contender.name}"


def cases(device: str = "cpu") -> list[Case]:
    """Every size with every contender on a type of device."""
    return [Case(size, contender) for size in SIZES.values() for contender in contenders(device).values()]


def choose(table: Mapping[str, T], names: Iterable[str], what: str) -> list[T]:
    """The entries of `table` under `names`. Raises ValueError for an unknown name, giving the nearest and all."""
    chosen = []
    for name in names:
        if name not in table:
            near = difflib.get_close_matches(name, table, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"there is no {what} {name!r}; {hint}there are {', '.join(table)}")
        chosen.append(table[name])
    return chosen
