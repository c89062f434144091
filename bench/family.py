"""The optimizer part of a step of every variant next to SAM's, to its own bytes and to pytorch-optimizer's classes:
`make bench ARGS="--variants"`; on a GPU `python -m bench.family --seconds N --out DIR`, a part of `make gpu`.

A step is made as in a training loop: as many passes as the variant takes, whose gradients are prepared. If not every
step perturbs, a figure is the mean over a whole interval. torch's profiler counts calls on the CPU: our kernels,
and calls of torch that read or write tensors. On a GPU a variant has a figure only if its steps agree with the steps of
the CPU on the client CNN.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import environment, tables
from bench.contenders import SGD_OPTIONS, OptimizerStepper, parameters
from bench.kernel_cases import KERNEL_SIZES
from bench.problem import FLOOR_BYTES, RHO, SIZES, Gradients, Size, initial_weights
from bench.timing import Machine, interleave
from bench.whole_steps import Fleet
from fastsam import SAM, FusedSAM, variants

STEPS = 10  # of a sample, at least: two intervals of SAM, interval=5, one of the others
GPU_SIZES, GPU_ROUNDS = ("50k", "resnet18", "100m"), 11
VIEWS = (
    "as_strided", "view", "detach", "slice", "select", "reshape", "alias", "unbind", "split", "empty", "result_type",
    "item", "_local",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A variant. floor: bytes per parameter and step, as docs/variants.md derives them. peer: a class of
    pytorch-optimizer, and its options."""

    sam: SAM
    floor: float
    peer: str | None = None
    options: Mapping[str, Any] | None = None


ENTRIES: dict[str, Entry] = {
    "SAM": Entry(SAM(RHO), FLOOR_BYTES, "SAM"),
    "ASAM": Entry(SAM(RHO, adaptive=True), FLOOR_BYTES + 4, "SAM", {"adaptive": True}),
    "SAM, interval=5": Entry(SAM(RHO, interval=5), (FLOOR_BYTES + 4 * 20) / 5),
    "LESAM": Entry(SAM(RHO, rho_fn=variants.LESAM(0.01)), FLOOR_BYTES),
    "GSAM": Entry(variants.GSAM(RHO), 60),
    "WSAM": Entry(variants.WSAM(RHO), 64, "WSAM"),
    "WSAM, coupled": Entry(variants.WSAM(RHO, decouple=False), 52, "WSAM", {"decouple": False}),
    "LookSAM": Entry(variants.LookSAM(RHO, k=10), (96 + 9 * 32) / 10, "LookSAM", {"k": 10}),
    "FriendlySAM": Entry(variants.FriendlySAM(RHO), 92, "FriendlySAM"),
    "VaSSO": Entry(variants.VaSSO(RHO), 80),
    "SAMON": Entry(variants.SAMON(RHO), 36),
    "MSAM": Entry(variants.MSAM(RHO), 36),
    "LastGradient": Entry(variants.LastGradient(RHO), 44),
}


class Ours(OptimizerStepper):
    """A step as a training loop makes it. SAMON perturbs the tensors of one dimension here."""

    def __init__(self, weights: Sequence[Tensor], entry: Entry) -> None:
        self.parameters = parameters(weights)
        still: dict[str, Any] = {"rho": 0.0} if isinstance(entry.sam, variants.SAMON) else {}
        flat = [p for p in self.parameters if p.dim() == 1]
        groups = [{"params": flat}, {"params": [p for p in self.parameters if p.dim() != 1], **still}]
        self.optimizer = FusedSAM([g for g in groups if g["params"]], torch.optim.SGD, variant=entry.sam, **SGD_OPTIONS)

    def phases(self) -> Sequence[Callable[[], object]]:
        optimizer = self.optimizer
        return (optimizer.first_step, optimizer.step) if optimizer.perturbs else (optimizer.step,)


class Theirs(OptimizerStepper):
    """A class of pytorch-optimizer, with torch's multi-tensor functions."""

    def __init__(self, weights: Sequence[Tensor], entry: Entry) -> None:
        import pytorch_optimizer

        def make(params: list[nn.Parameter]) -> Any:
            own = {"rho": RHO, "foreach": True, **SGD_OPTIONS, **(entry.options or {})}
            if entry.peer == "WSAM":
                own["model"] = nn.ParameterList(params)
            return getattr(pytorch_optimizer, str(entry.peer))(params=params, base_optimizer=torch.optim.SGD, **own)

        super().__init__(weights, make)


def fleet_of(stepper: Callable[..., OptimizerStepper], entry: Entry, machine: Machine, size: Size) -> Fleet:
    weights = initial_weights(size.shapes, device=machine.device)
    return Fleet(machine, [stepper(weights, entry)], [Gradients(size.shapes, device=machine.device)])


def measure(machine: Machine, size: Size, rounds: int, problems: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the figures of every variant, and on the CPU of its peer if pytorch-optimizer is installed.

    problems: why a variant has no figures.
    """
    problems, fleets = dict(problems or {}), {}
    steps = max(size.steps // STEPS * STEPS, STEPS)
    with_peers = not machine.cuda and importlib.util.find_spec("pytorch_optimizer") is not None
    for name, entry in ENTRIES.items():
        if name in problems:
            continue
        try:
            fleets[name] = fleet_of(Ours, entry, machine, size)
            fleets[name].eager(STEPS)
        except Exception as error:  # such as too little memory: it costs this variant's row
            fleets.pop(name, None)
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if entry.peer and with_peers:
            fleets[f"{name}, pytorch-optimizer"] = fleet_of(Theirs, entry, machine, size)
    samples = {name: partial(fleet.eager, steps) for name, fleet in fleets.items()}
    taken = interleave(samples, rounds, machine.copy_bandwidth)
    rows = []
    for name, entry in ENTRIES.items():
        row: dict[str, Any] = {"name": name, "floor_bytes": entry.floor}
        rows.append(row)
        if name in problems:
            row["problem"] = problems[name]
            continue
        found = taken.figures(name, entry.floor * size.parameters)
        row |= {"seconds": found["seconds"], "floor_fraction": found["fraction"]}
        row["to_sam"] = taken.ratio(name, "SAM" if "SAM" in taken.seconds else name)
        if (peer := f"{name}, pytorch-optimizer") in taken.seconds:
            row |= {"peer": entry.peer, "peer_to_own": taken.ratio(peer, name)}
        if not machine.cuda:
            row |= calls(fleets[name])
    return {
        **size.facts, "rounds": rounds, "steps_per_sample": steps, "busy_others": round(taken.others, 3),
        "copy_bytes_per_second": taken.facts["copy"], "variants": rows,
    }  # fmt: skip


def calls(fleet: Fleet) -> dict[str, float]:
    """Return the kernels of ours, and torch's calls, of a step: the mean over an interval."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            fleet.steps()
    ours_or_torchs = ("fastsam::", "aten::")
    events = [e for e in profiler.events() if not (e.cpu_parent and e.cpu_parent.name.startswith(ours_or_torchs))]
    own = sum(event.name.startswith("fastsam::") for event in events)
    other = sum(e.name.startswith("aten::") and not any(view in e.name for view in VIEWS) for e in events)
    return {"kernels": own / STEPS, "torch_calls": other / STEPS}


def wrong(entry: Entry, machine: Machine) -> str:
    """Return how three steps on the device differ from three on the CPU; empty if they agree."""
    ends: list[list[Tensor]] = []
    try:
        for device in (torch.device("cpu"), machine.device):
            weights = initial_weights(SIZES["small_cnn"].shapes, device=device)
            stepper, gradients = Ours(weights, entry), Gradients(SIZES["small_cnn"].shapes, device=device)
            fleet = Fleet(machine, [stepper], [gradients])
            for _ in range(3):
                fleet.steps()
            ends.append([weight.cpu() for weight in stepper.weights()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    furthest = max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True))
    return "" if furthest < 1e-5 else f"weights differ from the CPU's by {furthest:.1e} after three steps"


def main(argv: Sequence[str] | None = None) -> int:
    """On a GPU, a file that is written after each size."""
    parser = argparse.ArgumentParser(prog="python -m bench.family", description="Steps of SAM's variants on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for family-cuda.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no size after so many")
    arguments = parser.parse_args(argv)
    end, machine = time.monotonic() + arguments.seconds, Machine(torch.device("cuda"))
    facts = environment.facts(environment.command_line("bench.family"))
    record: dict[str, Any] = {"kind": tables.FAMILY, "device": "cuda", "environment": facts, "results": []}
    problems = {name: problem for name, entry in ENTRIES.items() if (problem := wrong(entry, machine))}
    for name in GPU_SIZES:
        if time.monotonic() > end:
            print(f"no time left for {name}")
            continue
        record["results"].append(measure(machine, KERNEL_SIZES[name], GPU_ROUNDS, problems))
        environment.write(record, arguments.out / tables.file_name(record))
        print(f"{name}: {len(ENTRIES) - len(problems)} variants measured", flush=True)
    for name, problem in problems.items():
        print(f"{name} is not measured: {problem}")
    return int(bool(problems) or not record["results"])


if __name__ == "__main__":
    sys.exit(main())
