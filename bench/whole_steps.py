"""Whole steps, the optimizer part of two passes: ours against the peers in one process, eager, and on CUDA replayed
from graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from bench import gate, memory
from bench.clocks import Machine
from bench.contenders import Contender, ForeachStepper, Stepper, contenders
from bench.kernel_cases import OPS, STEP, KernelSize
from bench.kernel_data import ROTATION
from bench.kernels import figures, rounds_of
from bench.problem import NU, RHO, Gradients, initial_weights
from bench.timing import Summary

FLOOR_BYTES = sum(OPS[name].bytes_per_parameter for name in STEP)
TOUCHED = 20  # bytes per parameter: weight, saved weight, momentum, two gradients
MAX_STEPPERS = 16  # where ROTATION caches take more, as much memory is read before every sample
PEERS = ("compiled", "foreach", "copied")
COMPILED_SIZES = ("resnet18", "100m", "50k", "225k")  # each takes most of a minute to compile
COPIED_TENSORS = 400  # from so many on the copied class is left out: it has some ten launches per tensor and step
HOST_STEPS = 50
LAUNCHES_LEFT_OUT = ("225k", "30m", "cut10", "cut100", "cut400")  # a profile takes a while; the others tell enough


class DeviceForeachStepper(ForeachStepper):
    """`ForeachStepper` without a wait for the device: 52 bytes per parameter, and it can be captured in a graph.

    torch's fused SGD takes its learning rate from the device, so with minus the radius for a rate it perturbs.
    """

    @torch.no_grad()
    def _first(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_copy_(self.saved, self.data)
        torch._fused_sgd_(
            self.data, gradients, [], weight_decay=0.0, momentum=0.0, lr=-RHO / (norm + NU), dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


def of_device(
    machine: Machine, size: KernelSize, compile_: str = "with", names: Sequence[str] | None = None
) -> list[Contender]:
    """Ours (of these backends), and the peers that the figures of merit name: "with" those that compile, "without", or
    them "only"."""
    table = contenders(machine.device.type)
    chosen = [c for c in table.values() if c.ours and (names is None or c.backend in names)]
    for name in PEERS:
        peer = table[name]
        if peer.compiles and (compile_ == "without" or size.name not in COMPILED_SIZES):
            continue
        if not peer.compiles and compile_ == "only":
            continue
        if name == "copied" and len(size.shapes) >= COPIED_TENSORS:
            continue
        if name == "foreach" and machine.cuda:
            peer = Contender(name, "foreach and fused SGD, on the device", DeviceForeachStepper)
        chosen.append(peer)
    return chosen


class Fleet:
    """Steppers of one contender that take their steps in turn, so that no step finds in the cache what the last one
    left."""

    def __init__(self, machine: Machine, steppers: Sequence[Stepper], gradients: Sequence[Gradients]) -> None:
        self.machine, self.cold = machine, len(steppers) == MAX_STEPPERS
        self.pairs = list(zip(steppers, gradients, strict=True))
        self.passes = 0

    def steps(self) -> None:
        """A step of each."""
        for stepper, gradients in self.pairs:
            stepper.take(gradients, self.passes)
            stepper.first()
            stepper.take(gradients, self.passes + 1)
            stepper.second()
        self.passes += 2

    def eager(self) -> float:
        """Seconds per step; handing over the gradients is not on the clock."""
        seconds: list[Callable[[], float]] = []
        cold = self.cold
        for stepper, gradients in self.pairs:
            for i, phase in enumerate((stepper.first, stepper.second)):
                stepper.take(gradients, self.passes + i)
                seconds.append(self.machine.begin(phase, cold))
                cold = False
        self.passes += 2
        self.machine.wait()
        return sum(taken() for taken in seconds) / len(self.pairs)

    def replay(self) -> Callable[[], float]:
        """Seconds per step of a graph that holds a step of each."""
        replay = self.machine.capture(self.steps)
        return lambda: self.machine.sample(replay, self.cold, queued=True) / len(self.pairs)

    def host_seconds(self, changed: bool) -> float:
        """Median over steps of what the host needs for one, the device working on meanwhile."""
        stepper, gradients = self.pairs[0]
        taken = []
        self.machine.wait()
        for step in range(HOST_STEPS):
            spent = 0.0
            for i, phase in enumerate((stepper.first, stepper.second)):
                stepper.take(gradients, 2 * step + i if changed else i)
                start = time.perf_counter()
                phase()
                spent += time.perf_counter() - start
            taken.append(spent)
        self.machine.wait()
        return Summary.of(taken[HOST_STEPS // 5 :]).median


class StepBench:
    """The contenders on one size."""

    def __init__(
        self, size: KernelSize, machine: Machine, compile_: str = "with", names: Sequence[str] | None = None
    ) -> None:
        self.size, self.machine = size, machine
        self.contenders = of_device(machine, size, compile_, names)
        wanted = -(-ROTATION * machine.cache_bytes // (TOUCHED * size.parameters))
        self.weights = initial_weights(size.shapes, device=machine.device)
        self.gradients = [
            Gradients(size.shapes, seed=1 + i, device=machine.device) for i in range(min(max(wanted, 1), MAX_STEPPERS))
        ]

    def run(self, rounds: int) -> dict[str, Any]:
        left_out = {c.name: reason for c in self.contenders if (reason := c.why_not()) is not None}
        running = [c for c in self.contenders if c.name not in left_out]
        green, red = gate.check(running, self.weights, self.gradients[0])
        rows, samples = {}, {}
        for contender in self.contenders:
            name = contender.name
            rows[name] = {"name": name, "title": contender.title, "ours": contender.ours}
            if name in green:
                more, sampled = self._prepare(contender, green[name])
                rows[name] |= {"gate": "green"} | more
                samples |= {f"{name} {how}": sample for how, sample in sampled.items()}
            else:
                rows[name] |= {"gate": "red" if name in red else "not run", "reason": red.get(name) or left_out[name]}
        copies, taken = rounds_of(self.machine, samples, rounds)
        for name in green:
            rows[name] |= self._figures(name, copies, taken)
        size = self.size
        return {
            "name": f"step-{size.name}", "size": size.name, "title": size.title, "tensors": len(size.shapes),
            "parameters": size.parameters, "bytes_per_parameter": FLOOR_BYTES, "sets": len(self.gradients),
            "rounds": len(copies), "copy": asdict(Summary.of(copies)), "rows": list(rows.values()),
        }  # fmt: skip

    def _prepare(self, contender: Contender, first: Stepper) -> tuple[dict[str, Any], dict[str, Callable[[], float]]]:
        """What is known of a contender before it is timed, and how to take a sample of it."""
        row: dict[str, Any] = {
            "extra_bytes_per_parameter": round(self._extra_bytes(contender) / self.size.parameters, 2)
        }
        others = [contender.build(self.weights) for _ in self.gradients[1:]]
        fleet = Fleet(self.machine, [first, *others], self.gradients)
        for _ in range(2):
            fleet.steps()
        samples = {"eager": fleet.eager}
        if self.machine.cuda:
            alone = Fleet(self.machine, [first], self.gradients[:1])
            if self.size.name not in LAUNCHES_LEFT_OUT:
                row["launches"] = self.machine.launches(alone.steps)
            row["host_seconds"] = {
                "unchanged": fleet.host_seconds(changed=False), "changed": fleet.host_seconds(changed=True)
            }  # fmt: skip
            try:
                samples["replayed"] = fleet.replay()
            except RuntimeError as error:
                row["not_replayed"] = str(error).splitlines()[0]
        return row, samples

    def _extra_bytes(self, contender: Contender) -> int:
        """Peak bytes of the allocator over construction and two steps, less the weights."""
        if not self.machine.cuda:
            return memory.peak_extra_bytes(contender, self.weights, self.gradients[0])
        return memory.peak_extra_bytes_cuda(contender, self.weights, self.gradients[0])

    def _figures(self, name: str, copies: list[float], taken: dict[str, list[float]]) -> dict[str, Any]:
        """Per way of running: seconds, fraction of the floor, and how many times faster than each peer in the same
        way."""
        found: dict[str, Any] = {}
        for how in ("eager", "replayed"):
            if (seconds := taken.get(f"{name} {how}")) is None:
                continue
            found[how] = figures(seconds, copies, FLOOR_BYTES * self.size.parameters)
            for peer in PEERS:
                if (theirs := taken.get(f"{peer} {how}")) is not None:
                    found[how][f"faster_than_{peer}"] = asdict(Summary.of_ratios(theirs, seconds))
        return found
