"""What a measurement was made on and with: machine, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
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
PACKAGES = ("torch", "triton", "numpy", "fastsam", "pytorch-optimizer")


def facts(command: str) -> dict[str, Any]:
    """All of it, ready for JSON. `command` reproduces the measurement from the repository's root."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "backends": {f"{b.name}/{b.device}": b.reason or "available" for b in backends.table()},
    }


def machine() -> dict[str, Any]:
    """Processor, caches, memory, load; GPUs where torch sees any."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "transparent_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def versions() -> dict[str, str]:
    """Python, the packages and torch's build."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit of the working tree, with "+changes" when tracked files differ from it; what FASTSAM_COMMIT says,
    where it is set.

    "unknown" outside git.
    """
    if named := os.environ.get("FASTSAM_COMMIT"):  # by who copied the sources out of their tree
        return named
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def command_line(module: str) -> str:
    """How this process was started, as one would type it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def made_by(facts: Mapping[str, Any]) -> str:
    """Return the line below a table: command, date, commit and device."""
    device = ", ".join(facts["machine"].get("gpus", [])[:1]) or facts["machine"]["cpu"]
    return f"Made by `{facts['command']}` on {facts['date'][:10]}, commit `{facts['commit'][:12]}`; {device}."


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON, so that a run that is stopped leaves the last complete file."""
    part = path.with_name(f"part-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _read(path: str) -> str | None:
    file = Path(path)
    return file.read_text().strip() if file.exists() else None


def _cpu_model() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _caches() -> dict[str, str]:
    """Size per level as the kernel reports it, for the first core."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if kind != "Instruction" and size:
            found[f"L{level}"] = size
    return found
