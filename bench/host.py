"""The host's time for the optimizer part of a step on CUDA, measured without a GPU: `python -m bench.host`.

The host's side of the CUDA library, compiled as plain C++ (tests/helpers/emulation), with launches that copy their
argument and run nothing: all but what a driver takes for its three launches. As ops of torch, and by the direct way
that `FusedSAM` takes (`fastsam_kernels.raw_calls`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.contenders import SGD_OPTIONS, OptimizerStepper
from bench.kernel_cases import KERNEL_SIZES
from bench.problem import RHO, Gradients, Size, initial_weights
from bench.tables import table
from bench.timing import Machine, Summary, interleave
from bench.whole_steps import Fleet
from fastsam import FusedSAM, backends
from fastsam_kernels.raw_calls import CudaCalls
from tests.helpers import emulated

SIZES = ("50k", "resnet18", "cut1000")
ROUNDS = 7

_WATCHED = SimpleNamespace(watched=lambda: True)  # a watched call is never replaced by the direct way
WAYS: dict[str, Callable[..., Any]] = {
    "ops": lambda *operands: _WATCHED,
    "direct": lambda params, backup, table, hparams, apart=None: CudaCalls(params, backup, table, hparams),
}


def main() -> None:
    torch.set_num_threads(1)
    build = Path("build/host").resolve()
    library = emulated.compile_library(build, emulated.ONLY_FLOAT, namespace="fastsam_host", fast=True)
    emulation = emulated.Emulation(library, "fastsam_host")
    ctypes.CDLL(str(library)).emulation_idle(1)
    rows = []
    with emulated.direct(library):
        for size in (KERNEL_SIZES[name] for name in SIZES):
            fleets = {way: _fleet(size, emulation, way) for way in WAYS}
            for changed, where in ((False, "where they were"), (True, "elsewhere every time")):
                samples = {way: partial(fleet.host_seconds, changed) for way, fleet in fleets.items()}
                taken = interleave(samples, ROUNDS, warm=False).seconds
                cells = [f"{Summary.of(seconds).median * 1e6:.1f}" for seconds in taken.values()]
                rows.append([size.title, len(size.shapes), where, *cells])
    print(table(["size", "tensors", "gradients", "ops, us", "direct, us"], rows, "lrlrr"))


def _fleet(size: Size, emulation: emulated.Emulation, way: str) -> Fleet:
    """Return a stepper of one size, made by the backend whose kernels stand in for CUDA's, after two steps."""
    kernels: Any = emulation.backend.load()
    kernels.raw_calls = WAYS[way]
    before = backends.BACKENDS
    backends.BACKENDS = (cast(backends.Backend, emulation.backend),)
    try:
        make: Callable[..., FusedSAM] = lambda p: FusedSAM(p, torch.optim.SGD, rho=RHO, **SGD_OPTIONS)  # noqa: E731
        stepper = OptimizerStepper(initial_weights(size.shapes), make)
        machine = cast(Machine, SimpleNamespace(wait=lambda: None))
        fleet = Fleet(machine, [stepper], [Gradients(size.shapes)])
        for _ in range(2):
            fleet.steps()
        return fleet
    finally:
        backends.BACKENDS = before


if __name__ == "__main__":
    main()
