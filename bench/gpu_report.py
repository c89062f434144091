"""What a run of `bench/gpu.py` leaves: a page to read, and JSON. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import kernel_report
from bench.variants import report as variants


@dataclass
class Outcome:
    """How a part went."""

    name: str
    title: str
    state: str
    seconds: float = 0.0
    reason: str = ""  # why it was left out, or how it failed
    result: str = ""  # its own last word
    command: str = ""


def summary(environment: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """The page that is printed last."""
    shown = ("gpu", "torch", "cuda", "triton", "nvcc", "python", "nvidia-smi", "commit", "date")
    lines = ["# fastsam on a GPU", "", *(f"- {name}: {environment.get(name)}" for name in shown), ""]
    lines += ["| part | | s | |", "|---|---|---|---|"]
    for o in outcomes:
        note = "; ".join(text for text in (o.reason, o.result) if text).replace("|", "\\|")
        lines.append(f"| {o.title} | {o.state} | {o.seconds:.0f} | {note[:160]} |")
    return "\n".join(lines) + "\n"


def tables(out: Path) -> str:
    """What the benchmarks of kernels and variants measured, for the page in the folder; it is too long to be
    printed."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("kernels-*.json"))]
    texts = [text for record in found for text in kernel_report.sections(record).values()]
    texts += [variants.table(json.loads(path.read_text())) for path in out.glob(variants.FILE)]
    return "".join(f"\n{text}\n" for text in texts)


def write(out: Path, environment: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """After every part, so that a run that is cut short leaves what it has."""
    page = summary(environment, outcomes)
    (out / "summary.md").write_text(page + tables(out))
    found = {"environment": environment, "parts": [asdict(o) for o in outcomes]}
    (out / "gpu.json").write_text(json.dumps(found, indent=1))
    return page
