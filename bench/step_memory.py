"""The memory of whole steps, passes included: what the process has at most, and between two steps.

    python -m bench.step_memory [--layers 24] [--width 2048]
    python -m bench.step_memory --device cuda --layers 60 --width 4096     # 1.007 billion parameters

A process of its own per row takes three steps of a chain of square linear layers: of float32 weights without momentum,
and of bfloat16 weights with it. Counted is what lies beyond the weights, in bytes per parameter: resident memory (the
kernel's VmHWM and VmRSS), because torch's profiler makes an exclusive owner's step an ordinary one; on a GPU what
torch's allocator has given out.
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
}
KINDS |= HALVES
STEPS, BATCH = 3, 4


class Resident:
    """Bytes of this process, by the kernel."""

    def now(self) -> int:
        return self._field("VmRSS")

    def peak(self) -> int:
        """Since the last `forget_peak`."""
        return self._field("VmHWM")

    def forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def _field(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])


class Allocated:
    """Bytes of tensors on the GPU, by torch's allocator."""

    now = staticmethod(torch.cuda.memory_allocated)
    peak = staticmethod(torch.cuda.max_memory_allocated)
    forget_peak = staticmethod(torch.cuda.reset_peak_memory_stats)


def measure(kind: str, layers: int, width: int, device: str = "cpu") -> tuple[float, float]:
    """Bytes per parameter beyond the weights: at the peak of a step, and between steps with the gradients cleared."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    dtype = torch.bfloat16 if kind in HALVES else torch.float32
    model.to(device, dtype)
    x, warm = (t.to(device, dtype) for t in (torch.randn(BATCH, width), nn.Linear(width, width)))
    memory: Any = Resident() if device == "cpu" else Allocated()
    warm(x).sum().backward()  # what the first backward pass of a process takes
    del warm
    weights = sum(p.numel() for p in model.parameters())
    optimizer = KINDS[kind](model.parameters())
    before, peak = memory.now(), 0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(STEPS):
        memory.forget_peak()
        optimizer.step(closure)
        peak = max(peak, memory.peak())
        optimizer.zero_grad()
    return (peak - before) / weights, (memory.now() - before) / weights


def in_its_own_process(kind: str, layers: int, width: int, device: str = "cpu") -> tuple[float, float]:
    """`measure`, where freed memory goes back to the system at once."""
    sizes = ["--layers", str(layers), "--width", str(width), "--device", device]
    command = [sys.executable, "-m", "bench.step_memory", "--kind", kind, *sizes]
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    if options.kind is not None:
        print(json.dumps(measure(options.kind, options.layers, options.width, options.device)))
        return
    print("| bytes per parameter beyond the weights | peak of a step | between steps |\n|---|---:|---:|")
    for kind in KINDS:
        peak, between = in_its_own_process(kind, options.layers, options.width, options.device)
        print(f"| {kind} | {peak:.1f} | {between:.1f} |")


if __name__ == "__main__":
    main()
