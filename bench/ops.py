"""Every op by itself against its memory floor: backends interleaved, eager, and on CUDA replayed from graphs."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.contenders import NO_MEASUREMENT
from bench.kernel_cases import KernelCase
from bench.kernel_data import MAX_SETS, Operator
from bench.timing import Machine, interleave
from fastsam import backends

LAUNCHES_AT = ("resnet18", "rows100", "cut1000")  # enough, because the count does not depend on the size
Samples = dict[str, Callable[[], float]]
REFERENCE_CALLS = 4  # per sample: the unfused backend is a yardstick, not a result


def measure(
    case: KernelCase, machine: Machine, rounds: int, max_seconds: float, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure one case on the backends of these names, by default all."""
    operator = Operator(case, machine.device, machine.cache_bytes)
    rows, samples = dict[str, dict[str, Any]](), Samples()
    for backend in backends.table():
        if backend.device != machine.device.type or (names and backend.name not in names):
            continue
        rows[backend.name] = row = {"name": backend.name, "title": backend.name, "ours": backend.name != "reference"}
        if absent := _absent(backend, case):
            row["absent"] = absent
            continue
        try:
            problem = operator.check(backend.load())
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        row |= {"problem": problem} if problem else _prepare(backend, operator, machine, samples)
    timings = interleave(samples, rounds, machine.copy_bandwidth, max_seconds)
    for key in timings.seconds:
        name, mode = key.split()
        rows[name][mode] = timings.figures(key, case.op.bytes_per_parameter * case.size.parameters)
    return {
        "op": case.op.name, "layout": case.layout, "rows_of_arena": case.size.rows, **case.size.facts,
        "bytes_per_parameter": case.op.bytes_per_parameter, "sets": len(operator.sets), **timings.facts,
        "rows": list(rows.values()),
    }  # fmt: skip


def _absent(backend: backends.Backend, case: KernelCase) -> str | None:
    if (backend.name, backend.device) == ("triton", "cpu"):
        return NO_MEASUREMENT
    if backend.reason is not None:
        return backend.reason
    return None if hasattr(backend.load(), case.op.function) else f"this backend has no {case.op.function}"


def _prepare(backend: backends.Backend, operator: Operator, machine: Machine, samples: Samples) -> dict[str, Any]:
    """Add the samples of a call: eager, and on CUDA replayed from a graph of one call per set. Return the launches of a
    call, on some of the sizes; only a GPU has launches."""
    kernels, case, reference = backend.load(), operator.case, backend.name == "reference"
    operand_sets = operator.sets[:REFERENCE_CALLS] if reference else operator.sets
    cold = reference or len(operator.sets) == MAX_SETS

    def call_all() -> None:
        for operands in operand_sets:
            case.op.call(kernels, operands)

    def sample(body: Callable[[], object], is_queued: bool = False) -> Callable[[], float]:
        return lambda: machine.sample(body, cold, is_queued) / len(operand_sets)

    call_all()
    samples[f"{backend.name} eager"] = sample(call_all)
    if machine.cuda and not reference:
        try:
            samples[f"{backend.name} replayed"] = sample(machine.capture(call_all), is_queued=True)
        except RuntimeError as error:
            print(f"{case.name}: {backend.name} is not replayed: {error}", flush=True)
    if not machine.cuda or case.size.name not in LAUNCHES_AT or case.layout != "scattered":
        return {}
    return {"launches": machine.launches(lambda: case.op.call(kernels, operand_sets[0]))}
