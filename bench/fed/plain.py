"""fastsam.fed.run as in a plain install, without the compiled kernels."""

from collections.abc import Callable

from torch import nn

from bench.fed import ours
from bench.fed.workload import Workload
from fastsam import backends
from fastsam_kernels import build


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """Train with `fed.run` and return the model. `option` is the name of the executor."""
    hide_kernels()
    return ours.train(workload, rounds, tick, option)


def hide_kernels() -> None:
    """Hide the compiled libraries from the process. `backend="foreach"` would leave the compiled sum of the uploads."""
    build.installed = lambda folder="": build.BuildResult({}, "a plain install")  # type: ignore[assignment]
    if (name := backends.backend("cpu")) != "foreach":
        raise RuntimeError(f"expected the backend 'foreach', got {name!r}. The kernels were loaded before")
