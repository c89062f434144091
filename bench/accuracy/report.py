"""The tables of docs/variants.md from a results file of `bench.accuracy`: means, spreads, and differences of runs with
the same seed. Nothing here trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import tables
from bench.accuracy.contenders import contenders

Record = dict[str, Any]
PROTOCOLS = {"steps": "for as many steps as SGD", "time": "in SGD's time"}
LABELS: dict[str, Callable[[Record], bool]] = {
    "right labels": lambda task: not task["noise"],
    "wrong labels": lambda task: bool(task["noise"]),
}
VERDICTS = {"no difference shown": "No difference shown", "worse": "Worse than SGD", "better": "Better than SGD"}

CLAIMS = {  # to be held against SAM's figures
    "ASAM": "a radius that the scale of the weights does not change generalises better",
    "GSAM": "a smaller gap between perturbed loss and loss generalises better",
    "WSAM": "sharpness as a term of its own weight is as good or better",
    "FriendlySAM": "without the full gradient's part the perturbation generalises better",
    "VaSSO": "a perturbation of less variance generalises better",
    "SAMON": "perturbing normalisation layers alone is better",
    "LESAM": "equal rises of the loss generalise better than equal radii",
    "LookSAM": "as accurate as SAM, nearly as fast as the base optimizer",
    "MSAM": "as accurate as SAM, as fast as the base optimizer",
    "LastGradient": "(AsyncSAM) as accurate as SAM, as fast as the base optimizer",
}


@dataclass(frozen=True)
class Difference:
    """Mean and standard error of paired differences."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> Difference:
        """Return the difference `values[i] - others[i]` of runs with seed i. Raises ValueError for fewer than two
        pairs, and for unequal numbers."""
        pairs = [a - b for a, b in zip(values, others, strict=True)]
        if len(pairs) < 2:
            raise ValueError(f"a standard error needs two seeds or more, got {len(pairs)}")
        return cls(statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)))

    @classmethod
    def mean_of(cls, several: Sequence[Difference]) -> Difference:
        """Return the mean of independent differences, each counted the same."""
        n = len(several)
        return cls(sum(d.mean for d in several) / n, math.sqrt(sum(d.error**2 for d in several)) / n)

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `no difference shown`: within two standard errors."""
        if abs(self.mean) <= 2 * self.error:
            return "no difference shown"
        return "better" if self.mean > 0 else "worse"


def complete(record: Record) -> None:
    """Raise ValueError for a record in which a task lacks a variant."""
    everybody = {who: None for task in record["tasks"].values() for who in task["step_of_sgd"]}
    for name, task in record["tasks"].items():
        missing = [who for who in everybody if who not in task["variants"]]
        if missing:
            raise ValueError(f"task {name!r} lacks {', '.join(missing)}: run the record's command again, it goes on")
    if not record["tasks"]:
        raise ValueError("no task was run")


def overall(tasks: list[Record], who: str, protocol: str, base: str = "SGD") -> Difference:
    """Return the difference to `base` in percentage points, over the tasks, each counted the same."""
    return Difference.mean_of([
        Difference.of(*([100 * a for a in task["variants"][name][protocol]["accuracy"]] for name in (who, base)))
        for task in tasks
    ])  # fmt: skip


def table(record: Record) -> str:
    """Return Markdown: verdicts, what did not help first; the differences by either protocol; every task; how it was
    made. Contenders that were removed since the measurement are left out. Raises ValueError for half a record."""
    complete(record)
    names, tasks = contenders(), {}
    for name, task in record["tasks"].items():
        tasks[name] = task | {"variants": {who: one for who, one in task["variants"].items() if who in names}}
    record = record | {"tasks": tasks}
    groups = {words: [task for task in tasks.values() if holds(task)] for words, holds in LABELS.items()}
    groups = {words: tasks for words, tasks in groups.items() if tasks}
    parts = [
        verdicts(words, tasks, protocol, trained)
        for words, tasks in groups.items()
        for protocol, trained in PROTOCOLS.items()
    ]
    for protocol, words in PROTOCOLS.items():
        parts.append(f"Difference to SGD in percentage points, trained {words}:\n\n{matrix(groups, protocol)}")
    parts.append(f"What the papers claim, and the difference to `SAM` here, on average:\n\n{claims(groups)}")
    for task in tasks.values():
        about = f"{task['train']} training samples, {task['steps']} steps, rates {' and '.join(map(_g, task['lrs']))}"
        parts.append(f"**{task['title']}** ({about})\n\n{runs(task)}")
    return "\n\n".join([*parts, provenance(record)])


def verdicts(words: str, tasks: list[Record], protocol: str, trained: str) -> str:
    """Return the verdicts over the tasks of one kind of labels, and how the single comparisons came out."""
    found: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
    for who in _ranked(tasks, protocol):
        found[overall(tasks, who, protocol).verdict].append(f"`{who}`")
    single = [overall([task], who, protocol).verdict for task in tasks for who in _ranked(tasks, protocol)]
    lines = [f"{words.capitalize()}, {_number(len(tasks), 'task')}, trained {trained}, on average:\n"]
    lines += [f"- {title}: {', '.join(found[verdict]) or 'none'}." for verdict, title in VERDICTS.items()]
    lines.append(
        f"- {_number(len(single), 'single comparison')}: {single.count('no difference shown')} without a difference, "
        f"{single.count('worse')} worse, {single.count('better')} better."
    )
    return "\n".join(lines)


def matrix(groups: dict[str, list[Record]], protocol: str) -> str:
    """Return variants down, by their mean over everything; across the tasks, and the means by kind of labels."""
    tasks = [task for group in groups.values() for task in group]
    columns = [[task] for task in tasks] + list(groups.values())
    rows = [
        [f"`{who}`", *(_cell(overall(column, who, protocol)) for column in columns)] for who in _ranked(tasks, protocol)
    ]
    return tables.table(["variant", *(t["title"] for t in tasks), *(f"mean, {words}" for words in groups)], rows)


def claims(groups: dict[str, list[Record]]) -> str:
    """Return the variants whose papers compare with SAM, in their words' sense, next to the difference to SAM."""
    kinds = [(tasks, protocol) for tasks in groups.values() for protocol in PROTOCOLS]
    titles = [f"{words}, {trained}" for words in groups for trained in ("equal steps", "SGD's time")]
    known = next(iter(groups.values()))[0]["variants"]
    rows = [
        [f"`{who}`", claim, *(_cell(overall(tasks, who, protocol, "SAM")) for tasks, protocol in kinds)]
        for who, claim in CLAIMS.items()
        if who in known and "SAM" in known
    ]
    return tables.table(["variant", "its paper", *titles], rows, "ll" + "r" * len(titles))


def runs(task: Record) -> str:
    """Return a task: what was chosen, accuracy (mean and sample standard deviation) by either protocol, steps that fit,
    cost, sharpness."""
    heads = ["", "chosen", "accuracy", "sharpness", "time a step", "steps in SGD's time", "accuracy then"]
    rows = []
    for who, row in task["variants"].items():
        chosen = f"lr {row['grid'][0]['lr']:g}, {row['second']} {row['grid'][0]['value']:g}"
        sharpness = statistics.fmean(row["steps"]["sharpness"])
        cells = [_percent(row["steps"]["accuracy"]), f"{sharpness:.3f}", f"{task['step_of_sgd'][who]:.2f}"]
        rows.append([f"`{who}`", chosen, *cells, row["time"]["steps"], _percent(row["time"]["accuracy"])])
    return tables.table(heads, rows, "llrrrrr")


def provenance(record: Record) -> str:
    e, s = record["environment"], record["settings"]
    tried = {who: row for task in record["tasks"].values() for who, row in task["variants"].items()}
    values = {who: sorted({trial["value"] for trial in row["grid"]}) for who, row in tried.items()}
    grid = "; ".join(f"`{who}` {tried[who]['second']} {', '.join(map(_g, found))}" for who, found in values.items())
    trials, seeds = len(next(iter(tried.values()))["grid"]), len(s["tuning_seeds"])
    more = [f"`{one['command']}` (commit `{tables.commit(one)}`)" for one in record["continued"]]
    return (
        f"Grid, {_number(trials, 'trial')} for everybody, on {_number(seeds, 'seed')} and samples of "
        f"{'their' if seeds != 1 else 'its'} own: the two rates of a task times {grid}. Momentum {s['momentum']}; "
        f"weight decay {s['weight_decay']:g}, but SGD's is in the grid. Sharpness: rise of the training loss within a "
        f"step of {s['radius']} along its gradient.\n\n"
        f"{tables.made_by(e)}; {e['machine']['cpu']}, one of {e['machine']['cores']} cores, which other processes used "
        f"too; Python {e['versions']['python']}, torch {e['versions']['torch']}."
        + (f" Added to by {', '.join(more)}." if more else "")
    )


def _ranked(tasks: list[Record], protocol: str) -> list[str]:
    others = [who for who in tasks[0]["variants"] if who != "SGD"]
    return sorted(others, key=lambda who: -overall(tasks, who, protocol).mean)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _g(value: float) -> str:
    return f"{value:g}"


def _cell(found: Difference) -> str:
    """Return a difference, bold where one is shown."""
    text = f"{round(found.mean, 1) + 0.0:+.1f} ± {found.error:.1f}"  # + 0.0: no "-0.0"
    return text if found.verdict == "no difference shown" else f"**{text}**"


def _percent(shares: list[float]) -> str:
    percents = [100 * share for share in shares]
    return f"{statistics.fmean(percents):.1f} ({statistics.stdev(percents):.1f})"
