"""The setting in which the same run gives the same bits: one intra-op thread, deterministic algorithms. The user's
setting is restored afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastsam.fed.sums import ranks


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use one intra-op thread (one and two differ in the last bit), and on CUDA also deterministic algorithms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if device.type == "cuda":
            with _deterministic_cuda():
                yield
        else:
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def restore_autograd() -> Iterator[None]:
    """Restore autograd at the end: Ctrl-C between the lines of `torch.no_grad` leaves it switched off."""
    is_enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(is_enabled)


@contextmanager
def _deterministic_cuda() -> Iterator[None]:
    # cuBLAS reads it when torch first uses it; torch refuses without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    old_mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(old_mode[0], warn_only=old_mode[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


def pick_device(device: torch.device | str | None, default: torch.device) -> torch.device:
    """Return the device of the run, with its index. Raises ValueError if it is unknown or does not exist."""
    try:
        chosen_device = default if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error
    if chosen_device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {str(chosen_device)!r}")
    if chosen_device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = chosen_device.index
    if index is None and ranks.launched_processes() > 1:  # several ranks on a machine have different devices
        index = ranks.local_device().index
    elif index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise ValueError(
            f"device {str(chosen_device)!r} is not there: torch sees {count} CUDA devices; use device='cpu'"
        )
    return torch.device("cuda", index)


_lock = threading.Lock()  # guards the table
trials = threading.Lock()  # trial passes seed and read the default generators: one at a time
_runs: dict[int, tuple[int, bool]] = {}  # by identity of a run: its thread, and whether it draws random numbers


@contextmanager
def register_run() -> Iterator[Registration]:
    """Register a run of this thread until the end. Raises ValueError if another thread has a run that draws."""
    registration = Registration()
    registration.update(False)
    try:
        yield registration
    finally:
        with _lock:
            del _runs[id(registration)]


class Registration:
    """A run's place in the table of the process."""

    def update(self, draws: bool) -> None:
        """Record whether the run draws random numbers. Raises ValueError if runs of two threads are active and one
        draws."""
        thread = threading.get_ident()
        with _lock:
            conflicts = [entry for run_id, entry in _runs.items() if run_id != id(self) and entry[0] != thread]
            if conflicts and (draws or any(other_draws for _, other_draws in conflicts)):
                raise ValueError(
                    "another fed.run is active in a thread of this process, and one of the two draws random numbers "
                    "(dropout?) from torch's default generator, which both share. Run them one after the other, or in "
                    "processes"
                )
            _runs[id(self)] = thread, draws
