"""The memory of trainings, passes included: `python -m tests.helpers.training_memory [LAYERS WIDTH DEVICE]`.

Three steps of a chain of square linear layers per optimizer, each in a separate process. The result is memory in
addition to the weights, in bytes per parameter. On a CPU it is resident memory (the kernel's VmHWM and VmRSS), because
torch's profiler turns the storage swap off; on a GPU it is the memory that torch's allocator has given out.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsam import FusedSAM
from fastsam.lab.report.table import Table

SGD = torch.optim.SGD
PLAIN: dict[str, Any] = {"lr": 1e-3}
IN_BACKWARD: dict[str, Any] = {"assume_no_alias": True, "optimizer_in_backward": True}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: SGD(params, **PLAIN),
    "FusedSAM": lambda params: FusedSAM(params, SGD, **PLAIN),
    "FusedSAM, exclusive": lambda params: FusedSAM(params, SGD, assume_no_alias=True, **PLAIN),
    "FusedSAM, in_backward": lambda params: FusedSAM(params, SGD, **IN_BACKWARD, **PLAIN),
    "bfloat16: SGD": lambda params: SGD(params, momentum=0.9, **PLAIN),
    "bfloat16: FusedSAM": lambda params: FusedSAM(params, SGD, momentum=0.9, **PLAIN),
}
STEPS, BATCH = 3, 4


def measure(name: str, layers: int, width: int, device: str = "cpu") -> tuple[float, float]:
    """Return bytes per parameter beyond the weights: at the peak of a step, and between steps without gradients."""
    arguments = (str(layers), str(width), device, name)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system at once
    command = [sys.executable, "-m", "tests.helpers.training_memory", *arguments]
    process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    peak, steady = json.loads(process.stdout)
    return peak, steady


def _train(name: str, layers: int, width: int, device: str) -> tuple[float, float]:
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if name.startswith("bfloat16") else torch.float32
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device, dtype)
    x, warm = torch.randn(BATCH, width).to(device, dtype), nn.Linear(width, width).to(device, dtype)
    warm(x).sum().backward()  # allocate what the first backward pass of a process needs
    del warm
    weights = sum(p.numel() for p in model.parameters())
    optimizer = OPTIMIZERS[name](model.parameters())
    bytes_before, peak = _bytes(device, peak=False), 0

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        optimizer.step(closure)
        peak = max(peak, _bytes(device, peak=True))
        optimizer.zero_grad()
    return (peak - bytes_before) / weights, (_bytes(device, peak=False) - bytes_before) / weights


def _bytes(device: str, peak: bool) -> int:
    """Return the bytes of this process now, or the most since the peak was reset."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    name, lines = "VmHWM:" if peak else "VmRSS:", Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main(layers: str = "24", width: str = "2048", device: str = "cpu", name: str = "") -> None:
    """Print a table, or with a name the two numbers of this process as JSON."""
    if name:
        print(json.dumps(_train(name, int(layers), int(width), device)))
        return
    results = {name: measure(name, int(layers), int(width), device) for name in OPTIMIZERS}
    rows = [[name, *(f"{value:.1f}" for value in numbers)] for name, numbers in results.items()]
    print(Table("", ["bytes per parameter beyond the weights", "peak of a step", "between steps"], rows).text())


if __name__ == "__main__":
    main(*sys.argv[1:])
