"""The optimizer part of whole steps, ours and others' interleaved: eager, and on CUDA replayed from graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import gate, memory
from bench.contenders import Contender, ForeachStepper, Stepper, contenders
from bench.problem import FLOOR_BYTES, NU, RHO, Gradients, Shapes, Size, initial_weights
from bench.timing import ROTATION, Machine, Rounds, Summary, interleave

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
    machine: Machine, size: Size, compile_: str = "with", names: Sequence[str] | None = None
) -> list[Contender]:
    """Return ours (of these backends), and the peers that the figures of merit name.

    compile_: "with" the peers that compile, "without" them, or them "only".
    """
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
        """Take a step of each."""
        for stepper, gradients in self.pairs:
            for phase in stepper.phases():
                stepper.take(gradients, self.passes)
                self.passes += 1
                phase()

    def eager(self, steps: int = 1) -> float:
        """Return the seconds per step over `steps` steps of each; handing over the gradients is not on the clock."""
        seconds: list[Callable[[], float]] = []
        cold = self.cold
        for _ in range(steps):
            for stepper, gradients in self.pairs:
                for phase in stepper.phases():
                    stepper.take(gradients, self.passes)
                    self.passes += 1
                    seconds.append(self.machine.begin(phase, cold))
                    cold = False
        self.machine.wait()
        return sum(taken() for taken in seconds) / len(self.pairs) / steps

    def replay(self) -> Callable[[], float]:
        """Return a function that samples the seconds per step of a graph with a step of each."""
        replay = self.machine.capture(self.steps)
        return lambda: self.machine.sample(replay, self.cold, queued=True) / len(self.pairs)

    def host_seconds(self, changed: bool) -> float:
        """Return the median time that the host needs for a step while the device works on."""
        stepper, gradients = self.pairs[0]
        taken = []
        self.machine.wait()
        for step in range(HOST_STEPS):
            spent = 0.0
            for i, phase in enumerate(stepper.phases()):
                stepper.take(gradients, 2 * step + i if changed else i)
                start = time.perf_counter()
                phase()
                spent += time.perf_counter() - start
            taken.append(spent)
        self.machine.wait()
        return Summary.of(taken[HOST_STEPS // 5 :]).median


class StepBench:
    """Contenders on one list of shapes.

    steps: number of steps of a sample. A sample of several steps begins with a step that is not timed and refills the
    caches.
    """

    def __init__(
        self, contenders: Sequence[Contender], shapes: Shapes, machine: Machine, rotate: bool = True, steps: int = 1
    ) -> None:
        self.contenders, self.machine, self.steps = contenders, machine, steps
        self.parameters = sum(torch.Size(shape).numel() for shape in shapes)
        wanted = -(-ROTATION * machine.cache_bytes // (TOUCHED * self.parameters)) if rotate else 1
        self.weights = initial_weights(shapes, device=machine.device)
        self.gradients = [
            Gradients(shapes, seed=1 + i, device=machine.device) for i in range(min(max(wanted, 1), MAX_STEPPERS))
        ]

    def run(self, rounds: int, most: float, profiled: bool = True) -> tuple[dict[str, dict[str, Any]], Rounds]:
        """Return a row per contender with all but its times, and the samples by `NAME eager` and `NAME replayed`.

        Args:
            most (float): seconds after which no round begins.
            profiled (bool): count launches on a GPU.
        """
        left_out = {c.name: reason for c in self.contenders if (reason := c.why_not()) is not None}
        running = [c for c in self.contenders if c.name not in left_out]
        green, red = gate.check(running, self.weights, self.gradients[0])
        rows: dict[str, dict[str, Any]] = {}
        samples: dict[str, Callable[[], float]] = {}
        for contender in self.contenders:
            name = contender.name
            rows[name] = {"name": name, "title": contender.title, "ours": contender.ours}
            if name in green:
                rows[name] |= {"gate": "green"} | self._prepare(contender, green[name], samples, profiled)
            else:
                rows[name] |= {"gate": "red" if name in red else "not run", "reason": red.get(name) or left_out[name]}
        return rows, interleave(samples, rounds, self.machine.copy_bandwidth, most)

    def _prepare(
        self, contender: Contender, first: Stepper, samples: dict[str, Callable[[], float]], profiled: bool
    ) -> dict[str, Any]:
        """Return what is known of a contender before it is timed, and add the ways to take a sample of it."""
        extra = memory.peak_extra_bytes(contender, self.weights, self.gradients[0])
        row: dict[str, Any] = {"extra_bytes_per_parameter": round(extra / self.parameters, 2)}
        others = [contender.build(self.weights) for _ in self.gradients[1:]]
        fleet = Fleet(self.machine, [first, *others], self.gradients)
        for _ in range(2):
            fleet.steps()

        def eager() -> float:
            if self.steps > 1:
                fleet.steps()
            return fleet.eager(self.steps)

        samples[f"{contender.name} eager"] = eager
        if self.machine.cuda:
            alone = Fleet(self.machine, [first], self.gradients[:1])
            if profiled:
                row["launches"] = self.machine.launches(alone.steps)
            row["host_seconds"] = {
                "unchanged": fleet.host_seconds(changed=False), "changed": fleet.host_seconds(changed=True)
            }  # fmt: skip
            try:
                samples[f"{contender.name} replayed"] = fleet.replay()
            except RuntimeError as error:
                row["not_replayed"] = str(error).splitlines()[0]
        return row


def on_size(
    size: Size, machine: Machine, rounds: int, most: float, compile_: str = "with",
    names: Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the contenders of a device on one size.

    A row has, by way of running, seconds, the fraction of the floor, and how many times faster it is than each peer.
    """
    bench = StepBench(of_device(machine, size, compile_, names), size.shapes, machine)
    rows, taken = bench.run(rounds, most, size.name not in LAUNCHES_LEFT_OUT)
    for key in taken.seconds:
        name, how = key.split()
        rows[name][how] = taken.figures(key, FLOOR_BYTES * size.parameters)
        peers = [peer for peer in PEERS if f"{peer} {how}" in taken.seconds]
        rows[name][how] |= {f"faster_than_{peer}": taken.ratio(f"{peer} {how}", key) for peer in peers}
    return {
        "name": f"step-{size.name}", **size.facts, "bytes_per_parameter": FLOOR_BYTES, "sets": len(bench.gradients),
        **taken.facts, "rows": list(rows.values()),
    }  # fmt: skip
