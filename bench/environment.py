"""The facts of a measurement: machine, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fastsam import backends

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "numpy", "fused-sam", "pytorch-optimizer")


def facts(command: str) -> dict[str, Any]:
    """Return all of it, ready for JSON. `command` reproduces the measurement from the repository's root."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}},
        "backends": {f"{b.name}/{b.device}": b.reason or "available" for b in backends.table()},
    }


def machine() -> dict[str, Any]:
    """Return processor, caches of its first core and memory; GPUs where torch sees any."""
    cpu = re.search(r"^model name\s*: (.*)", _read("/proc/cpuinfo"), re.M)
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if kind != "Instruction" and size:
            caches[f"L{level}"] = size
    found: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": cpu[1] if cpu else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "caches": caches,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def commit() -> str:
    """Return the commit of the working tree, with "+changes" if tracked files differ from it; or FASTSAM_COMMIT if it
    is set, because the sources came without their history. "unknown" outside git."""
    if named := os.environ.get("FASTSAM_COMMIT"):
        return named
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def command_line(module: str) -> str:
    """Return how this process was started, as one would type it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON, so that a run that is stopped leaves the last complete file."""
    part = path.with_name(f"part-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.exists() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
