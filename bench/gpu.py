"""Everything that a GPU can show, in three calls: `make gpu ARGS="--call 1" OUT=DIR`, or `python bench/gpu.py`.

Meant for a bare machine with torch, Triton, numpy, pytest, safetensors, hypothesis and nvcc, without a network, and for
ten minutes a call. It installs nothing; libraries are built in the checkout, so that a later call on the same machine
compiles only what changed. Libraries in build/carry (`make gpu-carry`) are used if they are of these sources and of
this GPU. Each part is a separate process with a share of the call's time: a part that fails does not
hide the rest. Tests and sanitizers run at the same time, measurements one by one. Without a GPU the libraries are
built, and `make test-cuda` shows what can be shown.

A call writes to DIR: summary.md (also printed), the output of every part (NAME.txt), and the benchmarks' files, from
which `python -m bench.report DIR1/*.json DIR2/*.json --publish` makes the pages. Standard library only: a broken
environment is reported.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "build" / "gpu"  # has kernels/ under its installed name
CARRIED = ROOT / "build" / "carry" / "kernels"  # see bench/carry.py
REPORT, ARCHITECTURES = "native.json", "architectures.txt"  # files next to libraries: their sources and their GPUs
TOTAL_SECONDS = 570  # time limit of a call
GRACE = 15  # seconds of its limit, at most, that a part has when it is interrupted: pytest tells its failures then
MIN_SECONDS = 10.0  # seconds that a part has
ABSENT = 77  # exit code of a part that finds out that it cannot run here; its last line says why
INTERRUPTED = ("Traceback (most recent call last)", "KeyboardInterrupt")  # Python's words after an interrupt
OK, FAILED, TIMED_OUT, LEFT_OUT = "passed", "failed", "timed out", "left out"

# A broken machine fails everywhere: after 20 failures a part ends by itself and says why, before it is interrupted.
PYTEST = (
    "python -m pytest -v -ra --tb=short --maxfail=20 -o cache_dir=build/pytest-cache --continue-on-collection-errors"
)
# The files with tests marked `gpu`. Every worker would import all other files too, for half a minute.
GPU_TESTS = (
    "tests/gpu tests/ops tests/optim tests/fed/executors/test_streams.py tests/fed/executors/test_capture.py "
    "tests/fed/executors/test_streams_models.py tests/fed/loop/test_client_state.py "
    "tests/fed/loop/test_client_state_store.py tests/fed/data/test_augment.py"
)
# Two parts run at the same time. On an H200 they passed with 6 workers each; with 16, most workers failed in every test
# with CUDA.
WORKERS = "-n 6"
# Errors of the API are raised anyway; torch also tries what a driver may refuse.
SANITIZER = "compute-sanitizer"
SANITIZE = SANITIZER + " --tool {} --error-exitcode 9 --report-api-errors no python tests/gpu/sanitized.py"
# Weight of the checks, 300 s of a call: next to the other checks the Triton tests take 220 s on an H200.
CHECKS = 300
BENCH = "python -m bench {} --device cuda --seconds SECONDS --add --out OUT"
NATIVE, TRITON = "fastsam_native fastsam_exclusive foreach copied", "fastsam_triton foreach copied"


@dataclass(frozen=True)
class Part:
    """A command, the call that runs it (0: every call, without a GPU too), and the weight of its share of the call's
    time. SECONDS in a command is replaced by the time that the part has, less what it needs to end. Checks run at the
    same time as the checks next to them."""

    name: str
    call: int
    title: str
    command: str
    weight: int
    is_check: bool = False


PARTS = (
    Part("build", 0, "build the libraries", "python -m fastsam_kernels.build CUDA", 60),
    Part("smoke", 1, "smoke test: every backend, graph and row program", f"{PYTEST} tests/gpu/test_smoke.py", 30),
    Part("native", 1, "tests of the compiled kernels",
         f"{PYTEST} {WORKERS} {GPU_TESTS} -m gpu -k 'not triton'", CHECKS, True),
    Part("triton", 1, "tests of the Triton kernels", f"{PYTEST} {WORKERS} {GPU_TESTS} -m gpu -k triton", CHECKS, True),
    # Without torch's caching a tensor's end is an allocation's end.
    Part("memcheck", 1, "compute-sanitizer memcheck",
         f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 {SANITIZE.format('memcheck')}", CHECKS, True),
    Part("racecheck", 1, "compute-sanitizer racecheck", SANITIZE.format("racecheck"), CHECKS, True),
    Part("synccheck", 1, "compute-sanitizer synccheck", SANITIZE.format("synccheck"), CHECKS, True),
    Part("steps", 1, "whole steps, native, and peers that nobody compiles",
         BENCH.format(f"kernels --cases 'steps/*' --rows {NATIVE}"), 120),
    Part("ops", 1, "every kernel, native", BENCH.format("kernels --cases 'ops/*' --rows native"), 120),
    Part("federated", 2, "federated rounds", BENCH.format("federated"), 500),
    Part("variants", 3, "variants of SAM", BENCH.format("variants"), 50),
    Part("whole", 3, "whole training steps", BENCH.format("step --cases 'whole/*'"), 40),
    Part("compiled", 3, "whole steps, native, and torch.compile",
         BENCH.format("kernels --cases steps/resnet18 steps/100m steps/50k steps/225k --rows fastsam_native compiled"),
         200),
    Part("triton-steps", 3, "whole steps, Triton", BENCH.format(f"kernels --cases 'steps/*' --rows {TRITON}"), 60),
    Part("triton-ops", 3, "every kernel, Triton", BENCH.format("kernels --cases 'ops/*' --rows triton"), 90),
    Part("ncu", 3, "Nsight Compute: throughput, occupancy, stalls", BENCH.format("ncu"), 60),
)  # fmt: skip


def surroundings() -> tuple[dict[str, str], dict[str, Any]]:
    """Return the environment of the parts, and the facts of the machine.

    If torch is broken, the facts are the last line of its error.
    """
    PACKAGES.mkdir(parents=True, exist_ok=True)
    take_libraries(CARRIED, ROOT / "kernels")
    if not (link := PACKAGES / "fastsam_kernels").exists():
        link.symlink_to(ROOT / "kernels", target_is_directory=True)
    paths = {
        "PATH": [str(Path(sys.executable).parent), os.environ.get("PATH"), "/usr/local/cuda/bin"],
        "PYTHONPATH": [str(ROOT), str(PACKAGES), os.environ.get("PYTHONPATH")],
    }
    environment = os.environ | {name: os.pathsep.join(filter(None, folders)) for name, folders in paths.items()}
    # one queue of the device per stream; the default of 8 would be shared
    environment |= {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    command = [sys.executable, "-m", "bench.environment"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        return environment, {"machine": {}, "problem": last_word(result.stderr)}
    facts: dict[str, Any] = json.loads(result.stdout)
    if "capability" in facts["machine"]:  # the other architectures are compiled elsewhere
        environment["TORCH_CUDA_ARCH_LIST"] = facts["machine"]["capability"]
    return environment, facts


def take_libraries(source: Path, kernels: Path) -> None:
    """Copy libraries that were compiled elsewhere into a package that has none."""
    if source.is_dir() and not (kernels / REPORT).exists():
        for path in source.iterdir():
            shutil.copy2(path, kernels)


def is_for(capability: str, kernels: Path) -> bool:
    """Return True if the libraries are for a GPU of this capability. Libraries that were built here have no list."""
    architectures = kernels / ARCHITECTURES
    return not architectures.is_file() or capability in architectures.read_text()


def absent(part: Part, facts: dict[str, Any], path: str) -> str:
    """Return why a part cannot run here or has nothing to do, or an empty string."""
    is_built = facts.get("backends", {}).get("native/cuda") == "available"
    if part.name == "build" and is_built and is_for(facts["machine"].get("capability", ""), ROOT / "kernels"):
        return "the libraries are built from these sources"
    if part.call and "gpus" not in facts["machine"]:
        return "no GPU: torch sees no CUDA device"
    problem = SANITIZER in part.command and not shutil.which(SANITIZER, path=path)
    return f"{SANITIZER} is not installed" if problem else ""


def run_part(part: Part, out: Path, environment: dict[str, str], limit: float) -> dict[str, Any]:
    """Run a part with its output in NAME.txt, and return its state, seconds and last line.

    A part that reaches its limit is interrupted first, so that it can say what it knows, and then stopped with all that
    it started: by timeout(1).
    """
    text = part.command if importlib.util.find_spec("xdist") else part.command.replace(f" {WORKERS}", "")
    nvcc = "TORCH_CUDA_ARCH_LIST" in environment and shutil.which("nvcc", path=environment["PATH"])
    grace, start = min(GRACE, limit / 6), time.monotonic()
    values = {"SECONDS": str(int(0.8 * limit)), "OUT": str(out), "python": sys.executable}
    values |= {"CUDA": "--cuda" if nvcc else "--no-cuda"}
    command = ["timeout", "--signal=INT", f"--kill-after={grace:.0f}", f"{limit - grace:.0f}"]
    command += [values.get(word, word) for word in shlex.split(text)]
    with open(out / f"{part.name}.txt", "w+") as log:
        options: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        code = subprocess.run(command, cwd=ROOT, env=environment, **options).returncode
        log.seek(0)
        result = last_word(log.read())
    for half in out.glob("*.tmp"):  # files that were being written when the part was stopped
        half.unlink()
    state = {0: OK, ABSENT: LEFT_OUT, 124: TIMED_OUT, -9: TIMED_OUT}.get(code, FAILED)
    if "pytest" in part.command and state == OK and not re.search(r"\b[1-9]\d* passed", result):
        state, result = FAILED, f"no test passed: {result}"
    return {"title": part.title, "state": state, "seconds": time.monotonic() - start, "result": result}


def last_word(output: str) -> str:
    """Return the last line that is not blank, indented or about an interruption, without colours and rules."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()
    candidates = [line.strip("= ") for line in lines if line.strip("= ") and not line.startswith((" ", *INTERRUPTED))]
    return candidates[-1] if candidates else ""


def summary(facts: dict[str, Any], outcomes: Sequence[dict[str, Any]]) -> str:
    """Return the page of a call: the machine, and a line per part."""
    entries = {**facts["machine"], **facts.get("versions", {}), **facts}
    lines = [f"- {key}: {value}" for key, value in entries.items() if key not in ("machine", "versions", "backends")]
    lines += [f"- **{o['state']}** {o['title']}, {o['seconds']:.0f} s: {o['result'][:160]}" for o in outcomes]
    return "\n".join(["# fastsam on a GPU", "", *lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if nothing failed; parts that were left out do not count."""
    parser = argparse.ArgumentParser(prog="python bench/gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: runs/gpu")
    parser.add_argument("--seconds", type=float, help=f"limit of this call (default: {TOTAL_SECONDS})")
    names = [part.name for part in PARTS]
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--call", type=int, choices=(1, 2, 3), help="the parts of one of the calls")
    group.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all; build always runs")
    options = parser.parse_args(argv)
    out, start = options.out.resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    environment, facts = surroundings()
    end = start + (options.seconds or TOTAL_SECONDS)
    parts = [p for p in PARTS if not p.call or (p.call == options.call if options.call else p.name in options.parts)]
    outcomes: list[dict[str, Any]] = []
    ready_parts = []
    for part in parts:
        if reason := absent(part, facts, environment["PATH"]):
            outcomes.append({"title": part.title, "state": LEFT_OUT, "seconds": 0.0, "result": reason})
        else:
            ready_parts.append(part)
    if any(part.name == "build" for part in ready_parts):  # for this GPU
        (ROOT / "kernels" / ARCHITECTURES).unlink(missing_ok=True)
    groups = [list(group) for _, group in groupby(ready_parts, key=lambda part: part.is_check or part.name)]
    weights = [max(part.weight for part in group) for group in groups]
    for i, group in enumerate(groups):
        print(*(f"{part.title} ..." for part in group), sep="\n", flush=True)
        seconds_left = end - time.monotonic()
        limit = max(seconds_left * weights[i] / sum(weights[i:]), MIN_SECONDS)
        if seconds_left < MIN_SECONDS:
            outcomes += [{"title": p.title, "state": LEFT_OUT, "seconds": 0.0, "result": "no time left"} for p in group]
        else:
            with ThreadPoolExecutor(len(group)) as pool:
                outcomes += pool.map(partial(run_part, out=out, environment=environment, limit=limit), group)
        for outcome in outcomes[-len(group) :]:
            print(f"  {outcome['state']} {outcome['result']}", flush=True)
        (out / "summary.md").write_text(summary(facts, outcomes))
    page = summary(facts, outcomes)
    (out / "summary.md").write_text(page)
    print(f"\n{page}\nwritten: {out}", flush=True)
    return int(any(one["state"] in (FAILED, TIMED_OUT) for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
