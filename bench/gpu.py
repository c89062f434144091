"""Everything that a GPU can show, in one call: `make gpu OUT=DIR`, or `python bench/gpu.py --out DIR`.

Meant for a bare machine with torch, Triton and nvcc and no network, within ten minutes: it installs nothing and works
in a copy of the sources, build/gpu, which stays, so that a later call compiles what changed. Parts come by what they
are worth, those that look for errors before those that take times. Each is a process of its own with its share of the
time; one that fails does not hide the others. Without a GPU the parts that need none are run, and the others are named
with the reason: so this script is kept working.

Writes to DIR: summary.md (its first part also printed, last), gpu.json, log.txt (the output of every part), and the
benchmarks' own files: at most eight, and no plot, which is drawn from them afterwards
(`python -m bench.report FILE --plot DIR`). Standard library only, so that whatever is broken in the environment is
reported instead of stopping the script.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # started as a script, Python looks for modules beside this file; ours are named from the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.gpu_facts import ROOT, facts
from bench.gpu_report import Outcome, write
from bench.variants import report as variants

# Copied as they are; kernels/ comes under its installed name. The last three are read by tests when they are collected.
PACKAGES = ("fastsam", "csrc", "bench", "tests", "tools", "docs", "examples")
NOT_SOURCES = ("__pycache__", "*.so", "native.json", "results")
WORK = ROOT / "build" / "gpu"
TOTAL_SECONDS = 570
GRACE = 15  # seconds of its limit, at most, that a part has when it is interrupted: pytest tells its failures then
PATIENCE = (
    5  # times as long for everything where there is no GPU: nobody waits for it, and the machine may be small or busy
)
LIMIT = "SECONDS"  # stands in a command for the time that the part has, less what it needs to end
INTERRUPTED = ("Traceback (most recent call last)", "KeyboardInterrupt")  # what Python says of it
OK, FAILED, TIMED_OUT, LEFT_OUT = "passed", "failed", "timed out", "left out"


@dataclass
class Place:
    """Where the parts run, and what is there."""

    work: Path
    out: Path
    gpu: str | None  # its name
    capability: str | None  # such as "9.0"
    nvcc: str | None
    deadline: float
    commit: str = "unknown"
    patience: int = 1  # times the limits of the parts


@dataclass
class Part:
    """A command, what must be there for it, and its share of the time in seconds; None: what the parts before it did
    not need."""

    name: str
    title: str
    argv: Callable[[Place], Sequence[str]]
    seconds: int | None
    why_not: Callable[[Place], str | None] = lambda place: None
    env: dict[str, str] = field(default_factory=dict)


# --- the parts ---


def needs_gpu(place: Place) -> str | None:
    return None if place.gpu else "torch sees no CUDA device"


def needs_nvcc(place: Place) -> str | None:
    return None if place.nvcc else "nvcc is not installed"


def without_gpu(place: Place) -> str | None:
    """Parts that every machine can run are not given the time of a GPU."""
    return "runs where there is no GPU" if place.gpu else None


def needs_sanitizer(place: Place) -> str | None:
    return needs_gpu(place) or (None if _sanitizer() else "compute-sanitizer is not installed")


def _sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def _build(place: Place) -> list[str]:
    # For the GPU that is there; the part "compile" builds for all of them.
    cuda = "--cuda" if place.gpu and place.nvcc else "--no-cuda"
    return [sys.executable, "-m", "fastsam_kernels.build", cuda]


def _pytest(*arguments: str) -> Callable[[Place], list[str]]:
    parallel = ["-n", str(min(os.cpu_count() or 1, 8))] if importlib.util.find_spec("xdist") else []
    options = ["--continue-on-collection-errors", *parallel]
    # What one worker has compiled serves the others, and later runs in this folder.
    return lambda place: [
        sys.executable, "-m", "pytest", "-q", "-ra", "-o", f"cache_dir={place.work / 'build' / 'pytest-cache'}",
        *options, *arguments
    ]  # fmt: skip


def _sanitize(tool: str) -> Callable[[Place], list[str]]:
    # Errors of the API are raised anyway; torch also tries what a driver may refuse.
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    return lambda place: [str(_sanitizer()), *options, sys.executable, str(place.work / "tests/gpu/sanitized.py")]


def _bench(module: str, *arguments: str) -> Callable[[Place], list[str]]:
    return lambda place: [sys.executable, "-m", f"bench.{module}", *arguments, "--out", str(place.out)]


OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that a tensor's end is an allocation's end
SMALL = ("--quick", "--sizes", "50k,rows100,cut10", "--ops", "norm,perturb,update")  # that the script works, no result
# Where tests marked `gpu` are: all others would be imported by every worker, for half a minute.
GPU_TESTS = ("tests/gpu", "tests/ops", "tests/optim", "tests/fed/executors/test_streams.py",
    "tests/fed/loop/test_client_state.py",
             "tests/fed/loop/test_client_state_store.py", "tests/fed/data/test_augment.py")  # fmt: skip


def _kernels(*arguments: str) -> Callable[[Place], list[str]]:
    """All of them into one file."""
    return _bench("kernels", "--device", "cuda", "--seconds", LIMIT, "--add", *arguments)


def needs_gpu_and_nvcc(place: Place) -> str | None:
    return needs_gpu(place) or needs_nvcc(place)


PARTS = (
    Part("build", "build the libraries", _build, 120),
    Part("native", "tests of the compiled kernels", _pytest(*GPU_TESTS, "-m", "gpu", "-k", "not triton"), 75,
        needs_gpu),
    Part("memcheck", "compute-sanitizer memcheck", _sanitize("memcheck"), 40, needs_sanitizer, OWN_ALLOCATIONS),
    Part("steps", "whole steps, native, beside peers that nobody compiles",
         _kernels("--parts", "steps", "--backends", "native", "--compile", "without"), 55, needs_gpu),
    Part("ops", "every kernel, native", _kernels("--parts", "ops", "--backends", "native"), 60, needs_gpu),
    Part("federated", "federated benchmark", _bench("federated", "--device", "cuda", "--seconds", LIMIT), 80,
        needs_gpu),
    Part("racecheck", "compute-sanitizer racecheck", _sanitize("racecheck"), 30, needs_sanitizer),
    Part("triton", "tests of the Triton kernels", _pytest(*GPU_TESTS, "-m", "gpu", "-k", "triton"), 45, needs_gpu),
    Part("compiled", "whole steps, native, beside torch.compile",
         _kernels("--parts", "steps", "--backends", "native", "--compile", "only"), 40, needs_gpu),
    Part("variants", "kernel variants beside today's", _bench("variants", "--device", "cuda", "--seconds", LIMIT), 25,
         needs_gpu_and_nvcc),
    Part("bench-cpu", "the benchmark, on the CPU", _bench("kernels", "--device", "cpu", *SMALL), 120, without_gpu),
    Part("compile", "machine code for every architecture",
         _pytest("tests/cuda/test_cuda_compile.py", "tests/cuda/test_sass.py", "tests/bench/test_variants_compile.py"),
         400,
         lambda place: without_gpu(place) or needs_nvcc(place)),
    Part("emulation", "CUDA kernels in the emulation",
         _pytest("tests/cuda/test_cuda_emulated.py", "tests/bench/test_variants_emulated.py", "-m", "not slow"), 400,
         without_gpu),
    Part("triton-kernels", "every kernel, Triton", _kernels("--backends", "triton", "--compile", "without"), None,
        needs_gpu),
    Part("synccheck", "compute-sanitizer synccheck", _sanitize("synccheck"), None, needs_sanitizer),
)  # fmt: skip


# --- running them ---


@contextlib.contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Two runs never work in one folder at a time. Raises OSError where one does, or the folder cannot be written."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def copy_tree(work: Path) -> None:
    """The checkout's Python and C++ sources, with kernels/ under the name it is installed as. What is the same stays,
    with the time of its last
    change: compilers' outputs are newer than that. What the checkout has no more goes."""
    for name in PACKAGES:
        _copy(ROOT / name, work / name)
    _copy(ROOT / "kernels", work / "fastsam_kernels")
    _copy(ROOT / "pyproject.toml", work / "pyproject.toml")


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        if not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
            shutil.copyfile(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns(*NOT_SOURCES)
    names, there = ({path.name for path in folder.iterdir()} for folder in (source, target))
    for name in names - ignored(str(source), list(names)):
        _copy(source / name, target / name)
    for name in there - names - ignored(str(target), list(there)):
        shutil.rmtree(target / name) if (target / name).is_dir() else (target / name).unlink()


def run_part(part: Part, place: Place) -> Outcome:
    """Runs it with its output appended to the log; never raises for what the part does. It gets its share, or what is
    left where that is less."""
    outcome = Outcome(part.name, part.title, LEFT_OUT)
    outcome.reason = part.why_not(place) or ""
    remaining = place.deadline - time.monotonic()
    if not outcome.reason and remaining < 10:
        outcome.reason = f"no time left of {TOTAL_SECONDS * place.patience} s"
    if outcome.reason:
        return outcome
    limit = remaining if part.seconds is None else min(part.seconds * place.patience, remaining)
    argv = [word.replace(LIMIT, str(int(0.8 * limit))) for word in part.argv(place)]
    words = [Path(argv[0]).name, *argv[1:]]
    outcome.command = shlex.join(words).replace(str(place.work), ".").replace(str(place.out), "OUT")
    log = place.out / "log.txt"
    with open(log, "a") as file:
        file.write(f"\n===== {part.name}: {outcome.command}\n")
    start, offset = time.monotonic(), log.stat().st_size
    outcome.state, outcome.reason = _execute(argv, place, part.env, limit)
    outcome.seconds = round(time.monotonic() - start, 1)
    for half in place.out.glob("part-*"):  # of a file that was being written when the part was stopped
        half.unlink()
    with open(log, errors="replace") as file:
        file.seek(offset)
        outcome.result = last_word(file.read())
    return outcome


def last_word(output: str) -> str:
    """The last line that is not blank, indented or about an interruption, without colours and rules."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()
    said = [line.strip("= ") for line in lines if line.strip("= ") and not line.startswith((" ", *INTERRUPTED))]
    return said[-1] if said else ""


def _execute(argv: Sequence[str], place: Place, env: dict[str, str], limit: float) -> tuple[str, str]:
    """The state and the reason. A part that runs into its limit is interrupted, and then stopped with all that it
    started."""
    arch = {"TORCH_CUDA_ARCH_LIST": place.capability} if place.capability else {}  # the others compile elsewhere
    paths = [str(place.work), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages of the machine may be in theirs
    fixed = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "FASTSAM_COMMIT": place.commit,
    }
    environment = {**os.environ, **fixed, **arch, **env}
    with open(place.out / "log.txt", "a") as log:
        try:
            process = subprocess.Popen(
                argv, cwd=place.work, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return FAILED, f"cannot be started: {error}"
        grace = min(GRACE, limit / 6)
        try:
            code = process.wait(limit - grace)
        except subprocess.TimeoutExpired:
            _stop(process, grace)
            return TIMED_OUT, f"stopped after {limit:.0f} s"
    return (OK, "") if code == 0 else (FAILED, f"exit code {code}")


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ctrl-C first, so that it can say what it knows; then the end for it and for all that it started."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- all of it ---


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing failed; parts that were left out do not count."""
    parser = argparse.ArgumentParser(prog="python bench/gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: runs/gpu")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="default: build/gpu")
    names = [part.name for part in PARTS]
    told = f"comma-separated, of {', '.join(names)}; build comes always"
    parser.add_argument("--parts", default=",".join(names), help=told)
    options = parser.parse_args(argv)
    chosen = {"build", *options.parts.split(",")}
    if unknown := chosen.difference(names):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    for old in (*out.glob("kernels-*.json"), *out.glob("federated*.json"), *out.glob(variants.FILE)):  # of another run
        old.unlink()
    start, environment = time.monotonic(), facts()
    outcomes: list[Outcome] = []
    gpu, capability, nvcc = (
        str(environment[name]) if environment[name] else None for name in ("gpu", "capability", "nvcc")
    )
    patience = 1 if gpu else PATIENCE
    page = write(out, environment, outcomes)
    work = options.work.resolve()
    try:
        with alone_in(work):
            commit, deadline = str(environment.get("commit", "unknown")), start + TOTAL_SECONDS * patience
            place = Place(work, out, gpu, capability, nvcc, deadline, commit, patience)
            copy_tree(work)
            for part in (part for part in PARTS if part.name in chosen):
                print(f"{part.title} ...", flush=True)
                outcomes.append(run_part(part, place))
                print(f"  {outcomes[-1].state} {outcomes[-1].reason} {outcomes[-1].result}", flush=True)
                page = write(out, environment, outcomes)
    except OSError as error:
        parser.error(f"cannot work in {work}: {error}. Another call may be at it; --work takes another folder")
    print(f"\n{page}\nwritten: {out}", flush=True)
    return 1 if any(o.state in (FAILED, TIMED_OUT) for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
