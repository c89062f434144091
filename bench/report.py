"""The writer of all tables and pages, from results files: `python -m bench.report FILE...` prints the tables.

`--plot FOLDER` draws the plots. `--publish` stores the files in bench/results, draws their plots there, and writes
every page from that folder: the texts between `<!-- NAME:SECTION -->` and `<!-- /NAME -->`. Nothing here measures.
Standard library only, because `bench/gpu.py` runs where an environment may be broken.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tables import (
    ACCURACY,
    FAMILY,
    FEDERATED,
    GPU,
    KERNELS,
    NCU,
    STEP,
    Cell,
    Record,
    Row,
    best,
    duration,
    failed,
    file_name,
    made_by,
    matrix,
    median,
    on_device,
    padded,
    quartiles,
    reasons,
    table,
    threads_of,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
UNMEASURED = "Not measured."


def read(path: Path) -> dict[str, Any]:
    """Return the record of a results file. Raises ValueError if it is not a file that a benchmark wrote."""
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); expected a results file of a benchmark") from error
    if isinstance(record, dict) and "kind" not in record:
        record |= {"kind": FEDERATED} if "parts" in record and "machine" in record else {}  # as it was first written
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in SECTIONS:
        raise ValueError(f"{path} holds {kind!r}, expected one of {', '.join(SECTIONS)}: measure again")
    return dict(record)


def on_terminal(record: Record, result: Row) -> str:
    """Return the table of one result while others are being measured."""
    bandwidth = result["copy_bytes_per_second"]["median"] / 1e9
    heading = (
        f"\n{result['title']}: {result['tensors']} tensors, {result['parameters']:,} parameters, "
        f"{threads_of(result['threads'])}; {result['rounds']} rounds; a copy moves {bandwidth:.1f} GB/s\n"
    )
    if record["kind"] == FAMILY:
        return heading + padded(_family_table(result))
    rows = []
    for row in result["contenders"]:
        shown = [show(get(row)) if get(row) is not None else "-" for _, (get, show) in STEP_COLUMNS.items()]
        rows.append([row["title"], *(shown if "seconds" in row else [row["gate"], "", "", "", ""])])
    return "\n".join([heading + padded(table(["", *STEP_COLUMNS], rows)), *reasons({"results": [result]})])


# --- steps ---

two = "{:.2f}".format
STEP_COLUMNS: dict[str, tuple[Callable[[Row], Any], Cell]] = {
    "to copied": (median("to_copied"), two),
    "to flat": (median("to_flat"), two),
    "per step": (median("seconds"), duration),
    "of the floor": (median("floor_fraction"), two),
    "extra B/param": (median("extra_bytes_per_parameter"), "{:.1f}".format),
}
STEP_TITLES = {
    "copied": "Time of the optimizer part of a SAM step, relative to the copied per-tensor SAM (less is faster):",
    "flat": "Relative to one flat tensor with flat gradients and torch's fused SGD:",
    "time": "Time per step, median:",
    "floor": "Fraction of the floor, {} bytes per parameter at the bandwidth of a large copy (more than 1: in the "
    "caches):",
    "memory": "Peak memory beyond weights and gradients, bytes per parameter:",
}


def _step(record: Record) -> dict[str, str]:
    results = record["results"]
    heads = [f"{r['title']}, {threads_of(r['threads'])}" for r in results]
    found = {}
    for (name, title), (get, show) in zip(STEP_TITLES.items(), STEP_COLUMNS.values(), strict=True):
        cell = lambda row, get=get, show=show: show(get(row)) if get(row) is not None else ""  # noqa: E731
        shown = matrix(heads, [r["contenders"] for r in results], cell, bold=True)
        found[f"bench:{name}"] = f"{title.format(record['floor_bytes_per_parameter'])}\n\n{shown}"
    m, v = record["environment"]["machine"], record["environment"]["versions"]
    caches = ", ".join(f"{level} {size}" for level, size in m["caches"].items())
    others = ", ".join(two(r["busy_others"]) for r in results)
    made = (
        f"{made_by(record['environment'])}; {m['cpu']}, {m['cores']} cores ({caches}), {m['memory_gib']} GiB; "
        f"Python {v['python']}, torch {v['torch']}, pytorch-optimizer {v['pytorch-optimizer']}. "
        f"Processors used by other processes meanwhile, per column: {others}."
    )
    found["bench:made"] = "\n".join([made, *reasons(record)])
    return found | {"bench:all": "\n\n".join(found.values())}


# --- kernels and whole steps on a device ---


STEP_TABLES: tuple[tuple[str, Callable[[Row], Any], Cell], ...] = (
    ("Time of a whole step's optimizer part, eager:", median("eager", "seconds"), duration),
    ("Replayed from a CUDA graph:", median("replayed", "seconds"), duration),
    ("Fraction of the floor of 40 bytes per parameter, eager:", median("eager", "fraction"), two),
    ("Fraction of the floor, replayed:", median("replayed", "fraction"), two),
    ("Times faster than the copied per-tensor SAM, eager:", median("eager", "faster_than_copied"), two),
    ("Times faster than foreach and fused SGD, eager:", median("eager", "faster_than_foreach"), two),
    ("The same, replayed:", median("replayed", "faster_than_foreach"), two),
    ("Times faster than `torch.compile`, eager:", median("eager", "faster_than_compiled"), two),
    ("The same, replayed:", median("replayed", "faster_than_compiled"), two),
    ("Launches per step:", median("launches"), str),
    ("Host time per eager step, gradients where they were:", median("host_seconds", "unchanged"), duration),
    ("Host time per eager step, gradients elsewhere every time:", median("host_seconds", "changed"), duration),
    ("Peak extra memory, bytes per parameter:", median("extra_bytes_per_parameter"), "{:.1f}".format),
)


def _kernels(record: Record) -> dict[str, str]:
    threads, space = threads_of(record["threads"]), f"bench:kernels-{record['device']}"
    found = {f"{space}:{layout}": _ops(record, layout, threads) for layout in ("scattered", "flat")}
    steps = record["steps"]
    pieces = []
    for title, get, show in STEP_TABLES:
        cell = lambda row, get=get, show=show: "" if get(row) is None else show(get(row))  # noqa: E731
        shown = matrix([r["title"] for r in steps], [r["rows"] for r in steps], cell)
        pieces += [f"{title}\n\n{shown}"] if shown else []
    found[f"{space}:steps"] = "\n\n".join(pieces) or "No whole step was measured."
    e = record["environment"]
    m, v = e["machine"], e["versions"]
    where = ", ".join(m["gpus"][:1]) if record["device"] == "cuda" else f"{m['cpu']}, {threads}"
    copies = [result["copy"]["median"] / 1e9 for result in (*steps, *record["ops"])]
    bandwidth = f"{min(copies):.0f} to {max(copies):.0f} GB/s" if copies else "not measured"
    made = (
        f"{made_by(e)}; {where}; Python {v['python']}, torch {v['torch']}, triton {v['triton']}; "
        f"a large copy moved {bandwidth} (read plus written)."
    )
    left = len(record["left_out"])
    found[f"{space}:made"] = "\n".join([made, *reasons(record), *[f"No time was left for {left} cases."] * bool(left)])
    return found | {f"{space}:all": "\n\n".join(found.values())}


def _ops(record: Record, layout: str, threads: str) -> str:
    """Return the fraction of the floor per op, backend and size."""
    cases = [case for case in record["ops"] if case["layout"] == layout]
    if not cases:
        return f"No op was measured on {layout} tensors."
    sizes = {case["size"]: case["title"] for case in cases}
    names = dict.fromkeys(row["name"] for case in cases for row in case["rows"] if best(row))
    by_key = {(case["op"], case["size"], row["name"]): row for case in cases for row in case["rows"]}

    def cell(row: Row) -> str:
        if best(row) is None:
            return "red" if row.get("gate") == "red" else "-"
        return f"{best(row)['fraction']['median']:.2f} ({duration(best(row)['seconds']['median'])})"

    rows = []
    for op, bytes_ in {case["op"]: case["bytes_per_parameter"] for case in cases}.items():
        for name in names:
            cells = [cell(by_key.get((op, size, name), {})) for size in sizes]
            if set(cells) != {"-"}:
                rows.append([op, bytes_, name, *cells])
    how = "replayed from a CUDA graph" if record["device"] == "cuda" else threads
    title = f"Fraction of the floor on {layout} tensors, with the time per call, median ({how}):"
    return f"{title}\n\n" + table(["op", "bytes", "backend", *sizes.values()], rows, "lrl" + "r" * len(sizes))


# --- variants of SAM ---


def _family(record: Record) -> dict[str, str]:
    e, parts = record["environment"], []
    if record.get("device") == "cuda":
        for result in record["results"]:
            parts += [f"{result['title']}:", "", _family_table(result, gpu=True), ""]
        return {"family:cuda": "\n".join([*parts, on_device(e)])}
    from bench.family import ENTRIES

    for result in record["results"]:
        threads = "one thread" if result["threads"] == 1 else threads_of(result["threads"])
        about = f"{result['title']}, {result['tensors']} tensors, {result['parameters']:,} parameters, {threads}:"
        known = [row for row in result["variants"] if row["name"] in ENTRIES]  # not what was removed since
        parts += [about, "", _family_table({"variants": known}), ""]
    v = e["versions"]
    made = f"{made_by(e)}; {e['machine']['cpu']}, torch {v['torch']}, pytorch-optimizer {v['pytorch-optimizer']}."
    return {"family:last": "\n".join([*parts, made])}


def _family_table(result: Row, gpu: bool = False) -> str:
    """Return a row per variant; on a GPU seconds in place of the bytes, the calls and the peer."""
    rows = []
    for row in result["variants"]:
        sam, peer, floor = row.get("to_sam"), row.get("peer_to_own"), median("floor_fraction")(row)
        if sam is None:
            rows.append([row["name"], f"not measured: {row['problem']}", "", ""])
        elif gpu:
            rows.append([row["name"], f"{row['seconds']['median'] * 1e6:.1f}", two(sam["median"]), two(floor)])
        else:
            cells = [*quartiles(sam), f"{row['floor_bytes']:.0f}", two(floor)]
            cells += [f"{row['kernels']:.1f}", f"{row['torch_calls']:.1f}", f"{peer['median']:.1f}" if peer else ""]
            rows.append([f"`{row['name']}`", *cells])
    if gpu:
        return table(["variant", "us a step", "SAM = 1", "of the floor"], rows)
    heads = ["variant", "time, SAM = 1", "quartiles", "bytes", "of the floor", "kernels", "calls of torch"]
    return table([*heads, "pytorch-optimizer's, ours = 1"], rows, "lrlrrrrr")


# --- federated rounds ---


def race_table(case: Row) -> str:
    """Return a race: speed relative to its first line; or the costs of algorithms next to FedAvg."""
    if "costs" in case:
        heads = ["", "seconds of a local step, FedAvg = 1", "quartiles", "of a round", "quartiles"]
        entries, cells = case["costs"], lambda f: [*quartiles(f["step"], 3), *quartiles(f["round"], 3)]
    else:
        heads = ["", "rounds per second, relative", "quartiles", "peak memory"]
        entries, cells = case["result"]["figures"], lambda f: [*quartiles(f["speed"]), f"{f['peak_mib']:.0f} MiB"]
    blank = [""] * (len(heads) - 2)
    rows = [[f["label"], *([failed(f["problem"]), *blank] if f["problem"] else cells(f))] for f in entries]
    return f"**{case['title']}**\n\n{table(heads, rows, 'l' * len(heads))}\n"


def share_line(found: Row) -> str:
    return f"The loop's own time is {found['own_share']:.1%} of a CNN round.\n"


def _gpu_rounds(part: Row) -> str:
    """Return milliseconds of a round, a table per series; and how busy rounds keep the device."""
    parts = []
    for title in dict.fromkeys(s["title"] for s in part["series"]):
        series = [s for s in part["series"] if s["title"] == title]
        names, places = (list(dict.fromkeys(s[key] for s in series)) for key in ("name", "at"))
        cells = {(s["name"], s["at"]): "–" if s["seconds"] is None else f"{1e3 * s['seconds']:.1f}" for s in series}
        rows = [[at, *(cells.get((name, at), "–") for name in names)] for at in places]
        parts.append(f"**{title}**, ms a round\n\n{table(['', *names], rows, 'l' * (1 + len(names)))}\n")
    rows = [
        [f["executor"], failed(f["problem"]), "", ""] if "problem" in f
        else [f["executor"], f"{f['busy']:.0%}", f"{f['at_once']:.1f}", f["streams"]]
        for f in part["busy"]
    ]  # fmt: skip
    if rows:
        heads = ["", "busy", "kernels at once while busy", "streams"]
        about = f"**A round of {part['busy'][0]['clients']} small CNNs under the profiler**"
        parts.append(f"{about}\n\n{table(heads, rows, 'llll')}\n")
    left_out = [f"- {job['name']}: {failed(job['problem'])}" for job in part["jobs"] if job["problem"]]
    return "\n".join([*parts, *left_out, *[""] * bool(left_out)])


def _federated(record: Record) -> dict[str, str]:
    machine = record["machine"]
    where = ", ".join(machine.get("gpus", [])) or f"{machine['cores']} cores of {machine['cpu']}"
    about = f"{where}; torch {record['versions']['torch']}; commit `{record['commit'][:12]}`; `{record['command']}`\n"
    lines = [about]
    for name, again in record.get("again", {}).items():
        lines.append(f"Part `{name}` again: commit `{again['commit'][:12]}`; `{again['command']}`\n")
    for name, part in record["parts"].items():
        lines += [share_line(part)] if name == "share" else [_gpu_rounds(part)] if name == "gpu" else map(
            race_table, part
        )  # fmt: skip
    picture = "\n![speeds of federated rounds, and how time grows](../bench/results/federated.png)\n"
    tables = "\n".join(lines)
    return {"federated:cuda": tables.strip()} if record["device"] == "cuda" else {"federated:all": tables + picture}


# --- the others ---


def _accuracy(record: Record) -> dict[str, str]:
    from bench.accuracy.report import table as tables

    return {"accuracy:last": tables(dict(record))}


def _ncu(record: Record) -> dict[str, str]:
    about = ("name", "label", "kernel", "duration", "unit")
    columns = dict.fromkeys(key for row in record["rows"] for key in row if key not in about)
    rows = []
    for row in record["rows"]:
        took = f"{row.get('duration', '')} {row.get('unit', '')}"
        rows.append([f"{row['label']} `{row['kernel'][:60]}`".strip(), took, *(row.get(name, "") for name in columns)])
    return {"ncu:cuda": f"{table(['kernel', 'duration', *columns], rows)}\n\n{on_device(record['environment'])}"}


def _gpu(merged: Record) -> dict[str, str]:
    """Return the pages' texts of the file that `python bench/gpu.py --merge` writes."""
    from bench import predictions

    found = {"gpu:predictions": predictions.tables(merged)}
    for name in ("kernels", "federated", "family", "ncu"):
        part = next((part for part in merged.get("parts", ()) if part["name"] == name), None)
        text = UNMEASURED if part is None else f"Not measured: {part['reason'] or part['result']}."
        found[f"gpu:{name}"] = markdown(merged[name]) if name in merged else text
    return found


SECTIONS: dict[str, Callable[[Record], dict[str, str]]] = {
    STEP: _step, KERNELS: _kernels, FAMILY: _family, FEDERATED: _federated, ACCURACY: _accuracy, NCU: _ncu, GPU: _gpu
}  # fmt: skip


def sections(record: Record) -> dict[str, str]:
    """Return pieces of Markdown by the names of their places in pages, `NAME:SECTION`."""
    return SECTIONS[record["kind"]](record)


def markdown(record: Record) -> str:
    """Return all tables of a record."""
    found = sections(record)
    return next((text for name, text in found.items() if name.endswith(":all")), "\n\n".join(found.values()))


# --- pages ---

_PLACE = re.compile(r"(<!-- (\w+):(\S+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def fill(text: str, pieces: Mapping[str, str]) -> str:
    """Return a page with the text in its places replaced by the pieces of that name; other places stay."""

    def piece(found: re.Match[str]) -> str:
        new = pieces.get(f"{found[2]}:{found[3]}")
        return found[0] if new is None else f"{found[1]}{new}\n{found[4]}"

    return _PLACE.sub(piece, text)


def places(text: str) -> list[str]:
    """Return the names of a page's places."""
    return [f"{found[2]}:{found[3]}" for found in _PLACE.finditer(text)]


def pages() -> dict[Path, str]:
    """Return every page as bench/results would have it."""
    gpu = RESULTS / "gpu.json"
    pieces = sections(read(gpu) if gpu.exists() else {"kind": GPU})
    for path in RESULTS.glob("*.json"):
        if json.loads(path.read_text()).get("kind", FEDERATED) in SECTIONS and path != gpu:
            pieces |= sections(read(path))
    texts = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    return {path: fill(text, pieces) for path, text in texts.items() if places(text)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("results", type=Path, nargs="*", help="results files of any benchmark")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the plots there")
    parser.add_argument("--publish", action="store_true", help="store the files in bench/results and write the pages")
    arguments = parser.parse_args(argv)
    try:
        records = [read(path) for path in arguments.results]
        for record in records:
            print(markdown(record))
            if arguments.publish:
                (RESULTS / file_name(record)).write_text(json.dumps(record, indent=1) + "\n")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for folder in filter(None, (arguments.plot, RESULTS if arguments.publish else None)):
        from bench import plots

        for record in records:
            plots.draw(record, folder)
    if arguments.publish:
        for path, text in pages().items():
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
