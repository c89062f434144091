"""The results of the calls of `bench/gpu.py`: a page and JSON per call, and one file of all. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report, tables

# The benchmarks' files, each with its key in the merged file.
FILES = {
    "kernels-cuda.json": "kernels",
    "kernels-cpu.json": "kernels-cpu",
    "federated-cuda.json": "federated",
    "family-cuda.json": "family",
    "ncu.json": "ncu",
}
# The fields that tell entries of a list apart.
KEYS = ("name", "title", "size", "at", "executor", "kernel")


@dataclass
class Outcome:
    """The outcome of a part."""

    name: str
    title: str
    state: str
    seconds: float = 0.0
    reason: str = ""  # why it was left out, or how it failed
    result: str = ""  # the last line of its output
    command: str = ""


def summary(environment: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """Return the page that is printed last."""
    shown = ("gpu", "torch", "cuda", "triton", "nvcc", "python", "nvidia-smi", "commit", "date")
    lines = ["# fastsam on a GPU", "", *(f"- {name}: {environment.get(name)}" for name in shown), ""]
    notes = ["; ".join(text for text in (o.reason, o.result) if text).replace("|", "\\|")[:160] for o in outcomes]
    rows = [[o.title, o.state, f"{o.seconds:.0f}", note] for o, note in zip(outcomes, notes, strict=True)]
    return "\n".join([*lines, tables.table(["part", "", "s", ""], rows, "llll")]) + "\n"


def write(out: Path, environment: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """Write summary.md and gpu.json, after every part, and return the page. The kernels' tables are in the file only,
    because they are too long to be printed."""
    page = summary(environment, outcomes)
    texts = [report.markdown(report.read(path)) for path in sorted(out.glob("kernels-*.json"))]
    (out / "summary.md").write_text(page + "".join(f"\n{text}\n" for text in texts))
    found = {"kind": tables.GPU, "environment": environment, "parts": [asdict(o) for o in outcomes]}
    (out / "gpu.json").write_text(json.dumps(found, indent=1))
    return page


def merge(folders: Sequence[Path], file: Path) -> None:
    """Write one file with the results of several calls; a later result replaces an earlier one of the same name.

    Raises ValueError if the calls were not made on one commit and one kind of GPU.
    """
    merged: dict[str, Any] = {}
    for folder in folders:
        call = json.loads((folder / "gpu.json").read_text())
        here, there = (
            {name: c.get("environment", {}).get(name) for name in ("commit", "gpu")} for c in (call, merged or call)
        )
        if here != there:
            raise ValueError(f"{folder} is of {here}, and the folders before it of {there}. Merge them apart.")
        for name, key in FILES.items():
            if (folder / name).exists():
                call[key] = json.loads((folder / name).read_text())
        merged = join(merged, call)
    file.write_text(json.dumps(merged, indent=1) + "\n")
    print(f"{file}: {', '.join(part['name'] for part in merged['parts'])}")


def join(old: Any, new: Any) -> Any:
    """Return `old` with the additions and replacements of `new`: dictionaries by key, lists of named entries by name.

    An entry that failed (`problem`, a gate that is not green) or was left out does not replace a result, and a result
    replaces it.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        failed, fails = (
            bool(e.get("problem")) or e.get("gate", "green") != "green" or e.get("state") == "left out"
            for e in (old, new)
        )
        if failed or fails:
            return old if fails and not failed else new
        joined = old | {key: join(old[key], value) if key in old else value for key, value in new.items()}
        if "command" in joined and old.get("command", new["command"]) != new["command"] and "commit" in joined:
            joined["command"] = f"{old['command']} && {new['command']}"  # both made the results
        return joined
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(entry, dict) for entry in old + new):
        entries: dict[tuple[Any, ...], Any] = {}
        for entry in [*old, *new]:
            name = tuple(entry.get(key) for key in KEYS)
            entries[name] = join(entries[name], entry) if name in entries else entry
        return list(entries.values())
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(entry, str) for entry in old + new):
        return list(dict.fromkeys(old + new))
    return new
