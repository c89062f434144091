"""Steps of `FusedSAM` that something interrupts: made or not made, with nothing lost."""

import random
import time

from fastsam import backends
from tests.attack.trials import Attack, Trial
from tests.helpers.interrupted_steps import STYLES, Plan
from tests.helpers.interrupting import Alarm, Tracer
from tests.helpers.trainings import SPECS

TIMES = 60  # interrupts of a trial, which share what an undisturbed step gives
SPECS_WITH_KERNELS = [p.values[0] for p in SPECS if p.values[0].has_kernels]


def _plan(trial: Trial) -> Plan:
    """Backends in turn, everything else drawn."""
    rng = trial.rng
    backend_names = [b.name for b in backends.table() if b.device == "cpu" and b.available and b.name != "triton"]
    spec = rng.choice(SPECS_WITH_KERNELS)
    style = rng.choice(["step", "by_hand"] if spec.one_pass else list(STYLES))
    plan = spec, style, 2 if spec.one_pass else rng.choice([0, 1, 2]), backend_names[trial.number % len(backend_names)]
    print(plan, flush=True)
    return Plan(*plan)


def interrupt_at_lines(trial: Trial) -> int:
    """Raise an exception before lines of the code of a step."""
    plan = _plan(trial)
    lines = plan.lines()
    sample = trial.rng.sample(range(lines), min(TIMES, lines))
    for line in sample:
        assert plan.interrupted(Tracer(line, plan.folders)), f"line {line} of {lines} was not reached"
    return len(sample)


def _measure_step(plan: Plan) -> float:
    """Return the shortest duration of five steps in seconds."""
    durations = []
    for _ in range(5):
        case = plan.make()
        start = time.perf_counter()
        plan.act(case, plan.warm)
        durations.append(time.perf_counter() - start)
    return min(durations)


def interrupt_by_signals(trial: Trial) -> int:
    """Interrupt a step at any instant by signals of a timer and of a thread. Later signals do not count."""
    plan = _plan(trial)
    seconds, rng = _measure_step(plan), random.Random(trial.number)
    alarms = (Alarm(max(rng.uniform(0, seconds), 1e-6), rng.random() < 0.5) for _ in range(TIMES))
    return sum(plan.interrupted(alarm, anywhere=True) for alarm in alarms)


PROMISE = "a step that is interrupted at any line of its code was made or not made, state included"
ATTACKS = (
    Attack("exception-in-step", PROMISE, interrupt_at_lines),
    Attack("signal-in-step", "the same for real signals at any instant (the backend `foreach`: the weights alone)",
        interrupt_by_signals),
)  # fmt: skip
