"""The Triton backend: the functions of `reference`, on GPUs, and on the CPU in Triton's interpreter (for tests: it is
slow).

This module is imported only if the backend is selected, because importing Triton takes a while.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

try:
    from .triton_common import INTERPRETED
    from .triton_direct import direct_calls
    from .triton_dual import dual_norm_, dual_perturb_
    from .triton_norm import norm_
    from .triton_perturb import perturb_, restore_
    from .triton_reductions import accumulate_, inner_
    from .triton_update import update_, update_norm_
except ImportError as error:
    _import_error: str | None = f"Triton cannot be imported ({error}); `pip install triton` installs it"
    INTERPRETED = False
else:
    _import_error = None

__all__ = [
    "accumulate_",
    "direct_calls",
    "dual_norm_",
    "dual_perturb_",
    "inner_",
    "norm_",
    "perturb_",
    "restore_",
    "update_",
    "update_norm_",
    "why_not",
]


def why_not(device: str) -> str | None:
    """Return the reason why Triton cannot serve on this device type, or None."""
    if _import_error is not None:
        return _import_error
    if device == "cpu":
        hint = "on the CPU Triton runs only in its interpreter; set TRITON_INTERPRET=1 before Python starts"
        return None if INTERPRETED else hint
    if device != "cuda":
        return f"there are no Triton kernels for the device {device!r}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    # The interpreter reads addresses in the process, and addresses of a GPU are not valid there.
    return "TRITON_INTERPRET=1 is set, which serves the CPU only; unset it" if INTERPRETED else _no_launcher()


def _no_launcher() -> str | None:
    """Return the reason why Triton cannot compile its launcher code, which it does at first use, or None."""
    if not any((os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))):
        return "Triton needs a C compiler at first use and finds none; install gcc or clang, or set CC"
    headers = Path(sysconfig.get_config_var("INCLUDEPY"))
    if not (headers / "Python.h").exists():
        return f"Triton needs Python's C headers at first use, and {headers} has no Python.h; install python3-dev"
    return None
