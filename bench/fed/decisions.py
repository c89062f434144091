"""The table of decisions: one line for each of the measurements M1 to M9."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.record import Record, Row, has_failed
from fastsam.lab.report.table import Table

AT_ONCE = 2.0  # kernels at once, below which lanes do not pay
VMAP_SHARE = 0.8  # part of the time under `graph` that a round under `vmap` must stay below
GAIN = 1.3  # speed that precision or memory format must give
PROCESSES, PROCESS_GAIN = 4, 1.5
WIDTH = 120  # characters of a line
Rows = Mapping[str, Row]
Finding = tuple[str, str]  # the figures, and the decision


def unequal(rows: Iterable[Row]) -> list[str]:
    """Return the names of rows whose bits are unequal."""
    return [row["name"] for row in rows if row.get("equal") is False]


def table(record: Record) -> Table:
    """Return a line for each measurement; without figures it has the reason."""
    lines = []
    for name, find in FINDINGS.items():
        all_rows = [row for case in record["cases"] if case["part"] == name for row in case["rows"]]
        rows = {row["name"]: row for row in all_rows if not has_failed(row)}
        measured, decision = (find(rows) if rows else None) or (_why_not(all_rows), "open")
        missing = f" ({len(all_rows) - len(rows)} rows not measured)" if len(rows) < len(all_rows) and rows else ""
        lines.append([name, measured + missing, decision])
    return Table("Decisions", ["", "measured", "so"], lines, alignment="lll")


def text(record: Record) -> str:
    """Return the table for a terminal: the decision, and below it the figures."""
    return "\n".join(f"{name}: {decision}\n    {measured}" for name, measured, decision in table(record).rows)


def line(row: Row) -> str:
    """Return a row in one line: its figures, or why it has none."""
    values = {key: value for key, value in row.items() if key not in ("name", "title", "ours", "times", "functions")}
    texts = [f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items()]
    return f"{row['name']}: {row.get('problem') or row.get('absent') or ', '.join(texts)}"[:WIDTH]


def _why_not(rows: Sequence[Row]) -> str:
    reasons = dict.fromkeys(row.get("problem") or row.get("absent") or "too few figures" for row in rows)
    return f"not measured: {next(iter(reasons), 'not tried')}"[:WIDTH]


def _ms(rows: Rows, name: str) -> str:
    return f"{1e3 * rows[name]['seconds']:.1f}"


def _best(rows: Rows, prefix: str = "", suffix: str = "") -> str | None:
    """Return the name of the fastest row with these ends."""
    names = [name for name in rows if name.startswith(prefix) and name.endswith(suffix)]
    return min(names, key=lambda name: rows[name]["seconds"], default=None)


def _bits(rows: Rows) -> Finding:
    names = unequal(rows.values())
    return (f"unequal: {', '.join(names)}", "stop") if names else (f"{len(rows)} equal to `sequential`", "go on")


def _lanes(rows: Rows) -> Finding | None:
    """Compare the best of this tree with the best of the other tree, of steps in a graph and of connections."""
    names = [_best(rows, prefix) for prefix in ("graph, ", "graphs of ", "other tree, ", "8 connections, ")]
    known = [name for name in names if name is not None]
    if not known:
        return None
    measured = "; ".join(f"{name} {_ms(rows, name)} ms" for name in known)
    replay = rows[known[0]].get("replay_seconds")
    measured += "" if replay is None else f"; a replay {1e6 * replay:.0f} µs of the host"
    own, other = names[0], names[2]
    if own is None or other is None:
        return measured, f"take {min(known, key=lambda name: rows[name]['seconds'])}"
    ratio = rows[own]["seconds"] / rows[other]["seconds"]
    return measured, f"{'keep this tree' if ratio <= 1 else 'go back to the other tree'} ({ratio:.2f} of its time)"


def _kernels(rows: Rows) -> Finding | None:
    busy = {name: row["at_once"] for name, row in rows.items() if row.get("kernels")}
    graphs = [at_once for name, at_once in busy.items() if name.startswith("graph")]
    measured = "; ".join(f"{name}: {rows[name]['at_once']:.1f} at once, {rows[name]['busy']:.0%} busy" for name in busy)
    if not graphs:
        return None
    best = max(graphs)
    is_wide = best >= AT_ONCE
    return measured, f"{best:.1f} {'>=' if is_wide else '<'} 2: {'lanes pay' if is_wide else 'turn to fewer kernels'}"


def _crossing(rows: Rows) -> Finding | None:
    """Find the number of clients from which on a round under `vmap` takes less than .8 of a round under `graph`."""
    ratios = {}
    for name in rows:
        model, executor, clients = name.split(", ")
        other = f"{model}, graph, {clients}"
        if executor == "vmap" and other in rows:
            ratios[model, int(clients.split()[0])] = rows[name]["seconds"] / rows[other]["seconds"]
    if not ratios:
        return None
    measured = "; ".join(f"{model} {n}: {ratio:.2f}" for (model, n), ratio in ratios.items())
    slow = [n for (model, n), ratio in ratios.items() if model == "CNN" and ratio >= VMAP_SHARE]
    fast = [n for (model, n), ratio in ratios.items() if model == "CNN" and n > max(slow, default=0)]
    decision = f"`vmap` for CNNs from {min(fast)} clients on" if fast else "`graph` for CNNs"
    return f"time of `vmap`, `graph` = 1: {measured}", decision


def _fastest(rows: Rows) -> Finding | None:
    if len(rows) < 2:
        return None
    measured = "; ".join(f"{name} {_ms(rows, name)} ms" for name in rows)
    return measured, f"take {_best(rows)}"


def _resnet(rows: Rows) -> Finding | None:
    """Find the best number of slots, and the gain of each precision and memory format on each stem."""
    slots = [name for name in rows if name.endswith(" slots")]
    if not slots:
        return None
    base = max(slots, key=lambda name: int(name.split()[0]))
    units = {"7x7 stem": base, "3x3 stem": "3x3 stem"}
    gains = {
        name: rows[units[stem]]["seconds"] / row["seconds"]
        for name, row in rows.items()
        for stem in units
        if name.startswith(f"{stem}, ") and units[stem] in rows
    }
    best = _best({name: rows[name] for name in slots})
    worth = [name for name, gain in gains.items() if gain >= GAIN]
    measured = [f"{name} {_ms(rows, name)} ms" for name in slots]
    measured += [f"{name}: {gain:.2f} times as fast" for name, gain in gains.items()]
    return "; ".join(measured), f"{best}; worth it: {', '.join(worth) or 'no precision or format'}"


def _processes(rows: Rows) -> Finding | None:
    unit, four = rows.get("1 process"), f"{PROCESSES} processes"
    if unit is None:
        return None
    gains = {name: unit["seconds"] / row["seconds"] for name, row in rows.items()}
    measured = "; ".join(f"{name}: {gain:.2f} times as fast" for name, gain in gains.items())
    if four not in gains:
        return measured, "open"
    return measured, "keep them" if gains[four] >= PROCESS_GAIN else "leave them out"


def _host(rows: Rows) -> Finding:
    texts = []
    for name, row in rows.items():
        functions = "; ".join(f"{f['name']} {1e3 * f['seconds']:.1f} ms" for f in row.get("functions", ())[:3])
        texts.append(f"{name}: {functions}; peak {row['peak_mib']:.0f} MiB")
    return ". ".join(texts), "cut the first of these next"


FINDINGS: dict[str, Callable[[Mapping[str, Any]], Finding | None]] = {
    "M1": _bits, "M2": _lanes, "M3": _kernels, "M4": _crossing, "M5": _fastest, "M6": _resnet, "M7": _fastest,
    "M8": _processes, "M9": _host,
}  # fmt: skip
