"""The tables of docs/variants.md from the record of `python -m bench accuracy`: means, spreads, and differences of runs
with the same seed. Nothing here trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsam.lab.report.table import Table

PROTOCOLS = {"steps": "for as many steps as SGD", "time": "in SGD's time"}
Task = Mapping[str, Any]  # a case, with `who`: its rows by name


@dataclass(frozen=True)
class Difference:
    """Mean and standard error of paired differences, in percentage points."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> Difference:
        """Return the difference `values[i] - others[i]` of runs with seed i. Raises ValueError for fewer than two
        pairs, and for unequal numbers."""
        pairs = [100 * a - 100 * b for a, b in zip(values, others, strict=True)]
        if len(pairs) < 2:
            raise ValueError(f"a standard error needs two seeds or more, got {len(pairs)}")
        return cls(statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)))

    @classmethod
    def mean_of(cls, several: Sequence[Difference]) -> Difference:
        """Return the mean of independent differences, each counted the same."""
        n = len(several)
        return cls(sum(d.mean for d in several) / n, math.sqrt(sum(d.error**2 for d in several)) / n)

    def cell(self) -> str:
        """Return the difference, bold beyond two standard errors."""
        text = f"{round(self.mean, 1) + 0.0:+.1f} ± {self.error:.1f}"  # + 0.0: no "-0.0"
        return f"**{text}**" if abs(self.mean) > 2 * self.error else text


def overall(tasks: Sequence[Task], who: str, protocol: str, base: str = "SGD") -> Difference:
    """Return the difference to `base`, over the tasks, each counted the same."""
    found = [[task["who"][name][protocol]["accuracy"] for name in (who, base)] for task in tasks]
    return Difference.mean_of([Difference.of(own, others) for own, others in found])


def pieces(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences by either protocol in Markdown. Raises ValueError if a task lacks a contender."""
    tasks = [case | {"who": {row["name"]: row for row in case["rows"]}} for case in record["cases"]]
    for task in tasks:
        if missing := sorted({name for other in tasks for name in other["who"]} - task["who"].keys()):
            raise ValueError(f"task {task['name']!r} lacks {', '.join(missing)}: run the command again with --add")
    for protocol, words in PROTOCOLS.items():
        yield f"Difference to SGD in percentage points, trained {words}:\n\n{differences(tasks, protocol)}"


def differences(tasks: Sequence[Task], protocol: str) -> str:
    """Return variants down, by their mean over everything; across the tasks, and the means by kind of labels."""
    groups = {words: [task for task in tasks if bool(task["noise"]) == noisy] for words, noisy in
              (("right labels", False), ("wrong labels", True))}  # fmt: skip
    columns = {task["title"]: [task] for task in tasks}
    columns |= {f"mean, {words}": group for words, group in groups.items() if group}
    others = [who for who in tasks[0]["who"] if who != "SGD"]
    ranked = sorted(others, key=lambda who: -overall(tasks, who, protocol).mean)
    rows = [[f"`{who}`", *(overall(column, who, protocol).cell() for column in columns.values())] for who in ranked]
    return Table("", ["variant", *columns], rows).markdown()
