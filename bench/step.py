"""Measures the optimizer part of a SAM step: `python -m bench.step` (`make bench`), or `python bench/step.py`.

Prints a table per size and number of threads, and writes `step.json` and `step.png` into `--out` (by default a new
folder below `runs/`; published results are written deliberately, by `python -m bench.report FILE --publish`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started as a script, Python looks for modules next to this file; ours are named from the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from bench import environment, family, plots, report, tables
from bench.contenders import Contender, choose, contenders, split
from bench.problem import FLOOR_BYTES, LR, MOMENTUM, RHO, SIZES, WEIGHT_DECAY, Size
from bench.timing import Machine, intra_op_threads
from bench.whole_steps import StepBench

QUICK_SHARE = 5  # --quick takes a fifth of the rounds
BUSY = 0.1  # processors used by others from which a measurement is called disturbed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="folder for step.json and step.png (default: a new one below runs/)")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds, and nobody who compiles for long")
    parser.add_argument("--variants", action="store_true", help="SAM's variants instead of ways to do SAM: family.json")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"comma-separated, of {', '.join(SIZES)}")
    names = list(contenders())
    parser.add_argument("--contenders", default=",".join(names), help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument("--threads", default="1,2", help="comma-separated numbers of intra-op threads (default 1,2)")
    parser.add_argument("--rounds", help="rounds per size and number of threads (default: the size's own)")
    arguments = parser.parse_args(argv)
    try:
        arguments.sizes = choose(SIZES, split(arguments.sizes), "size")
        arguments.contenders = choose(contenders(), split(arguments.contenders), "contender")
        arguments.threads = [_positive(n, "--threads") for n in split(arguments.threads)]
        arguments.rounds = arguments.rounds and _positive(arguments.rounds, "--rounds")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _positive(text: str, option: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{option} takes whole numbers from 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every contender that could be measured agreed with the reference, 1 when one did not."""
    arguments = parse(argv)
    record: dict[str, Any] = {
        "kind": tables.FAMILY if arguments.variants else tables.STEP,
        "environment": environment.facts(environment.command_line("bench.step")),
        "problem": {"rho": RHO, "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "dtype": "float32"},
        "floor_bytes_per_parameter": FLOOR_BYTES,
        "results": [],
    }
    machine = Machine(torch.device("cpu"))
    for size, threads in itertools.product(arguments.sizes, arguments.threads):
        rounds = arguments.rounds or max(size.rounds // (QUICK_SHARE if arguments.quick else 1), 3)
        with intra_op_threads(threads):
            if arguments.variants:
                result = family.measure(machine, size, rounds)
            else:
                chosen = [c for c in arguments.contenders if not (arguments.quick and c.compiles)]
                result = measure(machine, size, chosen, rounds)
        result |= {"threads": threads}
        record["results"].append(result)
        print(report.on_terminal(record, result), flush=True)
        if result["busy_others"] > (os.cpu_count() or 1) - threads + BUSY:
            print(f"disturbed: other processes used {result['busy_others']:.2f} processors; trust ratios only")
    out = arguments.out or _new_directory()
    path = out / tables.file_name(record)
    environment.write(record, path)
    written = [path, *([] if arguments.variants else plots.draw(record, out))]
    print("written:", *written)
    red = {row["name"] for row in tables.rows_of(record) if row.get("gate") == "red"}
    if red:
        print(f"not measured, because wrong: {', '.join(sorted(red))}")
    return 1 if red else 0


def measure(machine: Machine, size: Size, chosen: Sequence[Contender], rounds: int) -> dict[str, Any]:
    """Return the result of one size as it goes into the JSON.

    A row has seconds per step, the fraction of the floor, and the ratios to the yardsticks that were measured.
    """
    rows, taken = StepBench(chosen, size.shapes, machine, rotate=False, steps=size.steps).run(rounds, float("inf"))
    for key in taken.seconds:
        found = taken.figures(key, FLOOR_BYTES * size.parameters)
        row = rows[key.split()[0]]
        row |= {"seconds": found["seconds"], "floor_fraction": found["fraction"]}
        for yardstick in ("copied", "flat"):
            if f"{yardstick} eager" in taken.seconds:
                row[f"to_{yardstick}"] = taken.ratio(key, f"{yardstick} eager")
    return {
        **size.facts, "rounds": rounds, "steps_per_sample": size.steps, "busy_others": round(taken.others, 3),
        "copy_bytes_per_second": taken.facts["copy"], "contenders": list(rows.values()),
    }  # fmt: skip


def _new_directory() -> Path:
    from fastsam.lab.cli import numbered_directory

    return numbered_directory("bench", resume=False)


if __name__ == "__main__":
    sys.exit(main())
