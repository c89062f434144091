"""Tables and plots of federated.json:
`python -m bench.fed.report bench/results/federated.json [--into docs/benchmarks.md]`.

Writes federated.md and federated.png beside the JSON; with --into, the tables between the page's markers too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- federated:all -->", "<!-- /federated -->"
UNMEASURED = "Not measured yet."  # between the markers until there is a JSON


def file_name(content: Mapping[str, Any]) -> str:
    return "federated-cuda.json" if content["device"] == "cuda" else "federated.json"


def table(case: Mapping[str, Any]) -> str:
    """One race as Markdown: speed relative to its first line, median and quartiles; or what algorithms cost beside
    FedAvg."""
    if "costs" in case:
        return costs_table(case)
    lines = [
        f"**{case['title']}**",
        "",
        "| | rounds per second, relative | quartiles | peak memory |",
        "|---|---|---|---|",
    ]
    for figure in case["result"]["figures"]:
        if figure["problem"]:
            lines.append(f"| {figure['label']} | {_failed(figure['problem'])} | | |")
            continue
        speed = figure["speed"]
        quartiles = f"{speed['q1']:.2f}–{speed['q3']:.2f}"
        lines.append(f"| {figure['label']} | {speed['median']:.2f} | {quartiles} | {figure['peak_mib']:.0f} MiB |")
    return "\n".join([*lines, ""])


def costs_table(case: Mapping[str, Any]) -> str:
    """Seconds relative to FedAvg's: of a local step, and of a round."""
    lines = [
        f"**{case['title']}**",
        "",
        "| | seconds of a local step, FedAvg = 1 | quartiles | of a round | quartiles |",
        "|---|---|---|---|---|",
    ]
    for cost in case["costs"]:
        if cost["problem"]:
            lines.append(f"| {cost['label']} | {_failed(cost['problem'])} | | | |")
            continue
        both = (cost["step"], cost["round"])
        cells = [f"{s['median']:.3f} | {s['q1']:.3f}–{s['q3']:.3f}" if s else "– | –" for s in both]
        lines.append(f"| {cost['label']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _failed(problem: str) -> str:
    """The problem as the cell of a table."""
    return "failed: " + " ".join(problem.replace("|", "/").split())[:80]


def share_line(found: Mapping[str, float]) -> str:
    return f"The loop's own time is {found['own_share']:.1%} of a CNN round.\n"


def gpu_tables(part: Mapping[str, Any]) -> str:
    """Milliseconds of a round: one table per series, what was measured in columns."""
    lines = []
    for title in dict.fromkeys(s["title"] for s in part["series"]):
        series = [s for s in part["series"] if s["title"] == title]
        names, places = (list(dict.fromkeys(s[key] for s in series)) for key in ("name", "at"))
        cells = {(s["name"], s["at"]): "–" if s["seconds"] is None else f"{1e3 * s['seconds']:.1f}" for s in series}
        lines += [f"**{title}**, ms a round", "", "| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        lines += [f"| {at} | " + " | ".join(cells.get((name, at), "–") for name in names) + " |" for at in places]
        lines.append("")
    if part["busy"]:
        lines += [f"**A round of {part['busy'][0]['clients']} small CNNs under the profiler**", ""]
        lines += ["| | busy | kernels at once while busy | streams |", "|---|---|---|---|"]
        for found in part["busy"]:
            if "problem" in found:
                lines.append(f"| {found['executor']} | {_failed(found['problem'])} | | |")
            else:
                cells = f"{found['busy']:.0%} | {found['at_once']:.1f} | {found['streams']}"
                lines.append(f"| {found['executor']} | {cells} |")
        lines.append("")
    left_out = [job for job in part["jobs"] if job["problem"]]
    lines += [f"- {job['name']}: {_failed(job['problem'])}" for job in left_out] + [""] * bool(left_out)
    return "\n".join(lines)


def page(content: Mapping[str, Any]) -> str:
    """All tables, and what they were measured on."""
    machine = content["machine"]
    where = ", ".join(machine.get("gpus", [])) or f"{machine['cores']} cores of {machine['cpu']}"
    lines = [
        f"{where}; torch {content['versions']['torch']}; commit `{content['commit'][:12]}`; `{content['command']}`",
        "",
    ]
    for name, about in content.get("again", {}).items():
        lines += [f"Part `{name}` again: commit `{about['commit'][:12]}`; `{about['command']}`", ""]
    for name, part in content["parts"].items():
        lines += (
            [share_line(part)] if name == "share" else [gpu_tables(part)] if name == "gpu" else [table(c) for c in part]
        )
    return "\n".join(lines)


def section(tables: str, picture: str | None) -> str:
    """What stands between a page's markers."""
    return tables if picture is None else f"{tables}\n![speeds of federated rounds, and how time grows]({picture})\n"


def plot(content: Mapping[str, Any], path: Path) -> bool:
    """Speeds as bars, growth as lines. False when there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bars, lines = content["parts"].get("speed", []), content["parts"].get("growth", [])
    columns = max(len(bars), len(lines))
    if not columns:
        return False
    rows = [part for part in (bars, lines) if part]
    figure, axes = plt.subplots(len(rows), columns, figsize=(4.2 * columns, 3.6 * len(rows)), squeeze=False)
    for line, part in zip(axes, rows):
        for axis in line[len(part) :]:
            axis.axis("off")
        for axis, case in zip(line, part):
            (_line if case["axis"] else _bars)(axis, case)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _good(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [f for f in case["result"]["figures"] if not f["problem"]]


def _bars(axis: Any, case: Mapping[str, Any]) -> None:
    figures = _good(case)[::-1]
    speeds = [f["speed"]["median"] for f in figures]
    spread = [
        [f["speed"]["median"] - f["speed"]["q1"] for f in figures],
        [f["speed"]["q3"] - f["speed"]["median"] for f in figures],
    ]
    colours = ["tab:blue" if f["label"].startswith("fastsam") else "tab:gray" for f in figures]
    thin = {"ecolor": "0.3", "elinewidth": 1, "capsize": 2}
    axis.barh([f["label"] for f in figures], speeds, xerr=spread, error_kw=thin, color=colours, height=0.7)
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    for place, figure in enumerate(figures):
        at, text = (figure["speed"]["q3"], place), f"{figure['speed']['median']:.2f}"
        axis.annotate(text, at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.15)
    axis.set_title(case["title"], fontsize=10)
    axis.set_xlabel("rounds per second, bare loop = 1", fontsize=8)
    axis.tick_params(labelsize=8)


def _line(axis: Any, case: Mapping[str, Any]) -> None:
    good = {f["label"]: f["seconds"] for f in _good(case)}
    points = [(at, good[f["label"]]) for at, f in zip(case["at"], case["result"]["figures"]) if f["label"] in good]
    x = [at for at, _ in points]
    axis.fill_between(x, [s["q1"] for _, s in points], [s["q3"] for _, s in points], alpha=0.25)
    axis.plot(x, [s["median"] for _, s in points], marker="o")
    axis.set(xscale="log", yscale="log")
    axis.set_title(case["title"], fontsize=10)
    axis.set_xlabel(case["axis"], fontsize=8)
    axis.set_ylabel("seconds a round", fontsize=8)
    axis.grid(alpha=0.3)


def into(text: str, tables: str) -> str:
    """A page with the tables between its markers. Raises ValueError for a page without them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page must have the lines {BEGIN} and {END}, once each")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n{tables}\n{text[text.index(END) :]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fed.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--into", type=Path, action="append", default=[], metavar="PAGE")
    arguments = parser.parse_args(argv)
    content = json.loads(arguments.json.read_text())
    tables = page(content)
    arguments.json.with_suffix(".md").write_text(tables)
    picture = arguments.json.with_suffix(".png")
    drawn = plot(content, picture)
    for path in arguments.into:
        shown = os.path.relpath(picture, path.parent) if drawn else None
        path.write_text(into(path.read_text(), section(tables, shown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
