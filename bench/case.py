"""A case of a question, and the options of the command that measures it."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch

from bench.timing import Machine

QUICK_SHARE = 5  # --quick takes a fifth of the rounds


class Options(argparse.Namespace):
    """The options of `python -m bench`."""

    device: str
    quick: bool
    rounds: int | None
    rows: Sequence[str]
    peers: dict[str, str]

    @cached_property
    def machine(self) -> Machine:
        return Machine(torch.device(self.device))

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the names that match `--rows`."""
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.rows or ["*"])]

    def number(self, rounds: int, quick: int | None = None) -> int:
        """Return the number of rounds."""
        return self.rounds or ((quick or max(rounds // QUICK_SHARE, 3)) if self.quick else rounds)


@dataclass(frozen=True)
class Case:
    """A case to be measured.

    Args:
        rows: names of the rows that it is going to have, if they are known.
        measure: function that returns the case, or several; part, name and title are added to a case that lacks them.
        takes_seconds (bool): `measure` takes the seconds that it may take.
    """

    part: str
    name: str
    rows: Sequence[str]
    measure: Callable[..., dict[str, Any] | Iterable[dict[str, Any]]]
    takes_seconds: bool = False
