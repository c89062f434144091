"""Tables and plots of what `bench.kernels` measured. Nothing here measures: every number comes from its results
file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

KIND = "fastsam.bench.kernels/1"
Row = dict[str, Any]
HOW = ("replayed", "eager")  # what is shown of an op: the first that was measured


def file_name(record: dict[str, Any]) -> str:
    return f"kernels-{record['device']}.json"


def namespace(record: dict[str, Any]) -> str:
    """What the names of this record's sections begin with."""
    return f"kernels-{record['device']}:"


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def sections(record: dict[str, Any]) -> dict[str, str]:
    """Pieces of Markdown by name: the ops on scattered and on flat tensors, whole steps, and how it was made."""
    found = {f"{layout}": _ops(record, layout) for layout in ("scattered", "flat")}
    found |= {"steps": _steps(record), "made": provenance(record)}
    return {namespace(record) + name: text for name, text in found.items()}


def _ops(record: dict[str, Any], layout: str) -> str:
    """Fraction of the floor per op, backend and size."""
    cases = [case for case in record["ops"] if case["layout"] == layout]
    if not cases:
        return f"No op was measured on {layout} tensors."

    def cell(case: dict[str, Any] | None, name: str) -> str:
        row = next((r for r in case["rows"] if r["name"] == name), None) if case else None
        best = measured(row)
        if best is None:
            return row["gate"] if row and row["gate"] == "red" else "-"
        return f"{best['fraction']['median']:.2f} ({duration(best['seconds']['median'])})"

    sizes = {case["size"]: case["title"] for case in cases}
    names = [n for n in _names(cases) if any(measured(r) for case in cases for r in case["rows"] if r["name"] == n)]
    lines = ["| op | bytes | backend | " + " | ".join(sizes.values()) + " |", "|---|---:|---|" + "---:|" * len(sizes)]
    for op in dict.fromkeys(case["op"] for case in cases):
        mine = {case["size"]: case for case in cases if case["op"] == op}
        bytes_ = next(iter(mine.values()))["bytes_per_parameter"]
        for name in names:
            cells = [cell(mine.get(size), name) for size in sizes]
            if any(text != "-" for text in cells):
                lines.append(f"| {op} | {bytes_} | {name} | " + " | ".join(cells) + " |")
    how = "replayed from a CUDA graph" if record["device"] == "cuda" else record_threads(record)
    title = f"Fraction of the floor on {layout} tensors, with the time per call, median ({how}):"
    return f"{title}\n\n" + "\n".join(lines)


def record_threads(record: dict[str, Any]) -> str:
    return f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"


def measured(row: Row | None) -> dict[str, Any] | None:
    """The figures to show of a row, None when it has none."""
    return next((row[how] for how in HOW if row and how in row), None)


def _names(results: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["name"] for result in results for row in result["rows"]))


def _median(*keys: str) -> Callable[[Row], Any]:
    """The median of a summary deep in a row, or a plain number; None where it is missing."""

    def get(row: Row) -> Any:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value["median"] if isinstance(value, dict) else value

    return get


STEP_TABLES: tuple[tuple[str, Callable[[Row], Any], Callable[[Any], str]], ...] = (
    ("Time of a whole step's optimizer part, eager:", _median("eager", "seconds"), duration),
    ("Replayed from a CUDA graph:", _median("replayed", "seconds"), duration),
    ("Fraction of the floor of 40 bytes per parameter, eager:", _median("eager", "fraction"), "{:.2f}".format),
    ("Fraction of the floor, replayed:", _median("replayed", "fraction"), "{:.2f}".format),
    ("Times faster than the copied per-tensor SAM, eager:", _median("eager", "faster_than_copied"), "{:.2f}".format),
    ("Times faster than foreach and fused SGD, eager:", _median("eager", "faster_than_foreach"), "{:.2f}".format),
    ("The same, replayed:", _median("replayed", "faster_than_foreach"), "{:.2f}".format),
    ("Times faster than `torch.compile`, eager:", _median("eager", "faster_than_compiled"), "{:.2f}".format),
    ("The same, replayed:", _median("replayed", "faster_than_compiled"), "{:.2f}".format),
    ("Launches per step:", _median("launches"), str),
    ("Host time per eager step, gradients where they were:", _median("host_seconds", "unchanged"), duration),
    ("Host time per eager step, gradients elsewhere every time:", _median("host_seconds", "changed"), duration),
    ("Peak extra memory, bytes per parameter:", _median("extra_bytes_per_parameter"), "{:.1f}".format),
)


def _steps(record: dict[str, Any]) -> str:
    """Contenders down, sizes across, a table per figure that was taken."""
    results = record["steps"]
    pieces = []
    for title, get, show in STEP_TABLES:
        lines = []
        for name in _names(results):
            rows = [next((r for r in result["rows"] if r["name"] == name), None) for result in results]
            values = [get(row) if row else None for row in rows]
            if any(value is not None for value in values):
                label = next(row["title"] for row in rows if row)
                lines.append(f"| {label} | " + " | ".join("-" if v is None else show(v) for v in values) + " |")
        if lines:
            head = "| | " + " | ".join(result["title"] for result in results) + " |"
            pieces.append("\n".join([title, "", head, "|---|" + "---:|" * len(results), *lines]))
    return "\n\n".join(pieces) or "No whole step was measured."


def provenance(record: dict[str, Any]) -> str:
    """How it was made, on what, and what is not in it."""
    e = record["environment"]
    m, v = e["machine"], e["versions"]
    where = ", ".join(m["gpus"][:1]) if record["device"] == "cuda" else f"{m['cpu']}, {record_threads(record)}"
    changes = "+changes" if e["commit"].endswith("+changes") else ""
    copies = [result["copy"]["median"] / 1e9 for result in (*record["steps"], *record["ops"])]
    bandwidth = f"{min(copies):.0f} to {max(copies):.0f} GB/s" if copies else "not measured"
    lines = [
        f"Made by `{e['command']}` on {e['date'][:10]}, commit `{e['commit'][:12]}{changes}`; {where}; Python "
        f"{v['python']}, "
        f"torch {v['torch']}, triton {v['triton']}; a large copy moved {bandwidth} (read plus written)."
    ]
    lines += [f"Not measured: {reason}." for reason in reasons(record)]
    if record["left_out"]:
        lines.append(f"No time was left for {len(record['left_out'])} cases.")
    return "\n".join(lines)


def reasons(record: dict[str, Any]) -> list[str]:
    """Why figures are missing, a line each."""
    rows = (row for result in (*record["steps"], *record["ops"]) for row in result["rows"])
    return list(dict.fromkeys(f"{row['title']}: {row['reason']}" for row in rows if "reason" in row))


# --- plots ---


def plots(record: dict[str, Any], out: Path) -> Iterator[Path]:
    """Draws what there is figures for: the fraction of the floor by size, and the time by the number of tensors."""
    if any(measured(row) for case in record["ops"] for row in case["rows"]):
        yield roofline(record, out / f"roofline-{record['device']}.png")
    if any(result["size"].startswith("cut") for result in record["steps"]):
        yield tensors(record, out / f"tensors-{record['device']}.png")


def roofline(record: dict[str, Any], path: Path) -> Path:
    """Fraction of the floor by number of parameters: a panel per backend, a line per op on scattered tensors."""
    plt = _pyplot()
    cases = [c for c in record["ops"] if not c["size"].startswith(("cut", "rows")) and c["layout"] == "scattered"]
    names = [n for n in _names(cases) if any(measured(r) for c in cases for r in c["rows"] if r["name"] == n)]
    figure, axes = plt.subplots(
        1, max(len(names), 1), figsize=(4.6 * max(len(names), 1), 4.2), sharey=True, squeeze=False
    )
    for ax, name in zip(axes[0], names, strict=False):
        for op in dict.fromkeys(case["op"] for case in cases):
            points = sorted(_points(cases, op, name))
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=op)
        ax.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
        ax.set(xscale="log", xlabel="parameters", title=name)
        ax.grid(which="both", linewidth=0.3)
    axes[0][0].set_ylabel("fraction of the memory floor")
    axes[0][0].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=4, frameon=False)
    return _save(figure, record, path)


def _points(cases: Sequence[dict[str, Any]], op: str, name: str) -> Iterator[tuple[int, float]]:
    for case in cases:
        row = next((r for r in case["rows"] if r["name"] == name), None)
        best = measured(row)
        if case["op"] == op and best is not None:
            yield case["parameters"], best["fraction"]["median"]


def tensors(record: dict[str, Any], path: Path) -> Path:
    """Time of a whole step by the number of tensors that the same parameters are cut into."""
    plt = _pyplot()
    results = sorted((r for r in record["steps"] if r["size"].startswith("cut")), key=lambda r: r["tensors"])
    figure, ax = plt.subplots(figsize=(6.4, 4.4))
    for name in _names(results):
        for how, style in (("eager", "-"), ("replayed", ":")):
            found = [(r["tensors"], row[how]["seconds"]["median"], row["title"]) for r in results for row in r["rows"]
                     if row["name"] == name and how in row]  # fmt: skip
            if found:
                x, y, titles = zip(*found, strict=True)
                ax.plot(
                    x, [1e6 * s for s in y], style, marker="o", markersize=3, linewidth=1, label=f"{titles[0]}, {how}"
                )
    ax.set(xscale="log", yscale="log", xlabel="tensors", ylabel="µs per step")
    ax.grid(which="both", linewidth=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2, frameon=False)
    return _save(figure, record, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["figure.constrained_layout.use"] = True
    return pyplot


def _save(figure: Any, record: dict[str, Any], path: Path) -> Path:
    e = record["environment"]
    where = e["machine"]["gpus"][0] if record["device"] == "cuda" else e["machine"]["cpu"]
    figure.suptitle(f"{where}, torch {e['versions']['torch']}, {e['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    _pyplot().close(figure)
    return path
