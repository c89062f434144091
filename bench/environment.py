"""The facts of a measurement: machine, versions, commit, command. `python -m bench.environment` prints them as JSON."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bench import ROOT
from fastsam import backends
from fastsam.extras import installed_version
from fastsam_kernels.toolchain import find_nvcc

PACKAGES = ("torch", "triton", "numpy", "fused-sam", "pytorch-optimizer")


def facts(command: str) -> dict[str, Any]:
    """Return all facts, ready for JSON. `command` reproduces the measurement from the repository's root."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions = {
        "python": platform.python_version(),
        **{package: installed_version(package) or "not installed" for package in PACKAGES},
    }
    available = {f"{b.name}/{b.device}": b.reason or "available" for b in backends.table()}
    result = {"command": command, "date": date, "commit": commit(), "machine": machine(), "versions": versions}
    return result | {"backends": available}


def machine() -> dict[str, Any]:
    """Return processor, caches of its first core and memory; GPUs and nvcc if torch sees a GPU."""
    cpu = re.search(r"^model name\s*: (.*)", _read("/proc/cpuinfo"), re.M)
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if kind != "Instruction" and size:
            caches[f"L{level}"] = size
    result: dict[str, Any] = {
        "system": platform.platform(), "cpu": cpu[1] if cpu else platform.processor() or "unknown",
        "cores": os.cpu_count(), "caches": caches,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }  # fmt: skip
    if torch.cuda.is_available():
        result["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        result["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        result["nvcc"] = find_nvcc()
        fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,utilization.gpu,memory.used"
        result["nvidia-smi"] = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    return result


def commit() -> str:
    """Return the commit of the working tree, with "+changes" if tracked files differ from it; or FASTSAM_COMMIT if it
    is set, because the sources came without their history. "unknown" outside git."""
    if name := os.environ.get("FASTSAM_COMMIT"):
        return name
    head = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{head}+changes" if head and changes else head or "unknown"


def command_line(module: str) -> str:
    """Return how this process was started, as one would type it. An absolute path keeps only its last name."""
    arguments = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])


def _output(*arguments: str) -> str:
    """Return what a command prints; empty if it cannot be run or fails."""
    try:
        return subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.exists() else ""


if __name__ == "__main__":
    print(json.dumps(facts(command_line("bench.environment"))))
