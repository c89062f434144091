"""Steps of the variants of SAM on a GPU: `python -m bench.family_gpu --seconds N --out DIR`, a part of `make gpu`.

A step is timed by events around both passes, so the host's time counts where it is longer. A variant has a figure only
if its steps agree with the steps of the CPU on the client CNN. Writes family-cuda.json after each size.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import environment, kernels
from bench.clocks import Machine
from bench.family import ENTRIES, STEPS, Drive, Entry, Ours
from bench.kernel_cases import KERNEL_SIZES, KernelSize
from bench.problem import Gradients, initial_weights
from bench.timing import Clock, Summary

FILE = "family-cuda.json"
SIZES = ("50k", "resnet18", "100m")
ROUNDS = 11


def drive_of(entry: Entry, size: KernelSize, device: torch.device) -> Drive:
    gradients = Gradients(size.shapes, device=device)
    return Drive(Ours(initial_weights(size.shapes, device=device), entry), gradients, Clock())


def wrong(entry: Entry, device: torch.device) -> str:
    """Return how three steps on the device differ from three on the CPU; empty if they agree."""
    found: list[list[Tensor]] = []
    try:
        for where in (torch.device("cpu"), device):
            drive = drive_of(entry, KERNEL_SIZES["50k"], where)
            for _ in range(3):
                drive.step()
            found.append([weight.cpu() for weight in drive.stepper.weights()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    furthest = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    return "" if furthest < 1e-5 else f"weights differ from the CPU's by {furthest:.1e} after three steps"


def measure(machine: Machine, size: KernelSize, problems: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Return seconds of a step per variant, and the ratio to SAM and to the variant's own bytes."""
    samples: dict[str, Callable[[], float]] = {}
    problems = dict(problems)
    gradients = Gradients(size.shapes, device=machine.device)
    for name, entry in ENTRIES.items():
        if problems[name]:
            continue
        try:
            drive = Drive(Ours(initial_weights(size.shapes, device=machine.device), entry), gradients, Clock())
            for _ in range(STEPS):
                drive.step()
            machine.wait()
        except Exception as error:  # such as too little memory: it costs this variant's row
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        samples[name] = lambda drive=drive: machine.sample(lambda: [drive.step() for _ in range(STEPS)]) / STEPS
    copies, taken = kernels.rounds_of(machine, samples, rounds)
    rows = []
    for name, entry in ENTRIES.items():
        row: dict[str, Any] = {"name": name, "problem": problems[name], "floor_bytes": entry.floor}
        if name in taken:
            row |= kernels.figures(taken[name], copies, round(entry.floor * size.parameters))
            row["to_sam"] = asdict(Summary.of_ratios(taken[name], taken.get("SAM", taken[name])))
        rows.append(row)
    return {"name": size.name, "title": size.title, "rows": rows}


def page(record: Mapping[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = []
    for result in record["results"]:
        lines += [f"{result['title']}:", "", "| variant | us a step | SAM = 1 | of the floor |", "|---|---:|---:|---:|"]
        for row in result["rows"]:
            cells = "not measured: " + row["problem"] + " | |"
            if "seconds" in row:
                ratios = (row["to_sam"]["median"], row["fraction"]["median"])
                cells = f"{row['seconds']['median'] * 1e6:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
            lines.append(f"| {row['name']} | {cells} |")
        lines.append("")
    return "\n".join([*lines, environment.made_by(record["environment"])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.family_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {FILE}")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no size after so many")
    arguments = parser.parse_args(argv)
    end, machine = time.monotonic() + arguments.seconds, Machine(torch.device("cuda"))
    facts = environment.facts(environment.command_line("bench.family_gpu"))
    record: dict[str, Any] = {"environment": facts, "results": []}
    problems = {name: wrong(entry, machine.device) for name, entry in ENTRIES.items()}
    for name in SIZES:
        if time.monotonic() > end:
            print(f"no time left for {name}")
            continue
        record["results"].append(measure(machine, KERNEL_SIZES[name], problems, ROUNDS))
        environment.write(record, arguments.out / FILE)
    print(page(record))
    for name, problem in problems.items():
        if problem:
            print(f"{name} is not measured: {problem}")
    return int(any(problems.values()) or not record["results"])


if __name__ == "__main__":
    sys.exit(main())
