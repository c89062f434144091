"""The plots of the pages, drawn from results files."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import Record, Row, figure, has_failed, median, name_of

OURS, PEER = ("#0b5fa5", "#5f6670")  # colours of our contenders, and of the others


def draw(record: Record, folder: Path, names: Collection[str] | None = None) -> list[Path]:
    """Draw what there are figures for, as PNG into a folder, and return the files; with `names` only these files."""
    name, e, paths = name_of(record), record["environment"], []
    make = PLOTS.get(name.partition("-")[0])
    if make is None or not record["cases"]:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    device = (e["machine"].get("gpus") or [e["machine"]["cpu"]])[0]
    for stem, canvas in make(record):
        path = folder / f"{stem}{'-cuda' * name.endswith('-cuda')}.png"
        if names is not None and path.name not in names:
            pyplot.close(canvas)
            continue
        labels: dict[str, Any] = {}
        for axis in canvas.axes:
            axis.grid(linewidth=0.3)
            axis.set_axisbelow(True)
            labels |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        canvas.legend(labels.values(), labels, loc="outside lower center", fontsize=8, ncols=3, frameon=False)
        canvas.suptitle(f"{device}, torch {e['versions']['torch']}, {e['date'][:10]}", fontsize=10)
        canvas.savefig(path, dpi=120)
        paths.append(path)
        pyplot.close(canvas)
    return paths


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _spread(summaries: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [s["median"] - s["q1"] for s in summaries], [s["q3"] - s["median"] for s in summaries]


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 0.1, 0.2, 0.5, 1 and so on."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def _dots(axis: Any, cases: Mapping[str, Record], path: str, names: Mapping[str, str]) -> None:
    """Draw a line per contender with a dot for each case that has the figure, logarithmic. The first dot is filled."""
    for place, name in enumerate(names):
        for number, (label, case) in enumerate(cases.items()):
            row = next((row for row in case["rows"] if row["name"] == name), None)
            if not (row and (summary := figure(row, path))):
                continue
            colour = OURS if row["ours"] else PEER
            fill = colour if number == 0 else "white"
            spread = [[value] for (value,) in _spread([summary])]
            options = {"fmt": "o", "color": colour, "markerfacecolor": fill, "markersize": 6, "linewidth": 1}
            axis.errorbar([summary["median"]], [place + 0.16 * number], xerr=spread, label=label, **options)
    axis.set_yticks(range(len(names)), names.values())
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set(xscale="log")
    _plain_numbers(axis.xaxis)
    axis.axvline(1.0, color="0.4", linewidth=0.8, linestyle="--")


def _step(record: Record) -> Iterator[tuple[str, Any]]:
    """Plot a panel per model and figure, with the contenders down and the numbers of threads as dots."""
    models: dict[str, dict[str, Record]] = {}
    for case in (case for case in record["cases"] if case["part"] != "whole"):
        model, _, threads = case["title"].partition(", ")
        models.setdefault(model, {})[threads] = case
    if not models:
        return
    figures = {
        "eager.to.copied": "time, the copied SAM = 1: less is better",
        "eager.fraction": "speed, the memory floor = 1: more is better",
    }
    rows = [row for cases in models.values() for case in cases.values() for row in case["rows"]]
    names = {row["name"]: row["title"] for row in rows if figure(row, "eager")}
    canvas, axes = _axes(2, len(models), (2.6 + 2.8 * len(models), 7.0))
    for line, (path, words) in zip(axes, figures.items(), strict=True):
        for axis, (model, cases) in zip(line, models.items(), strict=True):
            axis.sharex(line[0])
            _dots(axis, cases, path, names)
            axis.set_title(model, fontsize=10)
            axis.label_outer()
            axis.tick_params(labelbottom=True)
        line[len(models) // 2].set_xlabel(words)
    yield "step", canvas


def _kernels(record: Record) -> Iterator[tuple[str, Any]]:
    """Plot the fraction of the floor by parameters, for each backend."""
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for case in record["cases"]:
        if case.get("layout") == "scattered" and not case["size"].startswith(("cut", "rows")):
            for row in (row for row in case["rows"] if not has_failed(row)):
                line = points.setdefault(row["name"], {}).setdefault(case["op"], [])
                line.append((case["parameters"], median(row.get("replayed") or row["eager"], "fraction")))
    if not points:
        return
    canvas, axes = _axes(1, len(points), (4.6 * len(points), 4.8))
    for axis, (name, lines) in zip(axes[0], points.items(), strict=True):
        for label, line in lines.items():
            axis.plot(*zip(*sorted(line), strict=True), marker="o", markersize=3, linewidth=1, label=label)
        axis.set(xscale="log", xlabel="parameters", ylabel="fraction of the memory floor", title=name)
        axis.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    yield "roofline", canvas


def _federated_plots(record: Record) -> Iterator[tuple[str, Any]]:
    """Plot growth as lines. tools/pictures.py draws the races."""
    growth = [case for case in record["cases"] if case["part"] == "growth"]
    if not growth:
        return
    canvas, axes = _axes(1, len(growth), (12.0, 4.4))
    for axis, case in zip(axes[0], growth, strict=True):
        good = [row for row in case["rows"] if not has_failed(row)]
        low, high = _spread([row["seconds"] for row in good])
        times = [row["seconds"]["median"] for row in good]
        milliseconds = [[1e3 * value for value in values] for values in (times, low, high)]
        options = {"yerr": milliseconds[1:], "marker": "o", "markersize": 3, "color": OURS}
        axis.errorbar([row["at"] for row in good], milliseconds[0], **options)
        axis.set(xscale="log", yscale="log", title=case["title"], xlabel=case["axis"], ylabel="ms a round")
        axis.set_ylim(min(milliseconds[0]) / 3, max(milliseconds[0]) * 3)  # a small change looks small
        _plain_numbers(axis.yaxis)
    yield "federated", canvas


Plot = Callable[[Record], Iterator[tuple[str, Any]]]
PLOTS: dict[str, Plot] = {"step": _step, "kernels": _kernels, "federated": _federated_plots}
