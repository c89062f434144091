"""Measures every op and whole steps: `python -m bench.kernels --device cuda --out DIR` (part of `make gpu`), or
`--device cpu`.

Writes `kernels-DEVICE.json` after every group of cases, so that a run that is stopped leaves what it has;
`python -m bench.report` makes tables and, with `--plot`, plots from it. With `--add` a run of other backends, parts or
peers goes into the file of an earlier one. A figure is there only where the op agreed with the reference on that very
input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import environment, kernel_report
from bench.cases import choose
from bench.clocks import Machine
from bench.gpu_report import join
from bench.kernel_cases import CPU_LEFT_OUT, KERNEL_SIZES, OPS, KernelCase, kernel_cases
from bench.kernel_data import MAX_SETS, Operator
from bench.timing import Summary, no_garbage_collection
from fastsam import backends

ROUNDS, QUICK_ROUNDS, FEWEST = 21, 5, 3
CASE_SECONDS = {"cpu": 4.0, "cuda": 1.5}  # of rounds, after which a case has no more than FEWEST of them
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
    parser.add_argument(
        "--compile",
        choices=COMPILE,
        default="with",
        help="peers under torch.compile: beside the others, left out, or alone",
    )
    parser.add_argument("--parts", default="ops,steps", help="what to measure, of ops, steps (default: both)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no case after so many; half of them for ops, where steps follow",
    )
    arguments = parser.parse_args(argv)
    sizes = [n for n in KERNEL_SIZES if arguments.device == "cuda" or n not in CPU_LEFT_OUT]
    try:
        arguments.sizes = choose(KERNEL_SIZES, _split(arguments.sizes) or sizes, "size")
        arguments.ops = choose(OPS, _split(arguments.ops) or list(OPS), "op")
        names = dict.fromkeys(backend.name for backend in backends.table() if backend.device == arguments.device)
        arguments.backends = choose({n: n for n in names}, _split(arguments.backends) or list(names), "backend")
        arguments.parts = choose({"steps": "steps", "ops": "ops"}, _split(arguments.parts), "part")
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device; measure with --device cpu")
        if arguments.threads < 1:
            raise ValueError(f"--threads takes whole numbers from 1, got {arguments.threads}")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every figure was measured, 1 when an op or a step disagreed with the reference or raised."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    end = time.monotonic() + arguments.seconds
    machine = Machine(torch.device(arguments.device))
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = record_of(machine, arguments)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    for number, part in enumerate(arguments.parts):
        measure = _ops if part == "ops" else _steps
        now = time.monotonic()
        measure(record, machine, arguments, rounds, now + (end - now) / (len(arguments.parts) - number))
        write(record, arguments.out)
    return told(record, arguments.out)


def record_of(machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Without results, or with those of an earlier run on the same commit, which it is to be added to."""
    made: dict[str, Any] = {
        "kind": kernel_report.KIND,
        "environment": environment.facts(environment.command_line("bench.kernels")),
        "device": arguments.device, "threads": arguments.threads, "cache_bytes": machine.cache_bytes,
        "dtype": "float32",
        "ops": [], "steps": [], "left_out": [],
    }  # fmt: skip
    path = arguments.out / kernel_report.file_name(made)
    if not arguments.add or not path.exists():
        return made
    earlier: dict[str, Any] = json.loads(path.read_text())
    if earlier["environment"]["commit"] != made["environment"]["commit"]:
        raise SystemExit(
            f"{path} is of commit {earlier['environment']['commit']}: measure into another folder, or without --add"
        )
    command = f"{earlier['environment']['command']} && {made['environment']['command']}"
    return earlier | {"environment": made["environment"] | {"command": command}}


def told(record: dict[str, Any], out: Path) -> int:
    """Says what is missing, and the code with which the command ends."""
    red = [
        f"{r['name']} by {b['title']}: {b['reason']}" for r in _rows(record) for b in r["rows"] if b["gate"] == "red"
    ]
    for line in red:
        print(f"not measured, because wrong: {line}")
    for name in record["left_out"]:
        print(f"no time left for {name}")
    green = sum(b["gate"] == "green" for r in _rows(record) for b in r["rows"])
    print(
        f"{green} figures green, {len(red)} wrong, {len(record['left_out'])} cases left out: "
        f"{out / kernel_report.file_name(record)}"
    )
    return 1 if red or not green else 0


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [*record["steps"], *record["ops"]]


def write(record: dict[str, Any], out: Path) -> None:
    environment.write(record, out / kernel_report.file_name(record))


def _ops(record: dict[str, Any], machine: Machine, arguments: argparse.Namespace, rounds: int, deadline: float) -> None:
    for case in kernel_cases(arguments.sizes, arguments.ops):
        if time.monotonic() > deadline:
            record["left_out"].append(case.name)
            continue
        result = OpBench(case, machine, arguments.backends).run(rounds)
        record["ops"] = join(record["ops"], [result])
        print(line(result), flush=True)
        write(record, arguments.out)


def _steps(
    record: dict[str, Any], machine: Machine, arguments: argparse.Namespace, rounds: int, deadline: float
) -> None:
    from bench.whole_steps import COMPILED_SIZES, StepBench

    compile_ = "without" if arguments.quick else arguments.compile
    last = {} if compile_ == "without" else STEPS_LAST
    for size in sorted(arguments.sizes, key=lambda size: last.get(size.name, 0)):
        if size.rows > 1 or (compile_ == "only" and size.name not in COMPILED_SIZES):
            continue
        if time.monotonic() > deadline:
            record["left_out"].append(f"steps-{size.name}")
            continue
        result = StepBench(size, machine, compile_, arguments.backends).run(rounds)
        record["steps"] = join(record["steps"], [result])
        print(line(result), flush=True)
        write(record, arguments.out)


def line(result: dict[str, Any]) -> str:
    """One case in one line: the fraction of the floor per row, replayed where it was."""
    found = []
    for row in result["rows"]:
        best = row.get("replayed") or row.get("eager")
        found.append(f"{row['name']} {best['fraction']['median']:.2f}" if best else f"{row['name']} {row['gate']}")
    return f"{result['name']}: {', '.join(found)} of the floor at {result['copy']['median'] / 1e9:.0f} GB/s"


def figures(seconds: Sequence[float], copies: Sequence[float], bytes_: int) -> dict[str, Any]:
    """Median and quartiles of seconds per call, and of the fraction of the floor: `bytes_` at the copy's bandwidth of
    the same round."""
    floors = [bytes_ / bandwidth for bandwidth in copies]
    return {"seconds": asdict(Summary.of(seconds)), "fraction": asdict(Summary.of_ratios(floors, seconds))}


def rounds_of(
    machine: Machine,
    samples: dict[str, Callable[[], float]],
    rounds: int,
) -> tuple[list[float], dict[str, list[float]]]:
    """Interleaved: every round takes the copy's bandwidth and a sample of everybody, beginning with another one each
    time."""
    taken: dict[str, list[float]] = {name: [] for name in samples}
    copies, names, end = [], list(samples), time.monotonic() + CASE_SECONDS[machine.device.type]
    with no_garbage_collection():
        for name in names:
            samples[name]()
        for i in range(rounds):
            if i >= FEWEST and time.monotonic() > end:
                break
            copies.append(machine.copy_bandwidth())
            start = i % max(len(names), 1)
            for name in names[start:] + names[:start]:
                taken[name].append(samples[name]())
    return copies, taken


class OpBench:
    """Backends, by default all, on one case."""

    def __init__(self, case: KernelCase, machine: Machine, names: Sequence[str] | None = None) -> None:
        self.case, self.machine, self.names = case, machine, names
        self.operator = Operator(case, machine.device, machine.cache_bytes)
        self.cold = len(self.operator.sets) == MAX_SETS

    def run(self, rounds: int) -> dict[str, Any]:
        case, size = self.case, self.case.size
        rows, samples, extra = [], {}, {}
        for backend in backends.table():
            if backend.device != self.machine.device.type or (self.names and backend.name not in self.names):
                continue
            row: dict[str, Any] = {"name": backend.name, "title": backend.name}
            state, reason = self._state(backend)
            rows.append(row | {"gate": state} | ({"reason": reason} if reason else {}))
            if state == "green":
                for how, sample in self._samples(backend).items():
                    samples[f"{backend.name} {how}"] = sample
                extra[backend.name] = self._launches(backend)
        copies, taken = rounds_of(self.machine, samples, rounds)
        bytes_ = case.op.bytes_per_parameter * size.parameters
        for row in rows:
            for how in ("eager", "replayed"):
                if (seconds := taken.get(f"{row['name']} {how}")) is not None:
                    row[how] = figures(seconds, copies, bytes_)
            row |= extra.get(row["name"], {})
        return {
            "name": case.name, "op": case.op.name, "size": size.name, "title": size.title, "layout": case.layout,
            "rows_of_arena": size.rows, "tensors": len(size.shapes), "parameters": size.parameters,
            "bytes_per_parameter": case.op.bytes_per_parameter, "sets": len(self.operator.sets), "rounds": len(copies),
            "copy": asdict(Summary.of(copies)), "rows": rows,
        }  # fmt: skip

    def _state(self, backend: backends.Backend) -> tuple[str, str | None]:
        """green; red and how it is wrong; or "not run" and why."""
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

    def _samples(self, backend: backends.Backend) -> dict[str, Callable[[], float]]:
        """Seconds per call: eager, and on CUDA replayed from a graph of one call per set."""
        kernels, call, sets = backend.load(), self.case.op.call, self.operator.sets
        reference = backend.name == "reference"
        some = sets[:REFERENCE_CALLS] if reference else sets

        def every() -> None:
            for operands in some:
                call(kernels, operands)

        def sample(body: Callable[[], object], queued: bool = False) -> Callable[[], float]:
            return lambda: self.machine.sample(body, self.cold or reference, queued) / len(some)

        every()
        found = {"eager": sample(every)}
        if self.machine.cuda and not reference:
            try:
                found["replayed"] = sample(self.machine.capture(every), queued=True)
            except RuntimeError as error:
                print(f"{self.case.name}: {backend.name} is not replayed: {error}", flush=True)
        return found

    def _launches(self, backend: backends.Backend) -> dict[str, int]:
        """Of one call, on some of the sizes; only a GPU has launches."""
        if not self.machine.cuda or self.case.size.name not in LAUNCHES_AT or self.case.layout != "scattered":
            return {}
        kernels, operands = backend.load(), self.operator.sets[0]
        return {"launches": self.machine.launches(lambda: self.case.op.call(kernels, operands))}


if __name__ == "__main__":
    sys.exit(main())
