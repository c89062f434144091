"""Measures every op and whole steps: `python -m bench.kernels --device cuda --out DIR` (part of `make gpu`), or
`--device cpu`.

Writes `kernels-DEVICE.json` after every case, so that a run that is stopped leaves what it has; `python -m
bench.report` makes tables and plots from it. With `--add` a run of other backends, parts or peers goes into the file of
an earlier one. A figure is there only where the op agreed with the reference on that very input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import environment, whole_steps
from bench.contenders import choose, split
from bench.gpu_report import join
from bench.kernel_cases import CPU_LEFT_OUT, KERNEL_SIZES, OPS, KernelCase, kernel_cases
from bench.kernel_data import MAX_SETS, Operator
from bench.tables import KERNELS, rows_of
from bench.timing import Machine, interleave
from fastsam import backends

ROUNDS, QUICK_ROUNDS = 21, 5
CASE_SECONDS = {"cpu": 4.0, "cuda": 1.5}  # of rounds
STEPS_LAST = {"30m": 1, "100m": 2}  # of many large tensors, in this order: the torch.compile of the last takes longest
COMPILE = ("with", "without", "only")
# every profile takes a while, and the count does not depend on the size
LAUNCHES_AT = ("resnet18", "rows100", "cut1000")
REFERENCE_CALLS = 4  # per sample: the unfused backend is a yardstick, not a result


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels-DEVICE.json")
    parser.add_argument("--add", action="store_true", help="to the kernels-DEVICE.json that is there, if one is")
    parser.add_argument("--quick", action="store_true", help="few rounds, and whole steps without torch.compile")
    parser.add_argument("--ops", help=f"comma-separated, of {', '.join(OPS)} (default: all)")
    parser.add_argument("--sizes", help=f"comma-separated, of {', '.join(KERNEL_SIZES)} (default: all; CPU: not 100m)")
    parser.add_argument("--backends", help="comma-separated, of ours and the reference (default: all)")
    parser.add_argument("--compile", choices=COMPILE, default="with", help="peers under torch.compile (default: with)")
    parser.add_argument("--parts", default="ops,steps", help="comma-separated, of ops, steps (default: both)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf,
        help="begin no case after so many; half of them for ops, where steps follow",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    sizes = [n for n in KERNEL_SIZES if arguments.device == "cuda" or n not in CPU_LEFT_OUT]
    names = dict.fromkeys(backend.name for backend in backends.table() if backend.device == arguments.device)
    try:
        arguments.sizes = choose(KERNEL_SIZES, split(arguments.sizes) or sizes, "size")
        arguments.ops = choose(OPS, split(arguments.ops) or list(OPS), "op")
        arguments.backends = choose({n: n for n in names}, split(arguments.backends) or list(names), "backend")
        arguments.parts = choose({"steps": _steps, "ops": _ops}, split(arguments.parts), "part")
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device; measure with --device cpu")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every figure was measured, 1 when an op or a step disagreed with the reference or raised."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    end = time.monotonic() + arguments.seconds
    machine = Machine(torch.device(arguments.device))
    path = arguments.out / f"kernels-{arguments.device}.json"
    record = _begun(path, machine, arguments)
    for number, part in enumerate(arguments.parts):
        now = time.monotonic()
        deadline = now + (end - now) / (len(arguments.parts) - number)
        for name, measure in part(machine, arguments):
            if time.monotonic() > deadline:
                record["left_out"].append(name)
                print(f"no time left for {name}")
                continue
            result = measure()
            kind = "ops" if "op" in result else "steps"
            record[kind] = join(record[kind], [result])
            print(line(result), flush=True)
            environment.write(record, path)
    environment.write(record, path)
    rows = list(rows_of(record))
    red = [f"{row['title']}: {row['reason']}" for row in rows if row["gate"] == "red"]
    for text in red:
        print(f"not measured, because wrong: {text}")
    green = sum(row["gate"] == "green" for row in rows)
    print(f"{green} figures green, {len(red)} wrong, {len(record['left_out'])} cases left out: {path}")
    return 1 if red or not green else 0


def _begun(path: Path, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a record without results, or the one of an earlier run on the same commit, to be added to."""
    made: dict[str, Any] = {
        "kind": KERNELS, "environment": environment.facts(environment.command_line("bench.kernels")),
        "device": arguments.device, "threads": 1, "cache_bytes": machine.cache_bytes, "dtype": "float32",
        "ops": [], "steps": [], "left_out": [],
    }  # fmt: skip
    if not arguments.add or not path.exists():
        return made
    earlier: dict[str, Any] = json.loads(path.read_text())
    if earlier["environment"]["commit"] != made["environment"]["commit"]:
        raise SystemExit(
            f"{path} is of commit {earlier['environment']['commit']}: measure into another folder, or without --add"
        )
    command = f"{earlier['environment']['command']} && {made['environment']['command']}"
    return earlier | {"environment": made["environment"] | {"command": command}}


Cases = list[tuple[str, Callable[[], dict[str, Any]]]]


def _rounds(machine: Machine, arguments: argparse.Namespace) -> tuple[int, float]:
    return QUICK_ROUNDS if arguments.quick else ROUNDS, CASE_SECONDS[machine.device.type]


def _ops(machine: Machine, arguments: argparse.Namespace) -> Cases:
    def measure(case: KernelCase) -> Callable[[], dict[str, Any]]:
        return lambda: OpBench(case, machine, arguments.backends).run(*_rounds(machine, arguments))

    return [(case.name, measure(case)) for case in kernel_cases(arguments.sizes, arguments.ops)]


def _steps(machine: Machine, arguments: argparse.Namespace) -> Cases:
    compile_ = "without" if arguments.quick else arguments.compile
    last = {} if compile_ == "without" else STEPS_LAST
    rounds = _rounds(machine, arguments)
    return [
        (f"steps-{s.name}", lambda s=s: whole_steps.on_size(s, machine, *rounds, compile_, arguments.backends))  # type: ignore[misc]
        for s in sorted(arguments.sizes, key=lambda s: last.get(s.name, 0))
        if s.rows == 1 and (compile_ != "only" or s.name in whole_steps.COMPILED_SIZES)
    ]


def line(result: dict[str, Any]) -> str:
    """Return one case in one line: the fraction of the floor per row, replayed where it was."""
    found = []
    for row in result["rows"]:
        best = row.get("replayed") or row.get("eager")
        found.append(f"{row['name']} {best['fraction']['median']:.2f}" if best else f"{row['name']} {row['gate']}")
    return f"{result['name']}: {', '.join(found)} of the floor at {result['copy']['median'] / 1e9:.0f} GB/s"


class OpBench:
    """Backends, by default all, on one case."""

    def __init__(self, case: KernelCase, machine: Machine, names: Sequence[str] | None = None) -> None:
        self.case, self.machine, self.names = case, machine, names
        self.operator = Operator(case, machine.device, machine.cache_bytes)
        self.cold = len(self.operator.sets) == MAX_SETS

    def run(self, rounds: int, most: float) -> dict[str, Any]:
        case, rows = self.case, {}
        samples: dict[str, Callable[[], float]] = {}
        for backend in backends.table():
            if backend.device != self.machine.device.type or (self.names and backend.name not in self.names):
                continue
            state, reason = self._state(backend)
            rows[backend.name] = {"name": backend.name, "title": backend.name, "gate": state}
            rows[backend.name] |= {"reason": reason} if reason else self._prepare(backend, samples)
        taken = interleave(samples, rounds, self.machine.copy_bandwidth, most)
        for key in taken.seconds:
            name, how = key.split()
            rows[name][how] = taken.figures(key, case.op.bytes_per_parameter * case.size.parameters)
        return {
            "name": case.name, "op": case.op.name, "layout": case.layout, "rows_of_arena": case.size.rows,
            **case.size.facts, "bytes_per_parameter": case.op.bytes_per_parameter, "sets": len(self.operator.sets),
            **taken.facts, "rows": list(rows.values()),
        }  # fmt: skip

    def _state(self, backend: backends.Backend) -> tuple[str, str | None]:
        """Return green; red and how it is wrong; or "not run" and why."""
        if (backend.name, backend.device) == ("triton", "cpu"):
            return "not run", "on the CPU Triton runs in its interpreter: not a measurement"
        if backend.reason is not None:
            return "not run", backend.reason
        kernels = backend.load()
        if not hasattr(kernels, self.case.op.function):
            return "not run", f"this backend has no {self.case.op.function}"
        try:
            reason = self.operator.gate(kernels)
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
        return ("red", reason) if reason else ("green", None)

    def _prepare(self, backend: backends.Backend, samples: dict[str, Callable[[], float]]) -> dict[str, Any]:
        """Add the samples of a call: eager, and on CUDA replayed from a graph of one call per set. Return the launches
        of a call, on some of the sizes; only a GPU has launches."""
        kernels, call, sets = backend.load(), self.case.op.call, self.operator.sets
        reference = backend.name == "reference"
        some = sets[:REFERENCE_CALLS] if reference else sets

        def every() -> None:
            for operands in some:
                call(kernels, operands)

        def sample(body: Callable[[], object], queued: bool = False) -> Callable[[], float]:
            return lambda: self.machine.sample(body, self.cold or reference, queued) / len(some)

        every()
        samples[f"{backend.name} eager"] = sample(every)
        if self.machine.cuda and not reference:
            try:
                samples[f"{backend.name} replayed"] = sample(self.machine.capture(every), queued=True)
            except RuntimeError as error:
                print(f"{self.case.name}: {backend.name} is not replayed: {error}", flush=True)
        if not self.machine.cuda or self.case.size.name not in LAUNCHES_AT or self.case.layout != "scattered":
            return {}
        return {"launches": self.machine.launches(lambda: call(kernels, sets[0]))}


if __name__ == "__main__":
    sys.exit(main())
