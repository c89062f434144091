"""The tables of a report: accuracy, what it took to reach the target, cost, and measures; one row per label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fastsam.lab.plots.curves import NAMES, deviation
from fastsam.lab.report.finished import FinishedRun, Group, baseline, by_label, metrics_of, spelled, target_of, values
from fastsam.lab.report.table import Table

DASH = "–"
Column = tuple[str, Callable[[Group], str]]


def short_table(runs: Sequence[FinishedRun], title: str = "", width: int = 120) -> Table:
    """Return the short table for a terminal of `width` columns, with a row per label.

    If it is too wide, numbers have less space between them, or columns are left out: best accuracy, traffic, time.
    Numbers are means over the seeds ± the sample's standard deviation. Accuracies of clients are means over the clients
    ± their deviation. The best row is the label with the best final accuracy, if there are several labels.
    """
    target = target_of(runs)
    columns: list[Column] = [
        ("test\nfinal %", partial(percent, key="accuracy_final")),
        ("test\nbest %", partial(percent, key="accuracy_best")),
        (f"clients %\n({_validation(runs)})", _clients),
        ("s per\nround", partial(mean, key="seconds_per_round", form="{:.3f}".format)),
        ("MB\nsent", partial(mean, key="megabytes", form=size)),
    ]
    if target is not None:
        columns.insert(3, (f"rounds\nto {100 * target:g} %", _rounds_to_target))
    table = _table(title, runs, columns)
    if table.width > width:
        table = replace(table, rows=[[cell.replace(" ± ", "±") for cell in row] for row in table.rows])
    for head in ("test\nbest %", "MB\nsent", "s per\nround"):
        if (table.width if head == "test\nbest %" else table.least_width) > width:
            table = _without_column(table, list(table.head).index(head))
    return replace(table, best_row=_best_row(runs))


def _without_column(table: Table, place: int) -> Table:
    """Return the table without the column at `place`."""
    head, *rows = ([*cells[:place], *cells[place + 1 :]] for cells in (table.head, *table.rows))
    return replace(table, head=head, rows=rows)


def _best_row(runs: Sequence[FinishedRun]) -> int | None:
    """Return the number of the label with the best mean final accuracy, or None without a comparison."""
    groups = [list(_final_accuracies(group).values()) for group in by_label(runs).values()]
    means = [float(np.mean(values)) if values else -1.0 for values in groups]
    return means.index(max(means)) if len(means) > 1 and max(means) >= 0 else None


def _table(title: str, runs: Sequence[FinishedRun], columns: Sequence[Column], note: str = "") -> Table:
    """Return a table with a row per label. A column is its head, and the function that makes a cell from the runs."""
    rows = [[spelled(label), *(cell(group) for _, cell in columns)] for label, group in by_label(runs).items()]
    return Table(title, ["algorithm", *(head for head, _ in columns)], rows, note)


def sentences(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a sentence per label: final accuracy, its difference to the baseline, and rounds to the target."""
    groups, target, texts = by_label(runs), target_of(runs), []
    for label, group in groups.items():
        text = f"{spelled(label)}: {percent(group, 'accuracy_final')} % test accuracy"
        base = baseline(groups, label)
        base_name = spelled(base or "")
        base_group = groups[base] if base not in (None, label) else ()
        accuracies, base_accuracies = _final_accuracies(group), _final_accuracies(base_group)
        gains = [100 * (accuracies[seed] - base_accuracies[seed]) for seed in accuracies if seed in base_accuracies]
        if gains:
            gain_count = sum(gain > 0 for gain in gains)
            text += f", {np.mean(gains):+.2f} points against {base_name}"
            text += f" (higher in {gain_count} of {len(gains)} seeds)" if len(gains) > 1 else ""
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
    tables = [
        accuracy(runs),
        extreme_clients(runs),
        last_metrics(runs),
        to_target(runs),
        cost(runs),
        last_measures(runs),
    ]
    return [table for table in tables if table is not None]


def accuracy(runs: Sequence[FinishedRun]) -> Table:
    """Return the table of accuracies: final, best and mean of the last ten evaluated rounds; mean over clients."""
    columns: list[Column] = [
        ("final %", partial(percent, key="accuracy_final")),
        ("best %", partial(percent, key="accuracy_best")),
        ("last ten %", partial(percent, key="accuracy_last10")),
        ("clients %", _clients),
    ]
    note = (
        "Accuracy of the global model on the test set; with several seeds mean ± the sample's standard deviation over "
        "them. Clients: mean ± standard deviation over the clients, averaged over the seeds, each client on its own "
        f"validation samples (mode {_validation(runs)!r})."
    )
    return _table("Accuracy", runs, columns, note)


def extreme_clients(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the folded table of the worst and the best client, or None if clients were not evaluated."""
    columns: list[Column] = [
        ("worst client %", partial(_extreme, extreme="min", client_key="client_worst")),
        ("best client %", partial(_extreme, extreme="max", client_key="client_best")),
    ]
    note = "Final accuracy of the worst and of the best client, averaged over the seeds; the clients seed by seed."
    table = replace(_table("Worst and best clients", runs, columns, note), is_folded=True)
    return table if any(cell != DASH for row in table.rows for cell in row[1:]) else None


def last_metrics(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the table of the runs' metrics, over the test set and over the clients, or None without metrics."""
    columns: list[Column] = []
    for key in metrics_of(runs):
        name = key.removeprefix("test_")
        columns.append((name.replace("_", " "), partial(number, key=key)))
        columns.append((f"{name.replace('_', ' ')}, clients", partial(_clients, name=name, unit=1, form="{:.4g}")))
    note = (
        "Of the global model after the last round, on the test set; with several seeds mean ± the sample's standard "
        "deviation over them. Clients: mean ± standard deviation over the clients, averaged over the seeds, each "
        "client on its own validation samples."
    )
    return _table("Metrics", runs, columns, note) if columns else None


def to_target(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the table of rounds, time and traffic until the target was reached, also relative to the baseline."""
    target, groups = target_of(runs), by_label(runs)
    if target is None:
        return None
    bases = {label: baseline(groups, label) for label in groups}
    base_labels = {base for base in bases.values() if base is not None}
    first_label = next(iter(base_labels))
    base = spelled(first_label if len(base_labels) == 1 else groups[first_label][0].algorithm)
    keys: list[tuple[str, str, Callable[[float], str]]] = [
        ("rounds_to_target", "rounds", lambda v: f"{v:.1f}".removesuffix(".0")),
        ("seconds_to_target", "computing s", lambda v: f"{v:.2f}"),
        ("megabytes_to_target", "MB sent", size),
    ]
    head = ["algorithm", *(text for _, name, _ in keys for text in (name, f"× {base}"))]
    rows = []
    for label, group in groups.items():
        cells = [spelled(label)]
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
    seconds, megabytes = "{:.3f}".format, partial(size, digits=2)
    columns: list[Column] = [
        ("training s/round", partial(mean, key="seconds_training", form=seconds)),
        ("all s/round", partial(mean, key="seconds_per_round", form=seconds)),
        ("back-propagations", partial(mean, key="backprops", form="{:,.0f}".format)),
        ("MB sent", partial(mean, key="megabytes", form=size)),
        ("state MB", partial(mean, key="state_megabytes", form=megabytes)),
        ("client MB", partial(mean, key="client_megabytes", form=megabytes)),
    ]
    note = (
        "Means over the seeds; times are medians over the rounds, with and without evaluation and measures. MB: 1e6 "
        "bytes. Sent: both directions, all rounds. State: what the server and all clients keep between rounds at the "
        "end. Client: weights, one gradient and what else a local step of one client works with (activations aside)."
    )
    return _table("Cost", runs, columns, note)


def last_measures(runs: Sequence[FinishedRun]) -> Table | None:
    """Return the table of the runs' measures, in their last measured round."""
    columns: list[Column] = [(name, partial(number, key=key)) for key, name in NAMES.items() if values(runs, key)]
    note = "In the last measured round; with several seeds mean ± the sample's standard deviation over them."
    return _table("Measures", runs, columns, note) if columns else None


def percent(group: Group, key: str) -> str:
    """Return an accuracy in percent, with its deviation over the seeds."""
    return _mean_and_deviation(100 * np.array(values(group, key)), ".2f", ".2f")


def number(group: Group, key: str) -> str:
    """Return the mean over the seeds with four digits, and the deviation over the seeds."""
    return _mean_and_deviation(np.array(values(group, key)), ".4g", ".2g")


def _mean_and_deviation(numbers: np.ndarray, form: str, deviation_form: str) -> str:
    if not numbers.size:
        return DASH
    return format(numbers.mean(), form) + (f" ± {deviation(numbers):{deviation_form}}" if numbers.size > 1 else "")


def mean(group: Group, key: str, form: Callable[[float], str]) -> str:
    """Return the mean over the seeds."""
    numbers = values(group, key)
    return form(float(np.mean(numbers))) if numbers else DASH


def size(megabytes: float, digits: int = 1) -> str:
    """Return megabytes with `digits` after the point, or with two significant digits below one megabyte."""
    return f"{megabytes:.{digits}f}" if megabytes >= 1 or not megabytes else f"{megabytes:.2g}"


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
