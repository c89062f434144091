"""Measures the variants beside today's kernels: `python -m bench.variants --device cuda --out DIR` (part of
`make gpu`).

Each variant first has to agree with the reference in float64, and with today's kernels bit for bit. Then both are
replayed from CUDA graphs in turn, on sets of operands that no cache holds. Writes `variants.json` after every case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import environment
from bench.clocks import Machine
from bench.kernel_data import MAX_SETS, Operator
from bench.kernels import rounds_of
from bench.timing import Summary
from bench.variants import library, report
from bench.variants.cases import CASES, Device, VariantCase
from bench.variants.library import NotServed
from fastsam import backends

ROUNDS = 31


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.variants", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), or one of several: cuda:1")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {report.FILE}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many")
    arguments = parser.parse_args(argv)
    if not arguments.device.startswith("cuda"):
        parser.error(f"the variants are CUDA kernels, got --device {arguments.device}")
    if not torch.cuda.is_available():
        parser.error(
            "torch sees no CUDA device; without one the variants are emulated: tests/bench/test_variants_emulated.py"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case that there was time for was measured, 1 when a variant was wrong or raised."""
    arguments = parse(argv)
    end = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    torch.cuda.set_device(device)
    native = next(b for b in backends.table() if (b.name, b.device) == ("native", "cuda"))
    if native.reason is not None:
        print(f"there is nothing to compare with: {native.reason}", file=sys.stderr)
        return 1
    path = library.build("".join(map(str, torch.cuda.get_device_capability(device))))
    machine, properties = Machine(device), torch.cuda.get_device_properties(device)
    record = record_of(machine, environment.command_line("bench.variants"))
    measure(record, machine, properties.multi_processor_count, native.load(), path, CASES, arguments.out, end)
    print(report.table(record))
    for result in record["cases"]:
        if result["gate"] == "red":
            print(f"not measured, because wrong: {result['name']}: {result['reason']}")
    for name in record["left_out"]:
        print(f"no time left for {name}")
    print("; ".join(f"{group}: {said}" for group, said in record["verdicts"].items()))
    return int(any(result["gate"] == "red" for result in record["cases"]))


def record_of(machine: Machine, command: str) -> dict[str, Any]:
    return {
        "kind": "variants", "environment": environment.facts(command), "device": machine.device.type,
        "cache_bytes": machine.cache_bytes, "dtype": "float32", "rule": {"wins": report.WINS, "loses": report.LOSES},
        "cases": [], "left_out": [], "verdicts": {},
    }  # fmt: skip


def measure(
    record: dict[str, Any],
    machine: Machine,
    multiprocessors: int,
    today: Any,
    path: Path,
    cases: Sequence[VariantCase],
    out: Path,
    end: float,
) -> None:
    """Fills `record` and writes it to `out`. `today`: the kernels of the library; `path`: the compiled variants."""
    out.mkdir(parents=True, exist_ok=True)
    made: dict[type, Any] = {}
    for case in cases:
        if time.monotonic() > end:
            record["left_out"].append(case.name)
            continue
        if case.variant not in made:
            made[case.variant] = case.variant(path)
        result = Race(case, machine, today, made[case.variant]).run(ROUNDS, multiprocessors)
        record["cases"].append(result)
        print(report.line(result), flush=True)
        groups = dict.fromkeys(r["group"] for r in record["cases"])
        record["verdicts"] = {group: report.verdict(group, record["cases"]) for group in groups}
        part = out / f"part-{report.FILE}"
        part.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(part, out / report.FILE)


class Race:
    """A variant and today's kernels on one case."""

    def __init__(self, case: VariantCase, machine: Machine, today: Any, variant: Any) -> None:
        self.case, self.machine = case, machine
        self.contenders = {"today": today, "variant": variant}
        self.operator = Operator(case.kernels, machine.device, machine.cache_bytes)

    def run(self, rounds: int, multiprocessors: int) -> dict[str, Any]:
        """Gate and figures of the case; `ratio` is the variant's time over today's of the same round, `gate` green, red
        or not served."""
        case, size = self.case, self.case.kernels.size
        result: dict[str, Any] = {
            "name": case.name, "group": case.group, "title": size.title, "rows": size.rows, "tensors": len(size.shapes),
            "parameters": size.parameters, "sets": len(self.operator.sets), "ratio": None, "predicted": None,
        }  # fmt: skip
        gate, reason = self._gate()
        result |= {"gate": gate, "reason": reason}
        if gate != "green":
            return result
        samples = {name: self._sample(kernels) for name, kernels in self.contenders.items()}
        copies, taken = rounds_of(self.machine, samples, rounds)
        bandwidth = Summary.of(copies).median
        result["predicted"] = case.predict(size, Device(bandwidth, self.machine.cache_bytes, multiprocessors))
        result |= {f"{name}_seconds": asdict(Summary.of(seconds)) for name, seconds in taken.items()}
        ratio = Summary.of_ratios(taken["variant"], taken["today"])
        return result | {"ratio": asdict(ratio), "copy": asdict(Summary.of(copies)), "rounds": len(copies)}

    def _gate(self) -> tuple[str, str | None]:
        try:
            reason = self.operator.gate(self.contenders["variant"]) or self._other_bits()
        except NotServed as error:
            return "not served", str(error)
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
        return ("red", reason) if reason else ("green", None)

    def _other_bits(self) -> str | None:
        """Which operand a call leaves with other bits than today's kernels do; None when none."""
        operands, op = self.operator.sets[0], self.case.kernels.op
        tensors = {name: _tensors(operands[name]) for name in (*op.writes, "sumsq")}
        before, found = {name: _copies(ts) for name, ts in tensors.items()}, []
        for kernels in self.contenders.values():
            for name, copies in before.items():
                for tensor, copy in zip(tensors[name], copies, strict=True):
                    tensor.copy_(copy)
            op.call(kernels, operands)
            found.append({name: _copies(ts) for name, ts in tensors.items()})
        same = {name: all(map(_same, found[0][name], found[1][name])) for name in tensors}
        different = [name for name, equal in same.items() if not equal]
        return f"other bits than today's kernels in {', '.join(different)}" if different else None

    def _sample(self, kernels: Any) -> Callable[[], float]:
        """Seconds per call: on CUDA of a graph with one call per set."""
        call, sets = self.case.kernels.op.call, self.operator.sets

        def every() -> None:
            for operands in sets:
                call(kernels, operands)

        every()
        body = self.machine.capture(every) if self.machine.cuda else every
        cold = len(sets) == MAX_SETS
        return lambda: self.machine.sample(body, cold, queued=True) / len(sets)


def _tensors(operand: Any) -> list[Tensor]:
    return [operand] if isinstance(operand, Tensor) else list(operand)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _same(a: Tensor, b: Tensor) -> bool:
    integers = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.view(integers), b.view(integers))


if __name__ == "__main__":
    sys.exit(main())
