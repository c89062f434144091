"""The plots of the pages, drawn from results files."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.record import Record, Row, figure, has_failed, median, name_of

# Ours in blues, the peers in warm colours and greys.
OURS = ("#0b5fa5", "#7fb2dd", "#b9d6ee", "#2b8cbe", "#08306b")
PEERS = ("#e8890c", "#8c6bb1", "#5aa469", "#c9a227", "#d9694f", "#9a9a9a", "#6d6d6d", "#3d3d3d")


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


def _bars(axis: Any, cases: Sequence[Record], path: str, y: str) -> None:
    """Draw a group of bars per case, one for each row with the figure, logarithmic."""
    names = {row["name"]: row for case in cases for row in case["rows"] if figure(row, path)}
    our_colours, peers, width = iter(OURS), iter(PEERS), 0.84 / max(len(names), 1)
    for number, (name, row) in enumerate(names.items()):
        values = {i: figure(r, path) for i, case in enumerate(cases) for r in case["rows"] if r["name"] == name}
        summaries = {i: summary for i, summary in values.items() if summary}
        colour = next(our_colours if row["ours"] else peers, "#444444")
        options = {"yerr": _spread(list(summaries.values())), "label": row["title"], "color": colour}
        x = [i - 0.42 + (number + 0.5) * width for i in summaries]
        axis.bar(x, [s["median"] for s in summaries.values()], width, **options)
    axis.set_xticks(range(len(cases)), [case["title"].replace(", ", "\n") for case in cases])
    axis.set(yscale="log", ylabel=y)
    axis.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")


def _step(record: Record) -> Iterator[tuple[str, Any]]:
    cases = [case for case in record["cases"] if case["part"] != "whole"]
    canvas, axes = _axes(2, 1, (max(7.0, 1.9 * len(cases)), 8.0))
    _bars(axes[0, 0], cases, "eager.to.copied", "time, relative to the copied per-tensor SAM")
    _bars(axes[1, 0], cases, "eager.fraction", "fraction of the memory floor")
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
        summaries = [row["seconds"] for row in good]
        options = {"yerr": _spread(summaries), "marker": "o", "markersize": 3}
        axis.errorbar([row["at"] for row in good], [s["median"] for s in summaries], **options)
        axis.set(xscale="log", yscale="log", title=case["title"], xlabel=case["axis"], ylabel="seconds a round")
    yield "federated", canvas


Plot = Callable[[Record], Iterator[tuple[str, Any]]]
PLOTS: dict[str, Plot] = {"step": _step, "kernels": _kernels, "federated": _federated_plots}
