"""Host time of a step in Triton, without a GPU: the launches go to a CUDA library without a device (`stub_driver`).

`measure` starts this module in a separate process, which prints the seconds of every row as JSON.
"""

import ctypes
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import ROOT, stub_driver

COUNTS = (20, 62, 200)  # numbers of tensors; ResNet-18 has 62
NUMEL = 1000  # elements of a tensor
TITLES = {
    "step": "FusedSAM, first_step() and second_step()",
    "prepared": "of it, the prepared launches",
    "ops": "the ops norm_, perturb_ and update_",
    "triton": "the ops, launched by Triton's own function",
}
KINDS = ("unchanged", "changed")  # addresses of the gradients
Gradients = Sequence[Tensor]
Pass = Callable[[Gradients], object]


def measure(count: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """Return the case of `count` tensors, with a row for each name."""
    rows = {name: {"name": name, "title": TITLES[name], "ours": True} for name in names}
    case = {"title": f"host time of a step in Triton, {count} tensors, no GPU", "rounds": rounds}
    if find_spec("triton") is None:
        return case | {"rows": [row | {"absent": "Triton is not installed"} for row in rows.values()]}
    with tempfile.TemporaryDirectory() as name:
        env = stub_driver.environment(Path(name))
        stub_driver.build(Path(name), env)
        command = [sys.executable, "-m", "bench.launches", name, str(count), str(rounds), *names]
        output = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return case | {"rows": [rows[name] | {"host_seconds": seconds} for name, seconds in json.loads(output).items()]}


class Step:
    """The two passes of a row, on separate weights and gradients. Triton's own function launches if `is_own`."""

    def __init__(self, count: int, is_own: bool) -> None:
        self.params = [nn.Parameter(torch.randn(NUMEL)) for _ in range(count)]
        self._gradients = [[torch.randn(NUMEL) for _ in range(count)] for _ in range(2)]
        self._is_own = is_own
        self.passes: tuple[Pass, Pass]

    def seconds(self, shift: int) -> float:
        """Make a step and return its seconds. A different shift gives every gradient a different place."""
        from fastsam_kernels import triton_launch

        versions, seconds = triton_launch.VERSIONS, 0.0
        triton_launch.VERSIONS = () if self._is_own else versions
        for function, gradients in zip(self.passes, self._gradients, strict=True):
            grads = gradients[shift:] + gradients[:shift]
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g
                g.data_ptr()  # in the processor's cache, as after a backward pass
            start = time.perf_counter()
            function(grads)
            seconds += time.perf_counter() - start
        triton_launch.VERSIONS = versions
        return seconds


def make_step(name: str, count: int) -> Step:
    """Return the step of a row."""
    from fastsam import FusedSAM
    from fastsam.arena import Arena, Layout
    from fastsam_kernels import triton_backend
    from fastsam_kernels.hparams import NUM_HPARAMS

    step = Step(count, is_own=name == "triton")
    if name == "step":
        opt = FusedSAM(step.params, torch.optim.SGD, lr=0.1, momentum=0.9, backend="triton")
        step.passes = (lambda grads: opt.first_step(), lambda grads: opt.second_step())
        return step
    params = [p.detach() for p in step.params]
    layout = Layout.from_tensors(params)
    arena, table = Arena(layout), layout.table
    backup, momentum = arena.field("backup", torch.float32), arena.field("momentum", torch.float32)
    sumsq, hparams = torch.zeros(1, dtype=torch.float64), torch.zeros(1, 1, NUM_HPARAMS, dtype=torch.float64)
    if name == "prepared":
        step.passes = _prepared_passes(triton_backend.direct_calls(params, backup, table, hparams), sumsq, momentum)
        return step

    def perturb(grads: Gradients) -> None:
        triton_backend.norm_(sumsq, grads, [], table, hparams)
        triton_backend.perturb_(params, backup, grads, table, hparams, sumsq, True)

    step.passes = (
        perturb,
        lambda grads: triton_backend.update_(params, backup, grads, table, hparams, "sgd", [momentum]),
    )
    return step


def _prepared_passes(direct: Any, sumsq: Tensor, momentum: Tensor) -> tuple[Pass, Pass]:
    """Return the passes as `fastsam.optim` makes them, with the calls of the last step if they serve."""
    calls: list[Callable[[], object]] = []

    def update(grads: Gradients) -> None:
        nonlocal calls
        if not (calls and direct.renew(calls, grads)):
            calls = direct.update("sgd", [momentum], grads)
        for call in calls:
            call()

    return lambda grads: direct.norm_perturb_(grads, sumsq, False), update


def main(folder: str, count: int, rounds: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step of each row, with unchanged addresses of gradients and with new ones."""
    from fastsam_kernels import triton_backend

    torch.set_num_threads(1)
    stub_driver.use()
    ctypes.CDLL(f"{folder}/libcuda.so.1").fake_mute(1)
    triton_backend.why_not = lambda device: None  # serves tensors of the CPU here
    steps = {(name, kind): make_step(name, count) for name in names for kind in KINDS}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for turn, key in itertools.product(range(rounds + rounds // 5), steps):
        samples[key].append(steps[key].seconds(turn % count if key[1] == "changed" else 0))
    seconds = {key: statistics.median(values[rounds // 5 :]) for key, values in samples.items()}
    return {name: {kind: seconds[name, kind] for kind in KINDS} for name in names}


if __name__ == "__main__":
    json.dump(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]), sys.stdout)
