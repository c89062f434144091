"""Nsight Compute on norm, perturbation, update and row program: duration, DRAM throughput, occupancy and stalls.

Starts ncu on this module, which runs what is profiled, with the clocks as they are. If ncu is absent or not permitted,
the measurement is left out.
"""

import csv
import io
import shutil
import subprocess
import sys
from typing import Any

import torch

from bench.kernel_cases import OPS, KernelCase
from bench.kernel_data import Operator
from bench.workload import KERNEL_SIZES

SIZES = ("50k", "resnet18", "100m")
NAMES = ("norm", "perturb", "update")
LABELS = [f"{op} {size}" for size in SIZES for op in NAMES]  # one launch each, in this order; then the row program's
STALLS = ("long_scoreboard", "short_scoreboard", "lg_throttle", "barrier", "wait", "math_pipe_throttle", "membar")
DURATION = "gpu__time_duration.sum"
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy, %",
    **{f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": name for name in STALLS},
}


class Absent(Exception):
    """Nothing can be measured here; the message says why."""


def measure() -> list[dict[str, Any]]:
    """Return a row per profiled kernel. Raises Absent without a usable ncu, RuntimeError if it fails."""
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        raise Absent("Nsight Compute (ncu) is not installed")
    names = ["--kernel-name-base", "demangled", "--kernel-name", "regex:fastsam"]
    options = ["--clock-control", "none", "--csv", "--metrics", ",".join((DURATION, *METRICS)), *names]
    command = [ncu, *options, sys.executable, "-m", "bench.ncu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ERR_NVGPUCTRPERM" in result.stdout + result.stderr:
        raise Absent("the driver does not permit this user to read performance counters (ERR_NVGPUCTRPERM)")
    rows = rows_of(result.stdout)
    if result.returncode or not rows:
        raise RuntimeError(f"ncu ended with code {result.returncode}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return rows


def rows_of(output: str) -> list[dict[str, Any]]:
    """Return a row per profiled kernel of ncu's CSV: its label by the order of launches, its name and its metrics."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows: dict[str, dict[str, Any]] = {}
    for entry in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        label = LABELS[len(rows)] if len(rows) < len(LABELS) else ""
        title = f"{label} `{entry['Kernel Name'][:60]}`".strip()
        row = rows.setdefault(entry["ID"], {"name": f"{len(rows)}", "title": title, "metrics": {}})
        if entry["Metric Name"] == DURATION:
            row["duration"] = f"{entry['Metric Value']} {entry['Metric Unit']}"
        else:
            row["metrics"][METRICS.get(entry["Metric Name"], entry["Metric Name"])] = entry["Metric Value"]
    return list(rows.values())


def main() -> None:
    """Run what is profiled: the kernels once per size, and one round of a row program."""
    from fastsam import fed
    from fastsam_kernels import native

    if (reason := native.why_not("cuda")) is not None:  # the library is loaded here
        raise RuntimeError(f"the compiled kernels for CUDA cannot be profiled: {reason}")
    for name in SIZES:
        for op in NAMES:
            operator = Operator(KernelCase(OPS[op], KERNEL_SIZES[name], "scattered"), torch.device("cuda"), 0)
            torch.cuda.synchronize()
            OPS[op].call(native, operator.sets[0])
            torch.cuda.synchronize()
    clients = [(torch.randn(64, 64), torch.randint(10, (64,))) for _ in range(100)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    fed.run(model, clients, fed.FedSAM(), rounds=1, batch_size=16, participation=1.0, executor="vmap", device="cuda")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
