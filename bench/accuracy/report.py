"""From a results file to the section of docs/variants.md: `python -m bench.accuracy.report FILE.json`. Nothing here
trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bench.accuracy.contenders import contenders
from bench.accuracy.figures import KIND, Difference, spread
from tests.helpers.generated_page import GeneratedPage

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


def complete(record: Record) -> None:
    """Raises ValueError for a record in which a task lacks a variant."""
    everybody = {who: None for task in record["tasks"].values() for who in task["step_of_sgd"]}
    for name, task in record["tasks"].items():
        missing = [who for who in everybody if who not in task["variants"]]
        if missing:
            raise ValueError(f"task {name!r} lacks {', '.join(missing)}: run the record's command again, it goes on")
    if not record["tasks"]:
        raise ValueError("no task was run")


def difference(task: Record, who: str, protocol: str, base: str = "SGD") -> Difference:
    """To `base` in a task, in percentage points."""
    points = ([100 * a for a in task["variants"][name][protocol]["accuracy"]] for name in (who, base))
    return Difference.of(*points)


def overall(tasks: list[Record], who: str, protocol: str, base: str = "SGD") -> Difference:
    """To `base`, over the tasks, each counted the same."""
    return Difference.mean_of([difference(task, who, protocol, base) for task in tasks])


def by_labels(record: Record) -> dict[str, list[Record]]:
    """The tasks with right labels in training, and those with wrong ones: what there are."""
    found = {words: [task for task in record["tasks"].values() if holds(task)] for words, holds in LABELS.items()}
    return {words: tasks for words, tasks in found.items() if tasks}


def table(record: Record) -> str:
    """Markdown: verdicts, what did not help first; the differences by either protocol; every task; how it was made.
    Contenders that were removed since the measurement are left out."""
    names, tasks = contenders(), {}
    for name, task in record["tasks"].items():
        tasks[name] = task | {"variants": {who: one for who, one in task["variants"].items() if who in names}}
    record = record | {"tasks": tasks}
    parts = [verdicts(record)]
    for protocol, words in PROTOCOLS.items():
        parts.append(f"Difference to SGD in percentage points, trained {words}:\n\n{matrix(record, protocol)}")
    parts.append(f"What the papers claim, and the difference to `SAM` here, on average:\n\n{claims(record)}")
    parts += [f"**{task['title']}** ({_about(task)})\n\n{runs(task)}" for task in record["tasks"].values()]
    return "\n\n".join([*parts, provenance(record)])


def verdicts(record: Record) -> str:
    """A list per protocol and kind of labels, over the tasks of that kind; and how the single comparisons came out."""
    parts = []
    for words, tasks in by_labels(record).items():
        for protocol, trained in PROTOCOLS.items():
            found: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
            for who in _ranked(tasks, protocol):
                found[overall(tasks, who, protocol).verdict].append(f"`{who}`")
            single = [difference(task, who, protocol).verdict for task in tasks for who in _ranked(tasks, protocol)]
            lines = [f"{words.capitalize()}, {_number(len(tasks), 'task')}, trained {trained}, on average:\n"]
            lines += [f"- {title}: {', '.join(found[verdict]) or 'none'}." for verdict, title in VERDICTS.items()]
            lines.append(
                f"- {_number(len(single), 'single comparison')}: {single.count('no difference shown')} without a "
                f"difference, "
                f"{single.count('worse')} worse, {single.count('better')} better."
            )
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def matrix(record: Record, protocol: str) -> str:
    """Variants down, by their mean over everything; across the tasks, and the means by kind of labels."""
    groups = by_labels(record)
    tasks = [task for group in groups.values() for task in group]
    titles = [task["title"] for task in tasks] + [f"mean, {words}" for words in groups]
    rows = ["| variant | " + " | ".join(titles) + " |", "|---" + "|---:" * len(titles) + "|"]
    for who in _ranked(tasks, protocol):
        found = [difference(task, who, protocol) for task in tasks]
        found += [overall(group, who, protocol) for group in groups.values()]
        rows.append(f"| `{who}` | " + " | ".join(_cell(one) for one in found) + " |")
    return "\n".join(rows)


def claims(record: Record) -> str:
    """The variants whose papers compare with SAM, in their words' sense, beside the difference to SAM by kind of labels
    and protocol."""
    groups = by_labels(record)
    kinds = [(tasks, protocol) for tasks in groups.values() for protocol in PROTOCOLS]
    titles = [f"{words}, {trained}" for words in groups for trained in ("equal steps", "SGD's time")]
    rows = ["| variant | its paper | " + " | ".join(titles) + " |", "|---|---" + "|---:" * len(titles) + "|"]
    known = record["tasks"][next(iter(record["tasks"]))]["variants"]
    for who, claim in CLAIMS.items():
        if who in known and "SAM" in known:
            cells = [_cell(overall(tasks, who, protocol, "SAM")) for tasks, protocol in kinds]
            rows.append(f"| `{who}` | {claim} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def runs(task: Record) -> str:
    """A task: what was chosen, accuracy (mean and sample standard deviation) by either protocol, steps that fit, cost,
    sharpness."""
    rows = [
        "| | chosen | accuracy | sharpness | time a step | steps in SGD's time | accuracy then |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for who, row in task["variants"].items():
        best = row["grid"][0]
        cells = [
            f"`{who}`",
            f"lr {best['lr']:g}, {row['second']} {best['value']:g}",
            _percent(row["steps"]["accuracy"]),
            f"{spread(row['steps']['sharpness'])[0]:.3f}",
            f"{task['step_of_sgd'][who]:.2f}",
            str(row["time"]["steps"]),
            _percent(row["time"]["accuracy"]),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def provenance(record: Record) -> str:
    e, s = record["environment"], record["settings"]
    tried = {who: row for task in record["tasks"].values() for who, row in task["variants"].items()}
    grid = "; ".join(
        f"`{who}` {row['second']} {', '.join(f'{v:g}' for v in sorted({trial['value'] for trial in row['grid']}))}"
        for who, row in tried.items()
    )
    trials, seeds = len(next(iter(tried.values()))["grid"]), len(s["tuning_seeds"])
    return (
        f"Grid, {_number(trials, 'trial')} for everybody, on {_number(seeds, 'seed')} and samples of "
        f"{'their' if seeds != 1 else 'its'} own: "
        f"the two rates of a task times {grid}. Momentum {s['momentum']}; weight decay {s['weight_decay']:g}, but "
        f"SGD's is in the grid. "
        f"Sharpness: rise of the training loss within a step of {s['radius']} along its gradient.\n\n"
        f"Made by `{e['command']}` on {e['date'][:10]}, commit "
        f"`{e['commit'][:12]}{'+changes' * ('+' in e['commit'])}`; "
        f"{e['machine']['cpu']}, one of {e['machine']['cores']} cores, which other processes used too; Python "
        f"{e['versions']['python']}, "
        f"torch {e['versions']['torch']}.{_continued(record)}"
    )


def _continued(record: Record) -> str:
    more = [
        f"`{one['command']}` (commit `{one['commit'][:12]}{'+changes' * ('+' in one['commit'])}`)"
        for one in record["continued"]
    ]
    return f" Added to by {', '.join(more)}." if more else ""


def _ranked(tasks: list[Record], protocol: str) -> list[str]:
    others = [who for who in tasks[0]["variants"] if who != "SGD"]
    return sorted(others, key=lambda who: -overall(tasks, who, protocol).mean)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _cell(found: Difference) -> str:
    """Bold where it is a difference."""
    text = f"{round(found.mean, 1) + 0.0:+.1f} ± {found.error:.1f}"  # + 0.0: no "-0.0"
    return text if found.verdict == "no difference shown" else f"**{text}**"


def _percent(shares: list[float]) -> str:
    mean, deviation = spread([100 * share for share in shares])
    return f"{mean:.1f} ({deviation:.1f})"


def _about(task: Record) -> str:
    rates = " and ".join(f"{lr:g}" for lr in task["lrs"])
    return f"{task['train']} training samples, {task['steps']} steps, rates {rates}"


PAGE = GeneratedPage("variants", "accuracy", KIND, "`python -m bench.accuracy`", table, complete)

if __name__ == "__main__":
    sys.exit(PAGE.main())
