"""Everything that a GPU can show, in four calls: `make gpu ARGS="--call 1" OUT=DIR`, or `python bench/gpu.py`.

Meant for a bare machine with torch, Triton, numpy, pytest, safetensors, hypothesis and nvcc, without a network, and for
ten minutes a call. It installs nothing and works in a copy of the sources, build/gpu, which stays, so that a later call
on the same machine compiles only what changed. Each part is a separate process with a share of the call's time: a part
that fails does not hide the rest. Without a GPU the parts that need none run, and the rest is named with the reason.

A call writes to DIR: summary.md (its first part is also printed), gpu.json, log.txt (the output of every part), and the
benchmarks' files: at most eight. `python bench/gpu.py --merge DIR... --out FILE` makes one file of the calls' files,
from which `python -m bench.report --publish` makes the pages. Standard library only: a broken environment is reported.
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

if not __package__:  # Python looks for modules in the folder of a script; ours are named from the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.gpu_facts import ROOT, facts
from bench.gpu_report import FILES, Outcome, merge, write

# Copied as they are; kernels/ comes under its installed name. The last three are read by tests when they are collected.
PACKAGES = ("fastsam", "csrc", "bench", "tests", "tools", "docs", "examples")
NOT_SOURCES = ("__pycache__", "*.so", "native.json", "results")
WORK = ROOT / "build" / "gpu"
TOTAL_SECONDS = 570  # of a call
GRACE = 15  # seconds of its limit, at most, that a part has when it is interrupted: pytest tells its failures then
PATIENCE = 5  # times as long for everything where there is no GPU, because such a machine may be small or busy
ABSENT = 77  # exit code of a part that finds out that it cannot run here; its last line says why
LIMIT = "SECONDS"  # replaced in a command by the seconds that the part has, less what it needs to end
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


WhyNot = Callable[[Place], "str | None"]


@dataclass
class Part:
    """A command, what must be there for it, and the weight of its share of the call's time.

    is_test: the part has failed if no test passed.
    """

    name: str
    title: str
    argv: Callable[[Place], Sequence[str]]
    weight: int
    why_not: WhyNot = lambda place: None
    env: dict[str, str] = field(default_factory=dict)
    is_test: bool = False


# --- the parts ---


def needs_gpu(place: Place) -> str | None:
    return None if place.gpu else "no GPU: torch sees no CUDA device"


def without_gpu(place: Place) -> str | None:
    """Parts that every machine can run are not given the time of a GPU."""
    return "runs where there is no GPU" if place.gpu else None


def needs_nvcc_alone(place: Place) -> str | None:
    return without_gpu(place) or (None if place.nvcc else "nvcc is not installed")


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
    # Verbose, so that the log of a killed part says which tests had ended. The cache serves workers and later runs.
    return lambda place: [
        sys.executable, "-m", "pytest", "-v", "-ra", "-o", f"cache_dir={place.work / 'build' / 'pytest-cache'}",
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


def _tests(name: str, title: str, weight: int, *arguments: str, why_not: WhyNot = needs_gpu) -> Part:
    return Part(name, title, _pytest(*arguments), weight, why_not, is_test=True)


PARTS = (
    Part("build", "build the libraries", _build, 150),
    _tests("smoke", "smoke test: every backend, graph and row program", 20, "tests/gpu/test_smoke.py"),
    Part("memcheck", "compute-sanitizer memcheck", _sanitize("memcheck"), 80, needs_sanitizer, OWN_ALLOCATIONS),
    _tests("native", "tests of the compiled kernels", 110, *GPU_TESTS, "-m", "gpu", "-k", "not triton"),
    Part("steps", "whole steps, native, and peers that nobody compiles",
         _kernels("--parts", "steps", "--backends", "native", "--compile", "without"), 90, needs_gpu),
    Part("ops", "every kernel, native", _kernels("--parts", "ops", "--backends", "native"), 100, needs_gpu),
    Part("federated", "federated rounds", _bench("federated", "--device", "cuda", "--seconds", LIMIT), 400, needs_gpu),
    Part("family", "variants of SAM", _bench("family", "--seconds", LIMIT), 120, needs_gpu),
    Part("racecheck", "compute-sanitizer racecheck", _sanitize("racecheck"), 100, needs_sanitizer),
    _tests("triton", "tests of the Triton kernels", 150, *GPU_TESTS, "-m", "gpu", "-k", "triton"),
    Part("ncu", "Nsight Compute: throughput, occupancy, stalls", _bench("ncu"), 80, needs_gpu),
    Part("compiled", "whole steps, native, and torch.compile",
         _kernels("--parts", "steps", "--backends", "native", "--compile", "only"), 150, needs_gpu),
    Part("triton-kernels", "every kernel, Triton", _kernels("--backends", "triton", "--compile", "without"), 150,
         needs_gpu),
    Part("synccheck", "compute-sanitizer synccheck", _sanitize("synccheck"), 80, needs_sanitizer),
    Part("bench-cpu", "the benchmark, on the CPU", _bench("kernels", "--device", "cpu", *SMALL), 120, without_gpu),
    _tests("compile", "machine code for every architecture", 400,
           "tests/cuda/test_cuda_compile.py", "tests/cuda/test_sass.py", why_not=needs_nvcc_alone),
    _tests("emulation", "CUDA kernels in the emulation", 400,
           "tests/cuda/test_cuda_emulated.py", "-m", "not slow", why_not=without_gpu),
)  # fmt: skip
# What each call runs after the build.
CALLS = {
    1: ("smoke", "memcheck", "native", "steps", "ops"),
    2: ("federated",),
    3: ("family", "racecheck", "triton", "ncu"),
    4: ("compiled", "triton-kernels", "synccheck", "bench-cpu", "compile", "emulation"),
}


# --- running them ---


@contextlib.contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Lock the folder for one run. Raises OSError if another run has it, or if the folder cannot be written."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def copy_tree(work: Path) -> None:
    """Copy the checkout's Python and C++ sources, with kernels/ under the name it is installed as. What is the same
    stays, with the time of its last change: compilers' outputs are newer than that. What the checkout has no more goes.
    """

    def copy(source: str, target: str) -> None:
        if not (os.path.isfile(target) and filecmp.cmp(source, target, shallow=False)):
            shutil.copyfile(source, target)

    ignored = shutil.ignore_patterns(*NOT_SOURCES)
    for name in (*PACKAGES, "kernels"):
        source, target = ROOT / name, work / ("fastsam_kernels" if name == "kernels" else name)
        shutil.copytree(source, target, ignore=ignored, copy_function=copy, dirs_exist_ok=True)
        for path in filter(Path.is_file, target.rglob("*")):
            name = path.relative_to(target)
            if not (source / name).exists() and not ignored("", name.parts):
                path.unlink()
    copy(str(ROOT / "pyproject.toml"), str(work / "pyproject.toml"))


def run_part(part: Part, place: Place, following: int = 0) -> Outcome:
    """Run a part with its output appended to the log; never raises for what the part does.

    Args:
        following (int): sum of the weights of the parts that come later and share the remaining time.
    """
    outcome = Outcome(part.name, part.title, LEFT_OUT)
    outcome.reason = part.why_not(place) or ""
    remaining = place.deadline - time.monotonic()
    if not outcome.reason and remaining < 10:
        outcome.reason = "no time left"
    if outcome.reason:
        return outcome
    limit = max(remaining * part.weight / (part.weight + following), min(10.0, remaining))
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
    if part.is_test and outcome.state == OK and not re.search(r"\b[1-9]\d* passed", outcome.result):
        outcome.state, outcome.reason = FAILED, "no test passed"
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
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # one queue of the device per stream; the default of 8 would be shared
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
    return {0: (OK, ""), ABSENT: (LEFT_OUT, "")}.get(code, (FAILED, f"exit code {code}"))


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
    parser.add_argument("--out", type=Path, metavar="PATH", help="folder of a call, default runs/gpu; file of --merge")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="default: build/gpu")
    parser.add_argument("--seconds", type=float, help=f"limit of this call (default: {TOTAL_SECONDS} with a GPU)")
    names = [part.name for part in PARTS]
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--call", type=int, choices=CALLS, help="the parts of one of the four calls (default: all)")
    chosen.add_argument("--parts", help=f"comma-separated, of {', '.join(names)}; build always runs")
    chosen.add_argument("--merge", type=Path, nargs="+", metavar="DIR", help="make one file of the calls' folders")
    options = parser.parse_args(argv)
    if options.merge:
        try:
            merge(options.merge, options.out or ROOT / "bench" / "results" / "gpu.json")
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    wanted = {"build", *(options.parts.split(",") if options.parts else CALLS.get(options.call, names))}
    if unknown := wanted.difference(names):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    out = (options.out or Path("runs/gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    for name in FILES:  # of another run
        (out / name).unlink(missing_ok=True)
    start, environment = time.monotonic(), facts()
    outcomes: list[Outcome] = []
    gpu, capability, nvcc = (
        str(environment[name]) if environment[name] else None for name in ("gpu", "capability", "nvcc")
    )
    seconds = options.seconds or TOTAL_SECONDS * (1 if gpu else PATIENCE)
    page = write(out, environment, outcomes)
    work = options.work.resolve()
    try:
        with alone_in(work):
            place = Place(work, out, gpu, capability, nvcc, start + seconds, str(environment.get("commit", "unknown")))
            copy_tree(work)
            parts = [part for part in PARTS if part.name in wanted]
            for i, part in enumerate(parts):
                print(f"{part.title} ...", flush=True)
                following = sum(later.weight for later in parts[i + 1 :] if later.why_not(place) is None)
                outcomes.append(run_part(part, place, following))
                print(f"  {outcomes[-1].state} {outcomes[-1].reason} {outcomes[-1].result}", flush=True)
                page = write(out, environment, outcomes)
    except OSError as error:
        parser.error(f"cannot work in {work}: {error}. Another call may be at it; --work takes another folder")
    print(f"\n{page}\nwritten: {out}", flush=True)
    return 1 if any(o.state in (FAILED, TIMED_OUT) for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
