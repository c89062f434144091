"""The tables of a report: accuracy, what it took to reach the target, cost, and measures; one row per label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fastsam.lab.plots.curves import NAMES, deviation
from fastsam.lab.report.finished import FinishedRun, Group, baseline, by_label, metrics_of, target_of, values
from fastsam.lab.report.table import Table

DASH = "–"


def short_table(runs: Sequence[FinishedRun], title: str = "", width: int = 120) -> Table:
    """Return the short table for a terminal of `width` columns, with a row per label.

    If it is too wide, numbers have less space between them or the best accuracy is left out. Numbers are means over
    the seeds ± the sample's standard deviation. Accuracies of clients are means over the clients ± their deviation.
    """
    target = target_of(runs)
    header = ["algorithm", "test\nfinal %", "test\nbest %", f"clients %\n({_validation(runs)})"]
    header += ["s per\nround", "MB\nsent"]
    if target is not None:
        header.insert(4, f"rounds\nto {100 * target:g} %")
    rows = []
    for label, group in by_label(runs).items():
        row = [label, percent(group, "accuracy_final"), percent(group, "accuracy_best"), _clients(group)]
        row += [_rounds_to_target(group)] if target is not None else []
        rows.append([*row, mean(group, "seconds_per_round", "{:.3f}".format), mean(group, "megabytes", size)])
    table = Table(title, header, rows)
    if table.width > width:
        table = replace(table, rows=[[cell.replace(" ± ", "±") for cell in row] for row in rows])
    if table.width > width:
        table = replace(table, head=[*header[:2], *header[3:]], rows=[[*row[:2], *row[3:]] for row in table.rows])
    return table


def sentences(runs: Sequence[FinishedRun]) -> list[str]:
    """Return what came out in one sentence per label: final accuracy, its difference to the baseline, rounds to the
    target."""
    groups, target, texts = by_label(runs), target_of(runs), []
    for label, group in groups.items():
        text = f"{label}: {percent(group, 'accuracy_final')} % test accuracy"
        base = baseline(groups, label)
        base_group = groups[base] if base not in (None, label) else ()
        accuracies, base_accuracies = _final_accuracies(group), _final_accuracies(base_group)
        gains = [100 * (accuracies[seed] - base_accuracies[seed]) for seed in accuracies if seed in base_accuracies]
        if gains:
            gain_count = sum(gain > 0 for gain in gains)
            text += f", {np.mean(gains):+.2f} points against {base} (higher in {gain_count} of {len(gains)} seeds)"
        if target is not None:
            target_rounds = values(group, "rounds_to_target")
            count = len(target_rounds)
            time = f"after {np.mean(target_rounds):.1f} rounds" if count else "not reached"
            text += f", {100 * target:g} % {time}"
            text += f" (in {count} of {len(group)} seeds)" if 0 < count < len(group) else ""
        texts.append(text + ".")
    return texts


def _final_accuracies(group: Group) -> dict[int, float]:
    """Return the final accuracy of each seed that has one."""
    return {run.seed: run.summary["accuracy_final"] for run in group if run.summary["accuracy_final"] is not None}


def all_tables(runs: Sequence[FinishedRun]) -> list[Table]:
    """Return all tables of a report for which there are numbers."""
    tables = [accuracy(runs), last_metrics(runs), to_target(runs), cost(runs), last_measures(runs)]
    return [table for table in tables if table is not None]


def accuracy(runs: Sequence[FinishedRun]) -> Table:
    """Return the table of accuracies: final, best and mean of the last ten evaluated rounds; and over clients."""
    head = ["algorithm", "final %", "best %", "last ten %", "clients %", "worst client %", "best client %"]
    rows = [
        [
            label, percent(group, "accuracy_final"), percent(group, "accuracy_best"), percent(group, "accuracy_last10"),
            _clients(group), _extreme(group, "min", "client_worst"), _extreme(group, "max", "client_best"),
        ]
        for label, group in by_label(runs).items()
    ]  # fmt: skip
    note = (
        "Accuracy of the global model on the test set; with several seeds mean ± the sample's standard deviation over "
        "them. Clients: mean ± standard deviation over the clients, averaged over the seeds, each client on its own "
        f"validation samples (mode {_validation(runs)!r}); the worst and the best client with their numbers, seed by "
        "seed."
    )
    return Table("Accuracy", head, rows, note)


def last_metrics(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the table of the runs' metrics, over the test set and over the clients, or None without metrics."""
    names = [key.removeprefix("test_") for key in metrics_of(runs)]
    if not names:
        return None
    head, groups = ["algorithm"], by_label(runs)
    rows = [[label] for label in groups]
    for name in names:
        head += [name.replace("_", " "), f"{name.replace('_', ' ')}, clients"]
        for row, group in zip(rows, groups.values(), strict=True):
            row += [number(group, f"test_{name}"), _clients(group, name, 1, "{:.4g}")]
    note = (
        "Of the global model after the last round, on the test set; with several seeds mean ± the sample's standard "
        "deviation over them. Clients: mean ± standard deviation over the clients, averaged over the seeds, each "
        "client on its own validation samples."
    )
    return Table("Metrics", head, rows, note)


def to_target(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the table of rounds, computing time and traffic until the target was reached, also relative to the
    baseline."""
    target, groups = target_of(runs), by_label(runs)
    if target is None:
        return None
    bases = {label: baseline(groups, label) for label in groups}
    base_labels = {base for base in bases.values() if base is not None}
    first_label = next(iter(base_labels))
    base = first_label if len(base_labels) == 1 else groups[first_label][0].algorithm
    keys: list[tuple[str, str, Callable[[float], str]]] = [
        ("rounds_to_target", "rounds", lambda v: f"{v:.1f}".removesuffix(".0")),
        ("seconds_to_target", "computing s", lambda v: f"{v:.2f}"),
        ("megabytes_to_target", "MB sent", size),
    ]
    head = ["algorithm", *(text for _, name, _ in keys for text in (name, f"× {base}"))]
    rows = []
    for label, group in groups.items():
        cells = [label]
        for key, _, form in keys:
            label_mean, base_mean = _mean_of_all(group, key), _mean_of_all(groups.get(bases[label] or "", ()), key)
            text = DASH if label_mean is None else form(label_mean)
            cells += [_rounds_to_target(group) if key == "rounds_to_target" else text]
            cells += [DASH if label_mean is None or not base_mean else f"{label_mean / base_mean:.2f}"]
        rows.append(cells)
    base_note = f"× {base}: relative to its run with the same swept values. " if len(base_labels) > 1 else ""
    note = (
        f"Completed rounds when the test accuracy first reached {100 * target:g} %, without smoothing; means over the "
        f"seeds; {DASH} where a seed did not reach it. {base_note}Computing time is that of local training and the "
        "server's step, without evaluation."
    )
    return Table(f"To {100 * target:g} % test accuracy", head, rows, note)


def cost(runs: Sequence[FinishedRun]) -> Table:
    """Return the table of costs: time, back-propagations, traffic, memory."""
    seconds, integer = "{:.3f}".format, "{:,.0f}".format
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("seconds_training", "training s/round", seconds), ("seconds_per_round", "all s/round", seconds),
        ("backprops", "back-propagations", integer), ("megabytes", "MB sent", size),
        ("state_megabytes", "state MB", partial(size, digits=2)),
        ("client_megabytes", "client MB", partial(size, digits=2)),
    ]  # fmt: skip
    rows = [[label, *(mean(group, key, form) for key, _, form in columns)] for label, group in by_label(runs).items()]
    note = (
        "Means over the seeds; times are medians over the rounds, with and without evaluation and measures. MB: 1e6 "
        "bytes. Sent: both directions, all rounds. State: what the server and all clients keep between rounds at the "
        "end. Client: weights, one gradient and what else a local step of one client works with (activations aside)."
    )
    return Table("Cost", ["algorithm", *(name for _, name, _ in columns)], rows, note)


def last_measures(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the table of the runs' measures, in their last measured round."""
    groups = by_label(runs)
    keys = [key for key in NAMES if any(values(group, key) for group in groups.values())]
    if not keys:
        return None
    rows = [[label, *(number(group, key) for key in keys)] for label, group in groups.items()]
    note = "In the last measured round; with several seeds mean ± the sample's standard deviation over them."
    return Table("Measures", ["algorithm", *(NAMES[key] for key in keys)], rows, note)


def percent(group: Group, key: str) -> str:
    """Return an accuracy in percent, with its deviation over the seeds."""
    numbers = 100 * np.array(values(group, key))
    if not numbers.size:
        return DASH
    return f"{numbers.mean():.2f}" + (f" ± {deviation(numbers):.2f}" if numbers.size > 1 else "")


def mean(group: Group, key: str, form: Callable[[float], str]) -> str:
    """Return the mean over the seeds."""
    numbers = values(group, key)
    return form(float(np.mean(numbers))) if numbers else DASH


def size(megabytes: float, digits: int = 1) -> str:
    """Return megabytes with `digits` after the point, or with two significant digits below one megabyte."""
    return f"{megabytes:.{digits}f}" if megabytes >= 1 or not megabytes else f"{megabytes:.2g}"


def number(group: Group, key: str) -> str:
    """Return the mean over the seeds with four digits, and the deviation over the seeds."""
    numbers = np.array(values(group, key))
    if not numbers.size:
        return DASH
    return f"{numbers.mean():.4g}" + (f" ± {deviation(numbers):.2g}" if numbers.size > 1 else "")


def _validation(runs: Sequence[FinishedRun]) -> str | None:
    return next((run.summary.get("validation") for run in runs), None)


def _clients(group: Group, name: str = "accuracy", unit: int = 100, form: str = "{:.2f}") -> str:
    means, spreads = values(group, f"client_{name}_mean"), values(group, f"client_{name}_std")
    texts = [form.format(unit * np.mean(numbers)) for numbers in (means, spreads) if numbers]
    return " ± ".join(texts) if means and spreads else DASH


def _extreme(group: Group, extreme: str, client_key: str) -> str:
    """Return the mean over the seeds of the worst (best) client's accuracy, and this client's number in each seed."""
    accuracies, clients = values(group, f"client_accuracy_{extreme}"), values(group, client_key)
    if not accuracies:
        return DASH
    client_text = f" (client {', '.join(f'{c:g}' for c in clients)})" if clients else ""
    return f"{100 * np.mean(accuracies):.2f}{client_text}"


def _mean_of_all(group: Group, key: str) -> float | None:
    """Return the mean if all seeds have the value, else None."""
    numbers = values(group, key)
    return float(np.mean(numbers)) if numbers and len(numbers) == len(group) else None


def _rounds_to_target(group: Group) -> str:
    """Return the mean over seeds. If a seed did not reach the target, return each seed's rounds, e.g. "12 / –"."""
    target_rounds = values(group, "rounds_to_target")
    if len(target_rounds) == len(group):
        return f"{np.mean(target_rounds):g}" if len(group) == 1 else f"{np.mean(target_rounds):.1f}"
    return " / ".join(DASH if (r := run.summary.get("rounds_to_target")) is None else str(r) for run in group)
