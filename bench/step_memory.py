"""The memory of whole steps, passes included: what the process has at most, and between two steps.

    python -m bench.step_memory [--layers 24] [--width 2048]

A process of its own per row takes three steps of a chain of square linear layers: of float32 weights without momentum, and of bfloat16 weights with
it. Counted is resident memory (the kernel's VmHWM and VmRSS) beyond
the weights, in bytes per parameter: torch's profiler would see allocations, but makes an exclusive owner's step an ordinary one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastsam import FusedSAM

SGD = torch.optim.SGD
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=1e-3),
    "FusedSAM": lambda params: FusedSAM(params, SGD, lr=1e-3),
    "FusedSAM, exclusive": lambda params: FusedSAM(params, SGD, lr=1e-3, exclusive=True),
    "FusedSAM, in_backward": lambda params: FusedSAM(params, SGD, lr=1e-3, exclusive=True, in_backward=True),
}
KEPT: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
HALVES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bfloat16: SGD": lambda params: SGD(params, **KEPT),
    "bfloat16: FusedSAM": lambda params: FusedSAM(params, SGD, **KEPT),
    "bfloat16: FusedSAM, compact": lambda params: FusedSAM(params, SGD, master="compact", **KEPT),
    "bfloat16: FusedSAM, compact, momenta too": lambda params: FusedSAM(
        params, SGD, master="compact", momentum_dtype=torch.bfloat16, **KEPT
    ),
}
KINDS |= HALVES
STEPS, BATCH = 3, 4


def resident(field: str) -> int:
    """Bytes of this process by a field of /proc/self/status: VmRSS now, VmHWM at most since the last `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def forget_peak() -> None:
    """VmHWM starts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(kind: str, layers: int, width: int) -> tuple[float, float]:
    """Bytes per parameter beyond the weights: at the peak of a step, and between steps with the gradients cleared."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    dtype = torch.bfloat16 if kind in HALVES else torch.float32
    model.to(dtype)
    x, warm = torch.randn(BATCH, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
    warm(x).sum().backward()  # what the first backward pass of a process takes
    del warm
    weights = sum(p.numel() for p in model.parameters())
    optimizer = KINDS[kind](model.parameters())
    before, peak = resident("VmRSS"), 0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(STEPS):
        forget_peak()
        optimizer.step(closure)
        peak = max(peak, resident("VmHWM"))
        optimizer.zero_grad()
    return (peak - before) / weights, (resident("VmRSS") - before) / weights


def in_its_own_process(kind: str, layers: int, width: int) -> tuple[float, float]:
    """`measure`, where freed memory goes back to the system at once."""
    command = [
        sys.executable,
        "-m",
        "bench.step_memory",
        "--kind",
        kind,
        "--layers",
        str(layers),
        "--width",
        str(width),
    ]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    peak, between = json.loads(done.stdout)
    return peak, between


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, or with --kind the two numbers of this process as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args(arguments)
    if options.kind is not None:
        print(json.dumps(measure(options.kind, options.layers, options.width)))
        return
    print("| bytes per parameter beyond the weights | peak of a step | between steps |\n|---|---:|---:|")
    for kind in KINDS:
        peak, between = in_its_own_process(kind, options.layers, options.width)
        print(f"| {kind} | {peak:.1f} | {between:.1f} |")


if __name__ == "__main__":
    main()
