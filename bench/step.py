"""Measures the optimizer part of a SAM step: `python -m bench.step` (`make bench`), or `python bench/step.py`.

Prints a table per size and number of threads, and writes `step.json` and `step.png` into `--out` (by default a new
folder below `runs/`; published results are written deliberately, with `--out bench/results`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # started as a script, Python looks for modules beside this file; ours are named from the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import environment, family, gate, memory, report
from bench.cases import choose
from bench.contenders import Contender, Stepper, contenders
from bench.problem import FLOOR_BYTES, LR, MOMENTUM, RHO, SIZES, WEIGHT_DECAY, Gradients, Size, initial_weights
from bench.timing import Clock, Drive, Rounds, Summary, measure

QUICK_SHARE = 5  # --quick takes a fifth of the rounds
BUSY = 0.1  # processors used by others from which a measurement is called disturbed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="folder for step.json and step.png (default: a new one below runs/)")
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of the rounds, and without the contenders that compile for long"
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="SAM's variants beside each other, in place of the ways to do SAM: family.json",
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument(
        "--contenders", default=",".join(contenders()), help=f"comma-separated, of {', '.join(contenders())}"
    )
    parser.add_argument("--threads", default="1,2", help="comma-separated numbers of intra-op threads (default 1,2)")
    parser.add_argument("--rounds", type=int, help="rounds per size and number of threads (default: the size's own)")
    arguments = parser.parse_args(argv)
    try:
        arguments.sizes = choose(SIZES, _split(arguments.sizes), "size")
        arguments.contenders = choose(contenders(), _split(arguments.contenders), "contender")
        arguments.threads = [_positive(n, "--threads") for n in _split(arguments.threads)]
        if arguments.rounds is not None:
            _positive(str(arguments.rounds), "--rounds")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _positive(text: str, option: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{option} takes whole numbers from 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every contender that could be measured agreed with the reference, 1 when one did not."""
    arguments = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record: dict[str, Any] = {
        "kind": report.KIND,
        "environment": environment.facts(environment.command_line("bench.step")),
        "problem": {"rho": RHO, "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "dtype": "float32"},
        "floor_bytes_per_parameter": FLOOR_BYTES,
        "results": [],
    }
    if arguments.variants:
        return _variants(arguments, console)
    for size in arguments.sizes:
        bench = Bench(size, arguments.contenders, arguments.quick, arguments.rounds)
        for threads in arguments.threads:
            with progress_bar(console) as progress, intra_op_threads(threads):
                result = bench.run(threads, progress)
            record["results"].append(result)
            console.print(report.rich_table(result))
            for reason in report.reasons([result]):
                console.print(f"not measured: {reason}", soft_wrap=True, highlight=False, markup=False)
            _warn_of_noise(result, console)
    out = arguments.out or _new_directory()
    report.write(record, out)
    console.print(f"written: {out / report.JSON} {out / report.PNG}", soft_wrap=True, highlight=False)
    red = [row["name"] for result in record["results"] for row in result["contenders"] if row["gate"] == "red"]
    if red:
        console.print(f"not measured, because wrong: {', '.join(sorted(set(red)))}", style="red")
    return 1 if red else 0


def _variants(arguments: argparse.Namespace, console: Console) -> int:
    """`bench.family` on every size and number of threads."""
    record: dict[str, Any] = {
        "kind": family.KIND,
        "environment": environment.facts(environment.command_line("bench.step")),
        "results": [],
    }
    for size, threads in itertools.product(arguments.sizes, arguments.threads):
        rounds = arguments.rounds or max(size.rounds // (QUICK_SHARE if arguments.quick else 1), 3)
        with progress_bar(console) as progress, intra_op_threads(threads):
            task = progress.add_task(f"{size.name}, {report.threads_of(threads)}", total=rounds)
            result = family.run(size, threads, rounds, lambda: progress.advance(task))  # noqa: B023
        record["results"].append(result)
        console.print(family.rich_table(result))
        _warn_of_noise(result, console)
    out = (arguments.out or _new_directory()) / "family.json"
    environment.write(record, out)
    console.print(f"written: {out}", soft_wrap=True, highlight=False)
    return 0


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Bench:
    """The contenders on one size."""

    def __init__(
        self, size: Size, contenders: Sequence[Contender], quick: bool = False, rounds: int | None = None
    ) -> None:
        self.size, self.contenders = size, contenders
        self.rounds = rounds or (max(size.rounds // QUICK_SHARE, 3) if quick else size.rounds)
        self.left_out = {c.name: reason for c in contenders if (reason := _left_out(c, quick)) is not None}
        self.weights, self.gradients = initial_weights(size.shapes), Gradients(size.shapes)
        self.extra_bytes: dict[str, int] = {}  # does not depend on the number of threads

    def run(self, threads: int, progress: Progress) -> dict[str, Any]:
        """Gate, memory and rounds with one number of threads; the result as it goes into the JSON."""
        size, task = self.size, progress.add_task("", total=None)

        def show(what: str) -> None:
            progress.update(task, description=f"{size.name}, {report.threads_of(threads)}: {what}", refresh=True)

        running = [c for c in self.contenders if c.name not in self.left_out]
        green, red = gate.check(running, self.weights, self.gradients, lambda c: show(f"getting {c.name} ready"))
        rows = {c.name: self._row(c, green, red, show) for c in self.contenders}
        progress.update(task, total=self.rounds, completed=0)
        clock = Clock()
        drives = {name: Drive(stepper, self.gradients, clock) for name, stepper in green.items()}

        def tick() -> None:
            progress.advance(task)
            show("rounds")

        taken = measure(drives, size.steps, self.rounds, tick)
        for name in green:
            rows[name] |= _figures(taken, name, size)
        return {
            "size": size.name, "title": size.title, "tensors": len(size.shapes), "parameters": size.parameters,
            "threads": threads,
            "rounds": self.rounds, "steps_per_sample": size.steps, "busy_others": round(taken.others, 3),
            "copy_bytes_per_second": asdict(Summary.of(taken.copy)), "contenders": list(rows.values()),
        }  # fmt: skip

    def _row(
        self, contender: Contender, green: dict[str, Stepper], red: dict[str, str], show: Callable[[str], None]
    ) -> dict[str, Any]:
        """What is known of a contender before it is timed."""
        name = contender.name
        state = "green" if name in green else "red" if name in red else "not run"
        row: dict[str, Any] = {"name": name, "title": contender.title, "ours": contender.ours, "gate": state}
        if name not in green:
            return row | {"reason": red.get(name) or self.left_out[name]}
        if name not in self.extra_bytes:
            show(f"memory of {name}")
            self.extra_bytes[name] = memory.peak_extra_bytes(contender, self.weights, self.gradients)
        return row | {"extra_bytes_per_parameter": round(self.extra_bytes[name] / self.size.parameters, 2)}


def _left_out(contender: Contender, quick: bool) -> str | None:
    if quick and contender.compiles:
        return "left out by --quick"
    return contender.why_not()


def _figures(taken: Rounds, name: str, size: Size) -> dict[str, Any]:
    """Seconds per step, ratios to the two yardsticks where they were measured, and the fraction of the floor that is
    reached."""
    seconds = taken.seconds[name]
    floors = [FLOOR_BYTES * size.parameters / bandwidth for bandwidth in taken.copy]
    found = {"seconds": asdict(Summary.of(seconds)), "floor_fraction": asdict(Summary.of_ratios(floors, seconds))}
    for yardstick in ("copied", "flat"):
        if yardstick in taken.seconds:
            found[f"to_{yardstick}"] = asdict(Summary.of_ratios(seconds, taken.seconds[yardstick]))
    return found


def _warn_of_noise(result: dict[str, Any], console: Console) -> None:
    spare = (os.cpu_count() or 1) - result["threads"]
    if result["busy_others"] > spare + BUSY:
        console.print(
            f"disturbed: other processes used {result['busy_others']:.2f} processors while {result['threads']} of "
            f"{os.cpu_count()} were measured; only the ratios within this table mean something",
            style="yellow",
        )


def progress_bar(console: Console | None) -> Progress:
    """On a terminal only; nothing with None."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Redrawn by `advance` alone: the thread that would redraw in between would take its time from what is measured.
    return Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=console is None or not console.is_terminal,
    )


def _new_directory() -> Path:
    from fastsam.lab.cli import numbered_directory

    return numbered_directory("bench", resume=False)


if __name__ == "__main__":
    sys.exit(main())
