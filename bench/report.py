"""From a results file to the pages' tables and plots: `python -m bench.report bench/results/step.json` (or
`kernels-*.json`).

Prints Markdown; `--into FILE` puts the tables into the marked places of a page, `--plot FILE` draws the plot again.
Nothing here
measures: every number comes from the results file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import kernel_report
from bench.kernel_report import duration

KIND = "fastsam.bench.step/1"
JSON, PNG = "step.json", "step.png"


def read(path: Path) -> dict[str, Any]:
    """The record of a results file. Raises ValueError when it is not one of `bench.step` or `bench.kernels`."""
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); expected a file that `python -m bench.step` or `bench.kernels` wrote"
        ) from error
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in (KIND, kernel_report.KIND):
        raise ValueError(
            f"{path} holds {kind!r}, expected {KIND!r} or {kernel_report.KIND!r}: measure again with `python -m "
            f"bench.step` "
            "or `python -m bench.kernels`"
        )
    return record


def write(record: dict[str, Any], directory: Path) -> None:
    """`step.json` and `step.png` into `directory`; files that are there are replaced only by complete ones."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = {name: directory / f"part-{name}" for name in (JSON, PNG)}
    try:
        parts[JSON].write_text(json.dumps(record, indent=1) + "\n")
        plot(record, parts[PNG])
        for name, part in parts.items():
            os.replace(part, directory / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def rich_table(result: dict[str, Any]) -> Table:
    """One size with one number of threads, for the terminal."""
    table = Table(title=heading(result), title_justify="left")
    for name in ("", "per step", "quartiles", "to copied", "to flat", "of the floor", "extra B/param"):
        table.add_column(name, justify="left" if name in ("", "quartiles") else "right")
    for row in result["contenders"]:
        style = "bold" if row["ours"] else None
        if "seconds" not in row:
            table.add_row(row["title"], row["gate"], style="red" if row["gate"] == "red" else style)
            continue
        low, high = row["seconds"]["q1"], row["seconds"]["q3"]
        cells = [duration(row["seconds"]["median"]), f"{duration(low)} … {duration(high)}"]
        cells += [figure(row, "to_copied"), figure(row, "to_flat"), figure(row, "floor_fraction")]
        table.add_row(row["title"], *cells, f"{row['extra_bytes_per_parameter']:.1f}", style=style)
    return table


def reasons(results: Sequence[dict[str, Any]]) -> list[str]:
    """Why contenders were not measured, a line each."""
    found = (f"{row['title']}: {row['reason']}" for r in results for row in r["contenders"] if "reason" in row)
    return list(dict.fromkeys(found))


def threads_of(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def heading(result: dict[str, Any]) -> str:
    bandwidth = result["copy_bytes_per_second"]["median"] / 1e9
    return (
        f"{result['title']}: {result['tensors']} tensors, {result['parameters']:,} parameters, "
        f"{threads_of(result['threads'])}; "
        f"{result['rounds']} rounds; a copy moves {bandwidth:.1f} GB/s"
    )


def figure(row: dict[str, Any], key: str) -> str:
    return f"{row[key]['median']:.2f}" if key in row else "-"


def sections(record: dict[str, Any]) -> dict[str, str]:
    """Pieces of Markdown: a heading line and a table each, and `made`: how, on what, and what was not measured."""
    if record["kind"] == kernel_report.KIND:
        return kernel_report.sections(record)
    floor = record["floor_bytes_per_parameter"]

    def section(title: str, cell: Callable[[dict[str, Any]], str]) -> str:
        return f"{title}\n\n{_matrix(record, cell)}"

    return {
        "copied": section(
            "Time of the optimizer part of a SAM step, relative to the copied per-tensor SAM (less is faster):",
            lambda row: figure(row, "to_copied"),
        ),
        "choices": "Time of the optimizer part of a SAM step, relative to the copied per-tensor SAM (less is "
        "faster):\n\n" + _matrix(record, lambda row: figure(row, "to_copied")),
        "flat": section(
            "Relative to one flat tensor with flat gradients and torch's fused SGD:", lambda row: figure(row, "to_flat")
        ),
        "time": section("Time per step, median:", lambda row: duration(row["seconds"]["median"])),
        "floor": section(
            f"Fraction of the floor, {floor} bytes per parameter at the bandwidth of a large copy (more than 1: in the "
            f"caches):",
            lambda row: figure(row, "floor_fraction"),
        ),
        "memory": section(
            "Peak memory beyond weights and gradients, bytes per parameter:",
            lambda row: f"{row['extra_bytes_per_parameter']:.1f}",
        ),
        "made": provenance(record),
    }


def markdown(record: dict[str, Any]) -> str:
    """All sections; `choices` is a part of `copied`."""
    return "\n\n".join(piece for name, piece in sections(record).items() if name != "choices")


_MARKED = re.compile(r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill(text: str, record: dict[str, Any]) -> str:
    """`text` with what stands between `<!-- bench:SECTION -->` and `<!-- /bench -->` replaced by that section; `all`
    means every one.

    The sections of `bench.kernels` are named after its file (`kernels-cpu:steps`). Places of other results files are
    left as they are. Raises ValueError when there is no place for this one, or it names no section.
    """
    space = kernel_report.namespace(record) if record["kind"] == kernel_report.KIND else ""
    pieces = sections(record) | {f"{space}all": markdown(record)}
    names = [name for _, name, _ in _MARKED.findall(text) if _space(name) == space]
    unknown = [name for name in names if name not in pieces]
    if not names or unknown:
        wrong = (
            f"there is no section {unknown[0]!r}"
            if unknown
            else f"there is no place marked `<!-- bench:{space}SECTION -->` ... `<!-- /bench -->`"
        )
        raise ValueError(f"{wrong}; sections are {', '.join(pieces)}")

    def piece(found: re.Match[str]) -> str:
        return f"{found[1]}{pieces[found[2]]}\n{found[3]}" if _space(found[2]) == space else found[0]

    return _MARKED.sub(piece, text)


def _space(name: str) -> str:
    """`kernels-cpu:` of `kernels-cpu:steps`; empty for a section of `bench.step`."""
    return name[: name.rfind(":") + 1]


def _matrix(record: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> str:
    """Contenders down, sizes and threads across, ours in bold. One without a figure has its state in the cell, and the
    reason below."""
    results = record["results"]
    heads = [f"{r['title']}, {threads_of(r['threads'])}" for r in results]
    lines = ["| | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    rows = [row for r in results for row in r["contenders"]]
    titles = {row["name"]: (row["title"], row["ours"]) for row in rows}
    for name, (title, ours) in titles.items():
        cells = []
        for r in results:
            row = next((row for row in r["contenders"] if row["name"] == name), None)
            cells.append("-" if row is None else cell(row) if "seconds" in row else row["gate"])
        shown = [f"**{text}**" if ours else text for text in (title, *cells)]
        if any("seconds" in row for r in results for row in r["contenders"] if row["name"] == name):
            lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def provenance(record: dict[str, Any]) -> str:
    """Who measured what on which machine; and what was not measured, with the reason."""
    e = record["environment"]
    m, v = e["machine"], e["versions"]
    caches = ", ".join(f"{level} {size}" for level, size in m["caches"].items())
    others = ", ".join(f"{r['busy_others']:.2f}" for r in record["results"])
    changes = "+changes" if e["commit"].endswith("+changes") else ""
    lines = [
        f"Made by `{e['command']}` on {e['date'][:10]}, commit `{e['commit'][:12]}{changes}`; {m['cpu']}, {m['cores']} "
        f"cores ({caches}), "
        f"{m['memory_gib']} GiB; Python {v['python']}, torch {v['torch']}, pytorch-optimizer {v['pytorch-optimizer']}. "
        f"Processors used by other processes meanwhile, per column: {others}."
    ]
    lines += [f"Not measured: {reason}." for reason in reasons(record["results"])]
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Two panels, a group of bars per size and number of threads: time relative to the copied SAM, and the fraction of
    the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = record["results"]
    names = list(dict.fromkeys(row["name"] for r in results for row in r["contenders"] if "seconds" in row))
    titles = {row["name"]: row["title"] for r in results for row in r["contenders"]}
    colours = _colours(names, {row["name"] for r in results for row in r["contenders"] if row["ours"]})
    panels = (
        ("to_copied", "time, relative to the copied per-tensor SAM"),
        ("floor_fraction", "fraction of the memory floor"),
    )
    figure_, axes = plt.subplots(len(panels), 1, figsize=(max(7.0, 1.9 * len(results)), 8.0), constrained_layout=True)
    for ax, (key, label) in zip(axes, panels, strict=True):
        _bars(ax, results, names, titles, colours, key)
        ax.set_ylabel(label)
        ax.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    handles, labels = axes[0].get_legend_handles_labels()
    figure_.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    e = record["environment"]
    figure_.suptitle(
        f"Optimizer part of a SAM step\n{e['machine']['cpu']}, torch {e['versions']['torch']}, {e['date'][:10]}",
        fontsize=10,
    )
    figure_.savefig(path, dpi=130, format="png")
    plt.close(figure_)


def _colours(names: Sequence[str], ours: set[str]) -> dict[str, Any]:
    """Ours in blues, the peers in warm colours and greys, the same in both panels."""
    blues = iter(("#0b5fa5", "#7fb2dd", "#b9d6ee"))
    others = iter(("#e8890c", "#8c6bb1", "#5aa469", "#c9a227", "#d9694f", "#9a9a9a", "#6d6d6d"))
    return {name: next(blues) if name in ours else next(others, "#444444") for name in names}


def _bars(
    ax: Any,
    results: Sequence[dict[str, Any]],
    names: Sequence[str],
    titles: dict[str, str],
    colours: dict[str, Any],
    key: str,
) -> None:
    """Bars with their quartiles. The axis is logarithmic: the sizes differ by more than a factor of ten."""
    width = 0.84 / max(len(names), 1)
    for i, name in enumerate(names):
        for j, r in enumerate(results):
            found = next((row[key] for row in r["contenders"] if row["name"] == name and key in row), None)
            if found is None or not math.isfinite(found["median"]):
                continue
            spread = [[max(found["median"] - found["q1"], 0.0)], [max(found["q3"] - found["median"], 0.0)]]
            x = j - 0.42 + (i + 0.5) * width
            ax.bar(x, found["median"], width, color=colours[name], label=titles[name] if j == 0 else None)
            ax.errorbar(x, found["median"], spread, color="0.25", linewidth=0.8)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks(range(len(results)), [f"{r['title']}\n{threads_of(r['threads'])}" for r in results])
    ax.grid(axis="y", which="both", linewidth=0.3)
    ax.set_axisbelow(True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("results", type=Path, help="a step.json or kernels-DEVICE.json")
    parser.add_argument(
        "--plot", type=Path, help="draw again: into this PNG, or with kernels-DEVICE.json into this folder"
    )
    parser.add_argument(
        "--into", type=Path, action="append", default=[], help="replace the marked tables in this Markdown file"
    )
    arguments = parser.parse_args(argv)
    try:
        record = read(arguments.results)
        filled = {path: fill(path.read_text(), record) for path in arguments.into}
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in filled.items():
        path.write_text(text)
    if arguments.plot is not None and record["kind"] == kernel_report.KIND:
        list(kernel_report.plots(record, arguments.plot))
    elif arguments.plot is not None:
        plot(record, arguments.plot)
    print(markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
