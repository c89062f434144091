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

from bench.tables import table
from fastsam import FusedSAM

SGD = torch.optim.SGD
PLAIN: dict[str, Any] = {"lr": 1e-3}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: SGD(params, **PLAIN),
    "FusedSAM": lambda params: FusedSAM(params, SGD, **PLAIN),
    "FusedSAM, exclusive": lambda params: FusedSAM(params, SGD, assume_no_alias=True, **PLAIN),
    "FusedSAM, in_backward": lambda params: FusedSAM(
        params, SGD, assume_no_alias=True, optimizer_in_backward=True, **PLAIN
    ),
    "bfloat16: SGD": lambda params: SGD(params, momentum=0.9, **PLAIN),
    "bfloat16: FusedSAM": lambda params: FusedSAM(params, SGD, momentum=0.9, **PLAIN),
}
STEPS, BATCH = 3, 4


def _memory(device: str, peak: bool) -> int:
    """Return the bytes of this process now, or at most since the last `_forget_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    name, lines = "VmHWM:" if peak else "VmRSS:", Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def measure(kind: str, layers: int, width: int, device: str = "cpu") -> tuple[float, float]:
    """Return bytes per parameter beyond the weights: at the peak of a step, and between steps without gradients."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if kind.startswith("bfloat16") else torch.float32
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device, dtype)
    x, warm = (t.to(device, dtype) for t in (torch.randn(BATCH, width), nn.Linear(width, width)))
    warm(x).sum().backward()  # what the first backward pass of a process takes
    del warm
    weights = sum(p.numel() for p in model.parameters())
    optimizer = KINDS[kind](model.parameters())
    before, peak = _memory(device, peak=False), 0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(STEPS):
        _forget_peak(device)
        optimizer.step(closure)
        peak = max(peak, _memory(device, peak=True))
        optimizer.zero_grad()
    return (peak - before) / weights, (_memory(device, peak=False) - before) / weights


def in_its_own_process(kind: str, layers: int, width: int, device: str = "cpu") -> tuple[float, float]:
    """Call `measure` where freed memory goes back to the system at once."""
    sizes = ["--layers", str(layers), "--width", str(width), "--device", device]
    command = [sys.executable, "-m", "bench.step_memory", "--kind", kind, *sizes]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    peak, between = json.loads(done.stdout)
    return peak, between


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or with --kind the two numbers of this process as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(arguments)
    if given.kind is not None:
        print(json.dumps(measure(given.kind, given.layers, given.width, given.device)))
        return
    found = {kind: in_its_own_process(kind, given.layers, given.width, given.device) for kind in KINDS}
    rows = [[kind, *(f"{value:.1f}" for value in both)] for kind, both in found.items()]
    print(table(["bytes per parameter beyond the weights", "peak of a step", "between steps"], rows))


if __name__ == "__main__":
    main()
