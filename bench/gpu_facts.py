"""What `bench/gpu.py` runs on: machine, versions, commit. Standard library only, and torch in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ask(*argv: str) -> str:
    """The output of a command; empty when it cannot be run or fails, or takes longer than the first import of torch on
    a machine that has just been started."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


FACTS = """
import json, torch, importlib.metadata as metadata
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None, "capability": None}
if torch.cuda.is_available():
    found["gpu"] = torch.cuda.get_device_name()
    found["capability"] = "%d.%d" % torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties(0)
    found["multiprocessors"] = properties.multi_processor_count
    found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    found["l2_mib"] = properties.L2_cache_size >> 20
try:
    found["triton"] = metadata.version("triton")
except metadata.PackageNotFoundError:
    found["triton"] = None
print(json.dumps(found))
"""


def facts() -> dict[str, object]:
    """Machine, versions and commit."""
    # here: where the tests are run from a copy, the folder has its installed name
    from kernels.toolchain import find_nvcc

    nvcc = find_nvcc()
    release = re.search(r"release ([\d.]+)", ask(nvcc, "--version")) if nvcc else None
    fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,utilization.gpu,memory.used"
    found: dict[str, object] = {
        "commit": os.environ.get("FASTSAM_COMMIT")  # where the sources came without their history
        or ask("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40")
        or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "nvcc": release[1] if release else None,
        "nvidia-smi": ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader") or None,
    }
    asked = ask(sys.executable, "-c", FACTS)
    return found | (json.loads(asked) if asked else {"torch": None, "gpu": None, "capability": None})
