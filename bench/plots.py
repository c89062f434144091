"""The plots of the pages, drawn from results files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.tables import Record, best

# Ours in blues, the peers in warm colours and greys.
OURS = ("#0b5fa5", "#7fb2dd", "#b9d6ee")
PEERS = ("#e8890c", "#8c6bb1", "#5aa469", "#c9a227", "#d9694f", "#9a9a9a", "#6d6d6d")


@dataclass
class Series:
    """x and y of a line, or of bars; spread: quartiles below and above."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    spread: tuple[Sequence[float], Sequence[float]] | None = None
    style: str = "-"
    colour: str | None = None


@dataclass
class Panel:
    """One pair of axes. bars: at the places 0, 1, ... of `ticks`, next to each other by series."""

    series: list[Series]
    title: str = ""
    x: str = ""
    y: str = ""
    scales: tuple[str, str] = ("log", "log")
    ticks: Sequence[str] = ()
    reference: float | None = None  # a dashed line


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw what there are figures for, as PNG into a folder, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = PLOTS.get(record["kind"], lambda record: iter(()))
    return [_figure(folder / name, panels, **options) for name, panels, options in plots(record)]


def _figure(path: Path, panels: Sequence[Sequence[Panel]], title: str, size: tuple[float, float]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(map(len, panels))
    figure, axes = plt.subplots(len(panels), columns, figsize=size, squeeze=False, layout="constrained")
    for line, row in zip(axes, panels, strict=True):
        for axis in line[len(row) :]:
            axis.axis("off")
        for axis, panel in zip(line, row, strict=False):
            _panel(axis, panel)
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    if len(handles) > 1:
        figure.legend(handles.values(), handles, loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _panel(axis: Any, panel: Panel) -> None:
    width = 0.84 / max(len(panel.series), 1)
    for i, series in enumerate(panel.series):
        if panel.ticks:
            at = [x - 0.42 + (i + 0.5) * width for x in series.x]
            axis.bar(at, series.y, width, yerr=series.spread, label=series.label, color=series.colour)
        else:
            axis.plot(series.x, series.y, series.style, marker="o", markersize=3, linewidth=1, label=series.label)
            if series.spread:
                lows, highs = ([y + s * d for y, d in zip(series.y, part)] for s, part in zip((-1, 1), series.spread))
                axis.fill_between(series.x, lows, highs, alpha=0.25)
    if panel.ticks:
        axis.set_xticks(range(len(panel.ticks)), panel.ticks)
    else:
        axis.set_xscale(panel.scales[0])
    axis.set_yscale(panel.scales[1])
    axis.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    if panel.reference is not None:
        axis.axhline(panel.reference, color="0.4", linewidth=0.8, linestyle="--")
    axis.grid(linewidth=0.3)
    axis.set_axisbelow(True)


def _spread(summaries: Sequence[Any]) -> tuple[list[float], list[float]]:
    return [s["median"] - s["q1"] for s in summaries], [s["q3"] - s["median"] for s in summaries]


def _where(e: Record, what: str = "") -> str:
    machine = e["machine"]
    return f"{what}{(machine.get('gpus') or [machine['cpu']])[0]}, torch {e['versions']['torch']}, {e['date'][:10]}"


def _bars(results: Sequence[Sequence[Any]], value: Callable[[Any], Any], ticks: Sequence[str], y: str) -> Panel:
    """Return a panel with a group of bars per result. value: the summary of a row, or None."""
    series = []
    ours, peers = iter(OURS), iter(PEERS)
    for name in dict.fromkeys(row["name"] for result in results for row in result):
        rows = [(i, row) for i, result in enumerate(results) for row in result if row["name"] == name]
        found = [(i, row, value(row)) for i, row in rows]
        shown = [(i, row, s) for i, row, s in found if s is not None and math.isfinite(s["median"])]
        if shown:
            places, summaries = [i for i, _, _ in shown], [s for _, _, s in shown]
            colour = next(ours if shown[0][1]["ours"] else peers, "#444444")
            medians = [s["median"] for s in summaries]
            series.append(Series(shown[0][1]["title"], places, medians, _spread(summaries), colour=colour))
    return Panel(series, y=y, ticks=ticks, reference=1.0)


Plot = tuple[str, Sequence[Sequence[Panel]], dict[str, Any]]


def _step(record: Record) -> Iterator[Plot]:
    """Time relative to the copied SAM, and the fraction of the floor; logarithmic, as the sizes differ by more than a
    factor of ten."""
    rows = [result["contenders"] for result in record["results"]]
    ticks = [f"{r['title']}\n{tables.threads_of(r['threads'])}" for r in record["results"]]
    panels = [
        [_bars(rows, lambda row: row.get("to_copied"), ticks, "time, relative to the copied per-tensor SAM")],
        [_bars(rows, lambda row: row.get("floor_fraction"), ticks, "fraction of the memory floor")],
    ]
    title = _where(record["environment"], "Optimizer part of a SAM step\n")
    yield "step.png", panels, {"title": title, "size": (max(7.0, 1.9 * len(rows)), 8.0)}


def _kernels(record: Record) -> Iterator[Plot]:
    """Fraction of the floor by parameters, a panel per backend; time of a step by the number of tensors."""
    title, device = _where(record["environment"]), record["device"]
    cases = [c for c in record["ops"] if not c["size"].startswith(("cut", "rows")) and c["layout"] == "scattered"]
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for case in cases:
        for row in filter(best, case["rows"]):
            found = points.setdefault(row["name"], {}).setdefault(case["op"], [])
            found.append((case["parameters"], best(row)["fraction"]["median"]))
    panels = [
        Panel([Series(op, *zip(*sorted(xy))) for op, xy in ops.items()], name, "parameters",
              "fraction of the memory floor", ("log", "linear"), reference=1.0)
        for name, ops in points.items()
    ]  # fmt: skip
    if panels:
        yield f"roofline-{device}.png", [panels], {"title": title, "size": (4.6 * len(panels), 4.8)}
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in sorted(record["steps"], key=lambda r: r["tensors"]):
        for row in result["rows"] if result["size"].startswith("cut") else ():
            for how in filter(row.__contains__, ("eager", "replayed")):
                found = lines.setdefault(f"{row['title']}, {how}", [])
                found.append((result["tensors"], 1e6 * row[how]["seconds"]["median"]))
    if lines:
        style = {"eager": "-", "replayed": ":"}
        series = [Series(name, *zip(*xy), style=style[name.rsplit(", ", 1)[1]]) for name, xy in lines.items()]
        panel = Panel(series, x="tensors", y="µs per step")
        yield f"tensors-{device}.png", [[panel]], {"title": title, "size": (6.4, 4.8)}


def _federated(record: Record) -> Iterator[Plot]:
    """Speeds as bars, a group per race; growth as lines."""
    parts, panels = record["parts"], []
    if speed := parts.get("speed"):
        good = [[f for f in case["result"]["figures"] if not f["problem"]] for case in speed]
        rows = [[{"name": f["label"], "title": f["label"], "ours": f["label"].startswith("fastsam"), **f} for f in fs]
                for fs in good]  # fmt: skip
        titles = [case["title"] for case in speed]
        panels.append([_bars(rows, lambda row: row["speed"], titles, "rounds per second, bare loop = 1")])
    growth = []
    for case in parts.get("growth", ()):
        pairs = zip(case["at"], case["result"]["figures"], strict=True)
        points = [(at, f["seconds"]) for at, f in pairs if not f["problem"]]
        medians, spread = [s["median"] for _, s in points], _spread([s for _, s in points])
        series = Series("", [at for at, _ in points], medians, spread)
        growth.append(Panel([series], case["title"], case["axis"], "seconds a round"))
    panels += [growth] if growth else []
    if panels:
        yield "federated.png", panels, {"title": _where(record), "size": (12.0, 4.4 * len(panels))}


PLOTS: dict[str, Callable[[Record], Iterator[Plot]]] = {
    tables.STEP: _step, tables.KERNELS: _kernels, tables.FEDERATED: _federated
}  # fmt: skip
