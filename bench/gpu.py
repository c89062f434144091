"""Everything that a GPU can show, in four calls: `make gpu ARGS="--call 1" OUT=DIR`, or `python bench/gpu.py`.

Meant for a bare machine with torch, Triton, numpy, pytest, safetensors, hypothesis and nvcc, without a network, and for
ten minutes a call. It installs nothing; libraries are built in the checkout, so that a later call on the same machine
compiles only what changed. Each part is a separate process with a share of the call's time: a part that fails does not
hide the rest. Without a GPU the libraries are built, and `make test-cuda` shows what can be shown.

A call writes to DIR: summary.md (also printed), log.txt (the output of every part), and the benchmarks' files, from
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "build" / "gpu"  # has kernels/ under its installed name
TOTAL_SECONDS = 570  # time limit of a call
GRACE = 15  # seconds of its limit, at most, that a part has when it is interrupted: pytest tells its failures then
LEAST = 10.0  # seconds that a part has
ABSENT = 77  # exit code of a part that finds out that it cannot run here; its last line says why
INTERRUPTED = ("Traceback (most recent call last)", "KeyboardInterrupt")  # Python's words after an interrupt
OK, FAILED, TIMED_OUT, LEFT_OUT = "passed", "failed", "timed out", "left out"

PYTEST = "python -m pytest -v -ra -o cache_dir=build/pytest-cache --continue-on-collection-errors"
# The files with tests marked `gpu`. Every worker would import all other files too, for half a minute.
GPU_TESTS = (
    "tests/gpu tests/ops tests/optim tests/fed/executors/test_streams.py tests/fed/loop/test_client_state.py "
    "tests/fed/loop/test_client_state_store.py tests/fed/data/test_augment.py"
)
# Errors of the API are raised anyway; torch also tries what a driver may refuse.
SANITIZER = "compute-sanitizer"
SANITIZE = SANITIZER + " --tool {} --error-exitcode 9 --report-api-errors no python tests/gpu/sanitized.py"
BENCH = "python -m bench {} --device cuda --seconds SECONDS --add --out OUT"
NATIVE, TRITON = "fastsam_native fastsam_exclusive foreach copied", "fastsam_triton foreach copied"


@dataclass(frozen=True)
class Part:
    """A command, the call that runs it (0: every call, without a GPU too), and the weight of its share of the call's
    time. SECONDS in a command is replaced by the time that the part has, less what it needs to end."""

    name: str
    call: int
    title: str
    command: str
    weight: int


PARTS = (
    Part("build", 0, "build the libraries", "python -m fastsam_kernels.build CUDA", 150),
    Part("smoke", 1, "smoke test: every backend, graph and row program", f"{PYTEST} tests/gpu/test_smoke.py", 20),
    # Without torch's caching a tensor's end is an allocation's end.
    Part("memcheck", 1, "compute-sanitizer memcheck",
         f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 {SANITIZE.format('memcheck')}", 80),
    Part("native", 1, "tests of the compiled kernels", f"{PYTEST} -n auto {GPU_TESTS} -m gpu -k 'not triton'", 110),
    Part("steps", 1, "whole steps, native, and peers that nobody compiles",
         BENCH.format(f"kernels --cases 'steps/*' --rows {NATIVE}"), 90),
    Part("ops", 1, "every kernel, native", BENCH.format("kernels --cases 'ops/*' --rows native"), 100),
    Part("federated", 2, "federated rounds", BENCH.format("federated"), 400),
    Part("variants", 3, "variants of SAM", BENCH.format("variants"), 120),
    Part("racecheck", 3, "compute-sanitizer racecheck", SANITIZE.format("racecheck"), 100),
    Part("triton", 3, "tests of the Triton kernels", f"{PYTEST} -n auto {GPU_TESTS} -m gpu -k triton", 150),
    Part("ncu", 3, "Nsight Compute: throughput, occupancy, stalls", BENCH.format("ncu"), 80),
    Part("compiled", 4, "whole steps, native, and torch.compile",
         BENCH.format("kernels --cases steps/resnet18 steps/100m steps/50k steps/225k --rows fastsam_native compiled"),
         150),
    Part("triton-steps", 4, "whole steps, Triton", BENCH.format(f"kernels --cases 'steps/*' --rows {TRITON}"), 60),
    Part("triton-ops", 4, "every kernel, Triton", BENCH.format("kernels --cases 'ops/*' --rows triton"), 90),
    Part("synccheck", 4, "compute-sanitizer synccheck", SANITIZE.format("synccheck"), 80),
)  # fmt: skip


def surroundings() -> tuple[dict[str, str], dict[str, Any]]:
    """Return the environment of the parts, and the facts of the machine.

    If torch is broken, the facts are the last line of its error.
    """
    PACKAGES.mkdir(parents=True, exist_ok=True)
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


def absent(part: Part, facts: dict[str, Any], path: str) -> str:
    """Return why a part cannot run here or has nothing to do, or an empty string."""
    if part.name == "build" and facts.get("backends", {}).get("native/cuda") == "available":
        return "the libraries are built from these sources"
    if part.call and "gpus" not in facts["machine"]:
        return "no GPU: torch sees no CUDA device"
    problem = SANITIZER in part.command and not shutil.which(SANITIZER, path=path)
    return f"{SANITIZER} is not installed" if problem else ""


def run_part(part: Part, out: Path, environment: dict[str, str], limit: float) -> dict[str, Any]:
    """Run a part with its output appended to the log, and return its state, seconds and last line.

    A part that reaches its limit is interrupted first, so that it can say what it knows, and then stopped with all that
    it started: by timeout(1).
    """
    text = part.command if importlib.util.find_spec("xdist") else part.command.replace(" -n auto", "")
    nvcc = "TORCH_CUDA_ARCH_LIST" in environment and shutil.which("nvcc", path=environment["PATH"])
    values = {"SECONDS": str(int(0.8 * limit)), "OUT": str(out), "python": sys.executable}
    values["CUDA"] = "--cuda" if nvcc else "--no-cuda"
    grace, start = min(GRACE, limit / 6), time.monotonic()
    command = ["timeout", "--signal=INT", f"--kill-after={grace:.0f}", f"{limit - grace:.0f}"]
    command += [values.get(word, word) for word in shlex.split(text)]
    with open(out / "log.txt", "a+") as log:
        log.write(f"\n===== {part.name}: {part.command}\n")
        log.flush()
        offset = log.tell()
        options: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        code = subprocess.run(command, cwd=ROOT, env=environment, **options).returncode
        log.seek(offset)
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
    group.add_argument("--call", type=int, choices=range(1, 5), help="the parts of one of the four calls")
    group.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all; build always runs")
    options = parser.parse_args(argv)
    out, start = options.out.resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    environment, facts = surroundings()
    end = start + (options.seconds or TOTAL_SECONDS)
    parts = [p for p in PARTS if not p.call or (p.call == options.call if options.call else p.name in options.parts)]
    reasons = {part.name: absent(part, facts, environment["PATH"]) for part in parts}
    outcomes: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        print(f"{part.title} ...", flush=True)
        weight_left = sum(next_part.weight for next_part in parts[i + 1 :] if not reasons[next_part.name])
        seconds_left = end - time.monotonic()
        if reason := reasons[part.name] or ("no time left" if seconds_left < LEAST else ""):
            outcomes.append({"title": part.title, "state": LEFT_OUT, "seconds": 0.0, "result": reason})
        else:
            limit = max(seconds_left * part.weight / (part.weight + weight_left), LEAST)
            outcomes.append(run_part(part, out, environment, limit))
        print(f"  {outcomes[-1]['state']} {outcomes[-1]['result']}", flush=True)
        (out / "summary.md").write_text(page := summary(facts, outcomes))
    print(f"\n{page}\nwritten: {out}", flush=True)
    return int(any(one["state"] in (FAILED, TIMED_OUT) for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
