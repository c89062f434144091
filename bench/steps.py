"""The optimizer part of whole steps, contenders interleaved: eager, and on CUDA replayed from graphs."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench import correctness, memory
from bench.contenders import Contender, Stepper
from bench.timing import ROTATION, Machine, interleave, intra_op_threads
from bench.workload import Gradients, Size, initial_weights

TOUCHED = 20  # bytes per parameter: weight, saved weight, momentum, two gradients
MAX_STEPPERS = 16  # if ROTATION caches need more, that much memory is read before every sample
HOST_STEPS = 50
INTERVAL = 10  # steps: two intervals of SAM(interval=5), one of the other variants that do not perturb in every step
VIEWS = (
    "as_strided", "view", "detach", "slice", "select", "reshape", "alias", "unbind", "split", "empty", "result_type",
    "item", "_local",
)  # fmt: skip


class StepperPool:
    """Steppers of one contender that take steps in turn, so that a step's data are not in the cache."""

    def __init__(self, machine: Machine, steppers: Sequence[Stepper], gradients: Sequence[Gradients]) -> None:
        self.machine, self.cold = machine, len(steppers) == MAX_STEPPERS
        self.pairs = list(zip(steppers, gradients, strict=True))
        self.passes = 0

    def steps(self) -> None:
        """Take a step of each."""
        for stepper, gradients in self.pairs:
            for phase in stepper.phases():
                stepper.set_grads(gradients, self.passes)
                self.passes += 1
                phase()

    def eager(self, steps: int = 1) -> float:
        """Return the seconds per step over `steps` steps of each; handing over the gradients is not on the clock. A
        sample of several steps begins with a step that is not timed and refills the caches."""
        seconds: list[Callable[[], float]] = []
        cold = self.cold
        if steps > 1:
            self.steps()
        for _ in range(steps):
            for stepper, gradients in self.pairs:
                for phase in stepper.phases():
                    stepper.set_grads(gradients, self.passes)
                    self.passes += 1
                    seconds.append(self.machine.begin(phase, cold))
                    cold = False
        self.machine.wait()
        return sum(sample() for sample in seconds) / len(self.pairs) / steps

    def replay(self) -> Callable[[], float]:
        """Return a function that samples the seconds per step of a graph with a step of each."""
        replay = self.machine.capture(self.steps)
        return lambda: self.machine.sample(replay, self.cold, is_queued=True) / len(self.pairs)

    def host_seconds(self, new_grads: bool) -> float:
        """Return the median time that the host needs for a step while the device works on."""
        stepper, gradients = self.pairs[0]
        samples = []
        self.machine.wait()
        for step in range(HOST_STEPS):
            seconds = 0.0
            for i, phase in enumerate(stepper.phases()):
                stepper.set_grads(gradients, 2 * step + i if new_grads else i)
                start = time.perf_counter()
                phase()
                seconds += time.perf_counter() - start
            samples.append(seconds)
        self.machine.wait()
        return statistics.median(samples[HOST_STEPS // 5 :])

    def calls(self) -> dict[str, float]:
        """Return the numbers of our kernels and of torch's calls in a step: the mean over an interval."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(INTERVAL):
                self.steps()
        prefixes = ("fastsam::", "aten::")
        events = [e for e in profiler.events() if not (e.cpu_parent and e.cpu_parent.name.startswith(prefixes))]
        num_fastsam = sum(event.name.startswith("fastsam::") for event in events)
        num_aten = sum(e.name.startswith("aten::") and not any(view in e.name for view in VIEWS) for e in events)
        return {"kernels": num_fastsam / INTERVAL, "torch_calls": num_aten / INTERVAL}


def measure(*arguments: Any, threads: int | None = None, **options: Any) -> dict[str, Any]:
    """Return the case that `_measure` returns. With `threads`, torch has this number of threads, named in the title."""
    if threads is None:
        return _measure(*arguments, **options)
    with intra_op_threads(threads):
        case = _measure(*arguments, **options)
    return case | {"title": f"{case['title']}, {threads} thread{'s' * (threads > 1)}", "threads": threads}


def _measure(
    contenders: Sequence[Contender], size: Size, machine: Machine, rounds: int, max_seconds: float = math.inf, *,
    steps: int = 1, rotate: bool = False, references: Sequence[str] = (), counts: Sequence[str] = ("memory",),
) -> dict[str, Any]:  # fmt: skip
    """Measure contenders on one size and return the case.

    Args:
        contenders: the contenders.
        size: shapes of the parameters.
        machine: device, caches and clock.
        rounds (int): number of rounds.
        max_seconds (float): seconds after which no round begins.
        steps (int): number of steps of a sample.
        rotate (bool): use enough steppers to keep their operands out of the caches.
        references: names of contenders with whose times all others are compared.
        counts: further measurements besides the eager time: "memory"; on a CPU "calls"; on a GPU "launches", and
            "replays" with the host's time.
    """
    num_sets = -(-ROTATION * machine.cache_bytes // (TOUCHED * size.parameters)) if rotate else 1
    weights = initial_weights(size.shapes, device=machine.device)
    sets = [Gradients(size.shapes, 1 + i, machine.device) for i in range(min(max(num_sets, 1), MAX_STEPPERS))]
    steppers, problems = correctness.check([c for c in contenders if not c.absent], weights, sets[0])
    rows, samples = dict[str, dict[str, Any]](), dict[str, Callable[[], float]]()

    def prepare(contender: Contender) -> dict[str, Any]:
        """Return what is counted of a contender, and add its samples."""
        name, row = contender.name, dict[str, Any]()
        if "memory" in counts:
            extra = memory.peak_extra_bytes(contender, weights, sets[0])
            row["extra_bytes_per_parameter"] = round(extra / size.parameters, 2)
        pool = StepperPool(machine, [steppers[name], *(contender.build(weights) for _ in sets[1:])], sets)
        for _ in range(2):
            pool.steps()
        samples[f"{name} eager"] = partial(pool.eager, steps)
        if "calls" in counts and not machine.cuda and contender.backend:
            row |= pool.calls()
        if "launches" in counts and machine.cuda:
            row["launches"] = machine.launches(StepperPool(machine, [steppers[name]], sets[:1]).steps)
        if "replays" in counts and machine.cuda:
            row["host_seconds"] = {"unchanged": pool.host_seconds(False), "changed": pool.host_seconds(True)}
            try:
                samples[f"{name} replayed"] = pool.replay()
            except RuntimeError as error:
                row["not_replayed"] = str(error).splitlines()[0]
        return row

    for contender in contenders:
        name = contender.name
        rows[name] = row = {"name": name, "title": contender.title, "ours": bool(contender.backend)}
        if name not in steppers:
            row |= {"problem": problems[name]} if name in problems else {"absent": contender.absent}
            continue
        row |= {"floor_bytes": contender.floor}
        try:
            row |= prepare(contender)
        except RuntimeError as error:  # such as too little memory: it costs this row
            row["problem"] = f"raised {type(error).__name__}: {error}".splitlines()[0]
    timings = interleave(samples, rounds, machine.copy_bandwidth, max_seconds)
    rivals = {contender.name: contender.rival for contender in contenders if contender.rival}
    for key in timings.seconds:
        name, _, mode = key.rpartition(" ")
        titles = {rival: f"{rival} {mode}" for rival in references}
        titles |= {"ours": f"{rivals[name]} {mode}"} if name in rivals else {}
        rows[name][mode] = timings.figures(key, rows[name]["floor_bytes"] * size.parameters, titles)
    return {**size.facts, "steps": steps, "sets": len(sets), **timings.facts, "rows": list(rows.values())}
