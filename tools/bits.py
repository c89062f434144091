"""Comparison of two commits on one machine: weights and records bit by bit, and the time of a round.

    python tools/bits.py --against main             every case of tools/bits_*.py
    python tools/bits.py --against main --only vmap  the cases with one of these texts in their names
    python tools/bits.py --against main --time       the time of the timed cases, this tree relative to the other

The exit code is 1 if a case differs, or if a case raises an error in this tree. A case that must be refused returns the
refusal as its outcome. A case that only the other tree cannot run is left out, and a line says so.

The other commit is checked out into a temporary git worktree. Each tree has one process, in which the scripts of this
tree run the cases on the package and with the test helpers of that tree. A module `tools/bits_NAME.py` offers
`cases()`, which yields the name of a case and a function that returns hashes by name: one for each tensor and each key
of the records. Or it offers `timings()`, which yields a name and a function that returns seconds.

No hash is stored, because the bits of float32 depend on the processor.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[1]
sys.path.append(str(ROOT))  # after PYTHONPATH, which has the package of a worker

from bench.fed.process import Process, answers  # noqa: E402

TURNS = 15  # pairs of measurements in a timed comparison
ERROR = "error"  # name of the outcome of a case that raised
SHOWN = 6  # hashes of a case that are printed
DEVICES = Path("tests/helpers/fake_devices.py")  # the stand-in for CUDA


class Worker(Process):
    """A process that runs the cases of this tree's scripts on the package of `tree`."""

    def __init__(self, tree: Path, links: Path) -> None:
        links.mkdir()
        (links / "fastsam").symlink_to(tree / "fastsam")
        (links / "fastsam_kernels").symlink_to(tree / "kernels")
        (links / "tests").symlink_to(tree / "tests")
        if not (tree / DEVICES).exists():  # a commit from before this file
            shutil.copy2(ROOT / DEVICES, tree / DEVICES)
        environment = {"PYTHONPATH": str(links)}
        _provide_kernels(tree, environment)
        # Processes of ranks look for modules in the working directory first.
        super().__init__([sys.executable, str(SCRIPT), "--worker"], environment, links)
        self.names: dict[str, list[str]] = self.answer()


def _provide_kernels(tree: Path, environment: dict[str, str]) -> None:
    """Copy the compiled kernels of this tree into `tree`, or compile them there if its C++ sources differ."""
    if tree != ROOT:
        for path in (*(ROOT / "kernels").glob("*.so"), ROOT / "kernels" / "native.json"):
            shutil.copy2(path, tree / "kernels")
    check = "import sys; from fastsam_kernels import build; sys.exit(not build.installed().paths)"
    environment = os.environ | environment
    if subprocess.run([sys.executable, "-c", check], env=environment, cwd=tree).returncode:
        print(f"compiling the kernels in {tree}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "fastsam_kernels.build"], env=environment, cwd=tree, check=True)


@contextmanager
def check_out(revision: str, folder: Path) -> Iterator[Path]:
    """Check `revision` out into a worktree in `folder` for the duration of the context."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def compare_bits(new: Worker, old: Worker, texts: Collection[str]) -> int:
    """Print every case that differs between the two trees or raises an error in this one; return the number of them."""
    names = [name for name in new.names["case"] if any(text in name for text in texts)]
    problems = left_out = 0
    for name in names:
        if name not in old.names["case"]:
            left_out += 1
            print(f"{name}: left out, the other tree does not have it", flush=True)
            continue
        for worker in (new, old):
            worker.send(["case", name])
        new_answer, old_answer = new.answer(), old.answer()
        if ERROR in new_answer:
            problems += 1
            print(f"{name}: raised {new_answer[ERROR]}", flush=True)
        elif ERROR in old_answer:
            left_out += 1
            print(f"{name}: left out, the other tree raised {old_answer[ERROR]}", flush=True)
        elif new_answer != old_answer:
            problems += 1
            print(f"{name}\n{describe_difference(new_answer, old_answer)}", flush=True)
    print(f"{len(names)} cases, {problems} with differences or errors, {left_out} left out")
    return problems


def describe_difference(new: Mapping[str, str], old: Mapping[str, str]) -> str:
    """Return the names whose values differ, the first of them with their values, and how many are equal."""
    names = [name for name in new | old if new.get(name) != old.get(name)]
    lines = [f"    {name}: here {new.get(name)}, there {old.get(name)}" for name in names[:SHOWN]]
    lines += [f"    and {', '.join(names[SHOWN:])}"] if names[SHOWN:] else []
    return "\n".join([*lines, f"    {len(new | old) - len(names)} others are equal"])


def compare_times(new: Worker, old: Worker, texts: Collection[str]) -> None:
    """Print for every timed case the median time in both trees and the quartiles of their ratio, taken in turns."""
    print(f"{'':40s} {'here':>10s} {'there':>10s}   here / there (quartiles)")
    for name in (name for name in new.names["time"] if any(text in name for text in texts)):
        times: list[tuple[float, float]] = []
        for turn in range(TURNS + 1):
            samples = {}
            for worker in (new, old) if turn % 2 else (old, new):
                samples[worker] = worker.order(["time", name])
                if isinstance(samples[worker], dict):
                    raise RuntimeError(f"{name} raised {samples[worker][ERROR]}")
            if turn:  # the first one warms up
                times.append((samples[new], samples[old]))
        low, middle, high = statistics.quantiles([a / b for a, b in times], n=4)
        new_ms, old_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:40s} {new_ms:7.2f} ms {old_ms:7.2f} ms   {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


def work() -> None:
    """Serve as a worker, which writes the names of its cases and runs the cases that standard input names."""
    answer = answers()
    torch.set_num_threads(1)
    functions: dict[str, dict[str, Callable[[], Any]]] = {"case": {}, "time": {}}
    for path in sorted(SCRIPT.parent.glob("bits_*.py")):
        module = importlib.import_module(f"tools.{path.stem}")
        for kind, generator in (("case", "cases"), ("time", "timings")):
            functions[kind].update(getattr(module, generator, list)())
    answer({kind: list(table) for kind, table in functions.items()})
    for line in sys.stdin:
        kind, name = json.loads(line)
        try:
            outcome = functions[kind][name]()
        except Exception as error:  # one case ends, and the others go on
            outcome = {ERROR: f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        answer(outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the bits or the speed of this tree with another commit.")
    parser.add_argument("--against", metavar="REV", default="main", help="the other commit (default: main)")
    parser.add_argument(
        "--only", metavar="TEXT", nargs="+", default=[""], help="cases with one of these in their names"
    )
    parser.add_argument("--time", action="store_true", help="compare times in place of bits")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tree = stack.enter_context(check_out(options.against, folder))
        workers = [Worker(ROOT, folder / "here"), Worker(tree, folder / "there")]
        for worker in workers:
            stack.callback(worker.close)
        if options.time:
            compare_times(*workers, options.only)
            return 0
        return int(compare_bits(*workers, options.only) > 0)


if __name__ == "__main__":
    sys.exit(main())
