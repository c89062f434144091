"""Nsight Compute on norm, perturbation, update and row program: `python -m bench.ncu --out DIR`, a part of `make gpu`.

Starts ncu on itself (`--target`), with the clocks as they are, and writes ncu.json: duration, DRAM throughput,
occupancy and reasons of stalls per kernel and size. If ncu is absent or not permitted, the command ends with the code
of a part that is left out.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import environment
from bench.gpu import ABSENT
from bench.tables import NCU

FILE = "ncu.json"
SIZES = ("50k", "resnet18", "100m")
OPS = ("norm", "perturb", "update")
LABELS = [f"{op} {size}" for size in SIZES for op in OPS]  # one launch each, in this order; then the row program's
STALLS = ("long_scoreboard", "short_scoreboard", "lg_throttle", "barrier", "wait", "math_pipe_throttle", "membar")
METRICS = {
    "gpu__time_duration.sum": "duration",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy, %",
    **{f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": name for name in STALLS},
}


def target() -> None:
    """Run what is profiled: the kernels once per size, and one round of a row program."""
    import torch

    from bench.kernel_cases import KERNEL_SIZES, KernelCase
    from bench.kernel_cases import OPS as ALL
    from bench.kernel_data import Operator
    from fastsam import fed
    from fastsam_kernels import native

    for name in SIZES:
        for op in OPS:
            operator = Operator(KernelCase(ALL[op], KERNEL_SIZES[name], "scattered"), torch.device("cuda"), 0)
            torch.cuda.synchronize()
            ALL[op].call(native, operator.sets[0])
            torch.cuda.synchronize()
    clients = [(torch.randn(64, 64), torch.randint(10, (64,))) for _ in range(100)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    options = {"rounds": 1, "batch_size": 16, "participation": 1.0, "executor": "vmap", "device": "cuda"}
    fed.run(model, clients, fed.FedSAM(), **options)
    torch.cuda.synchronize()


def rows_of(output: str) -> list[dict[str, Any]]:
    """Return a row per profiled kernel of ncu's CSV: its label by the order of launches, its name and its metrics."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows: dict[str, dict[str, Any]] = {}
    for entry in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        label = LABELS[len(rows)] if len(rows) < len(LABELS) else ""
        row = rows.setdefault(entry["ID"], {"name": f"{len(rows)}", "label": label, "kernel": entry["Kernel Name"]})
        row[METRICS.get(entry["Metric Name"], entry["Metric Name"])] = entry["Metric Value"]
        if entry["Metric Name"] == "gpu__time_duration.sum":
            row["unit"] = entry["Metric Unit"]
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ncu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help=f"folder for {FILE}")
    parser.add_argument("--target", action="store_true", help="run what is profiled")
    arguments = parser.parse_args(argv)
    if arguments.target:
        target()
        return 0
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        print("Nsight Compute (ncu) is not installed")
        return ABSENT
    names = ["--kernel-name-base", "demangled", "--kernel-name", "regex:fastsam"]
    options = ["--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), *names]
    command = [ncu, *options, sys.executable, "-m", "bench.ncu", "--target"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        print("the driver does not permit this user to read performance counters (ERR_NVGPUCTRPERM)")
        return ABSENT
    rows = rows_of(done.stdout)
    if done.returncode or not rows:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
        return 1
    facts = environment.facts(environment.command_line("bench.ncu"))
    record = {"kind": NCU, "environment": facts, "rows": rows}
    environment.write(record, arguments.out / FILE)
    print(f"{len(rows)} kernels measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
