"""The table of backends: the kernels and dtypes of each, the reason why one is unavailable, the choice of `auto`."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from fastsam_kernels.constants import FLOATS


class Kernels(Protocol):
    """The functions of every backend module, with the arguments and the meaning of `fastsam_kernels.reference`."""

    norm_: Callable[..., None]
    perturb_: Callable[..., None]
    restore_: Callable[..., None]
    dual_norm_: Callable[..., None]
    dual_perturb_: Callable[..., None]
    inner_: Callable[..., None]
    accumulate_: Callable[..., None]
    update_norm_: Callable[..., None]
    update_: Callable[..., None]


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels on one type of device."""

    name: str
    device: str  # torch device type
    module: str  # below fastsam_kernels, imported at first use
    why_not: Callable[[], str | None]  # the reason why it cannot serve, None when it can
    dtypes: tuple[torch.dtype, ...] = FLOATS

    @property
    def reason(self) -> str | None:
        """Why it is unavailable on this machine; None when it serves."""
        return self.why_not()

    @property
    def available(self) -> bool:
        return self.reason is None

    def load(self) -> Kernels:
        """Import the backend's kernels and return them."""
        return cast(Kernels, importlib.import_module(f"fastsam_kernels.{self.module}"))


def _reason_from(module: str, device: str) -> Callable[[], str | None]:
    """Return a function that imports a backend's module and asks it why it cannot serve on this device type."""

    def why_not() -> str | None:
        return importlib.import_module(f"fastsam_kernels.{module}").why_not(device)

    return why_not


def _no_reason() -> str | None:
    return None


def _cuda() -> str | None:
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


# In the order in which `auto` takes them. It comes to neither the reference, which is the specification, nor Triton on
# the CPU, which is its interpreter and thousands of times slower. The backends before them serve always.
BACKENDS: tuple[Backend, ...] = (
    Backend("native", "cuda", "native", _reason_from("native", "cuda")),
    Backend("triton", "cuda", "triton_backend", _reason_from("triton_backend", "cuda")),
    Backend("foreach", "cuda", "foreach", _cuda),
    Backend("reference", "cuda", "reference", _cuda),
    Backend("native", "cpu", "native", _reason_from("native", "cpu")),
    Backend("foreach", "cpu", "foreach", _no_reason),
    Backend("reference", "cpu", "reference", _no_reason),
    Backend("triton", "cpu", "triton_backend", _reason_from("triton_backend", "cpu")),
)
NAMES = ("auto", "native", "triton", "foreach", "reference")


def table() -> tuple[Backend, ...]:
    """Return all backends, in the order in which `auto` considers them per device."""
    return BACKENDS


def backend(device: torch.device | str | None = None) -> str:
    """Return the name of the backend that `auto` takes on `device` (default: CUDA, or the CPU without CUDA).

    It does not warn of missing kernels, because nothing is computed with the backend.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _find("auto", torch.device(device), torch.float32)[0].name


def libraries() -> tuple[str, str | None]:
    """Return how the compiled libraries were built, or why there are none, and the CUDA version that the driver serves
    (None without a driver)."""
    build, loaded = (importlib.import_module(f"fastsam_kernels.{name}") for name in ("build", "libraries"))
    return build.installed().message, loaded.driver_cuda()


def select(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend `name` for tensors of `dtype` on `device`; "auto" is the first of the table that serves them.

    Raises ValueError for an unknown name or a dtype that no backend serves, and RuntimeError (with the reason) if a
    backend that was requested by name cannot serve. Warns once per process if "auto" finds no faster backend than
    foreach.
    """
    result, reasons = _find(name, device, dtype)
    if name == "auto" and result.name == "foreach":
        _note_missing_kernels(reasons)
    return result


def _find(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, list[str]]:
    """Return a backend as `select` does, and the reasons why the backends before it cannot serve."""
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    if dtype not in FLOATS:
        raise ValueError(
            f"parameters must be float32, float64, float16 or bfloat16, got {dtype}; convert the model with "
            f".to(torch.float32)"
        )
    candidates = [b for b in BACKENDS if b.device == device.type and name in ("auto", b.name)]
    reasons: list[str] = []
    for candidate in candidates:
        reason = candidate.reason if dtype in candidate.dtypes else f"it does not serve {dtype}"
        if reason is None:
            return candidate, reasons
        reasons.append(f"{candidate.name}: {reason}")
    if not candidates:
        reasons.append(
            f"{'no backend serves' if name == 'auto' else name + ' does not serve'} the device {device.type!r}"
        )
    raise RuntimeError(
        f"backend {name!r} cannot serve {dtype} on {device}: {'; '.join(reasons)}. `fastsam info` shows what is "
        f"available"
    )


_has_warned = False
_NOT_THE_USERS = ("fastsam", "fastsam_kernels", "torch")  # packages whose lines a warning does not name


def _note_missing_kernels(reasons: list[str]) -> None:
    """Log once per process that a faster backend is missing, with the command that installs it."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        hint = importlib.import_module("fastsam_kernels.native").build_hint()
        obstacle = importlib.import_module("fastsam_kernels.build").why_not()  # the hint has it already
        details = "; ".join(reason for reason in reasons if not obstacle or obstacle not in reason)
        note = (
            f"fastsam runs without its compiled kernels, on torch's multi-tensor functions"
            f"{f' ({details})' * bool(details)}. {hint}"
        )
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
            frame, level = frame.f_back, level + 1
        warnings.warn(note, stacklevel=level)
