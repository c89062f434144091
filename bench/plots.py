"""The plots of the pages, drawn from results files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import tables
from bench.tables import Record, Row, best

# Ours in blues, the peers in warm colours and greys.
OURS = ("#0b5fa5", "#7fb2dd", "#b9d6ee", "#2b8cbe", "#08306b")
PEERS = ("#e8890c", "#8c6bb1", "#5aa469", "#c9a227", "#d9694f", "#9a9a9a", "#6d6d6d", "#3d3d3d")


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw what there are figures for, as PNG into a folder, and return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    e, paths = record.get("environment", record), []
    where = (e["machine"].get("gpus") or [e["machine"]["cpu"]])[0]
    for name, figure in PLOTS[record["kind"]](record) if record["kind"] in PLOTS else ():
        labels: dict[str, Any] = {}
        for axis in figure.axes:
            axis.grid(linewidth=0.3)
            axis.set_axisbelow(True)
            labels |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(labels.values(), labels, loc="outside lower center", fontsize=8, ncols=3, frameon=False)
        figure.suptitle(f"{where}, torch {e['versions']['torch']}, {e['date'][:10]}", fontsize=10)
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _spread(summaries: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [s["median"] - s["q1"] for s in summaries], [s["q3"] - s["median"] for s in summaries]


def _bars(axis: Any, results: Sequence[Sequence[Row]], value: Callable[[Row], Any], ticks: list[str], y: str) -> None:
    """Draw a group of bars per result, logarithmic. value: the summary of a row, or None."""
    names = {row["name"]: row for result in results for row in result if value(row)}
    ours, peers, width = iter(OURS), iter(PEERS), 0.84 / max(len(names), 1)
    for number, (name, row) in enumerate(names.items()):
        found = [(i, value(r)) for i, result in enumerate(results) for r in result if r["name"] == name and value(r)]
        x = [i - 0.42 + (number + 0.5) * width for i, _ in found]
        summaries = [summary for _, summary in found]
        colour = next(ours if row["ours"] else peers, "#444444")
        options = {"yerr": _spread(summaries), "label": row["title"], "color": colour}
        axis.bar(x, [s["median"] for s in summaries], width, **options)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set(yscale="log", ylabel=y)
    axis.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")


def _step(record: Record) -> Iterator[tuple[str, Any]]:
    rows = [result["contenders"] for result in record["results"]]
    ticks = [f"{r['title']}\n{tables.threads_of(r['threads'])}" for r in record["results"]]
    figure, axes = _axes(2, 1, (max(7.0, 1.9 * len(rows)), 8.0))
    copied = "time, relative to the copied per-tensor SAM"
    _bars(axes[0, 0], rows, lambda row: row.get("to_copied"), ticks, copied)
    _bars(axes[1, 0], rows, lambda row: row.get("floor_fraction"), ticks, "fraction of the memory floor")
    yield "step.png", figure


def _kernels(record: Record) -> Iterator[tuple[str, Any]]:
    """Fraction of the floor by parameters, for each backend; time of a step by the number of tensors."""
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for case in record["ops"]:
        if case["layout"] == "scattered" and not case["size"].startswith(("cut", "rows")):
            for row in filter(best, case["rows"]):
                found = points.setdefault(row["name"], {}).setdefault(case["op"], [])
                found.append((case["parameters"], best(row)["fraction"]["median"]))
    if points:
        figure, axes = _axes(1, len(points), (4.6 * len(points), 4.8))
        for axis, (name, ops) in zip(axes[0], points.items(), strict=True):
            for op, found in ops.items():
                axis.plot(*zip(*sorted(found), strict=True), marker="o", markersize=3, linewidth=1, label=op)
            axis.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
            axis.set(xscale="log", xlabel="parameters", ylabel="fraction of the memory floor", title=name)
        yield f"roofline-{record['device']}.png", figure
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for result in sorted(record["steps"], key=lambda r: r["tensors"]):
        for row in result["rows"] if result["size"].startswith("cut") else ():
            for how in filter(row.__contains__, ("eager", "replayed")):
                found = lines.setdefault((row["title"], how), [])
                found.append((result["tensors"], 1e6 * row[how]["seconds"]["median"]))
    if lines:
        figure, axes = _axes(1, 1, (6.4, 4.8))
        for (title, how), found in lines.items():
            style = {"eager": "-", "replayed": ":"}[how]
            axes[0, 0].plot(*zip(*found, strict=True), style, marker="o", markersize=3, label=f"{title}, {how}")
        axes[0, 0].set(xscale="log", yscale="log", xlabel="tensors", ylabel="µs per step")
        yield f"tensors-{record['device']}.png", figure


def _federated(record: Record) -> Iterator[tuple[str, Any]]:
    """Speeds as bars, a group per race; growth as lines."""
    speed, growth = (record["parts"].get(name, []) for name in ("speed", "growth"))
    if not speed and not growth:
        return
    figure, axes = _axes(2, max(len(growth), 1), (12.0, 8.8))
    for axis in axes[0]:
        axis.remove()
    rows = [
        [f | {"name": f["label"], "title": f["label"], "ours": f["label"].startswith("fastsam")} for f in good]
        for good in ([f for f in case["result"]["figures"] if not f["problem"]] for case in speed)
    ]
    titles, unit = [case["title"] for case in speed], "rounds per second, bare loop = 1"
    _bars(figure.add_subplot(axes[0, 0].get_gridspec()[0, :]), rows, lambda row: row["speed"], titles, unit)
    for axis, case in zip(axes[1], growth, strict=False):
        pairs = zip(case["at"], case["result"]["figures"], strict=True)
        x, summaries = zip(*((at, f["seconds"]) for at, f in pairs if not f["problem"]), strict=True)
        axis.errorbar(x, [s["median"] for s in summaries], _spread(summaries), marker="o", markersize=3)
        axis.set(xscale="log", yscale="log", title=case["title"], xlabel=case["axis"], ylabel="seconds a round")
    yield "federated.png", figure


PLOTS: dict[str, Callable[[Record], Iterator[tuple[str, Any]]]] = {
    tables.STEP: _step, tables.KERNELS: _kernels, tables.FEDERATED: _federated
}  # fmt: skip
