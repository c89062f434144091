"""Federated rounds on one GPU, within a time: executors by number of clients, FedLESAM's Table 8 setting, how busy a
round keeps the device, and where client states live.

Each executor and model is a process (`jobs`), so that a failed capture or an error that stays with the device costs one
row. The process prints each series as it ends; what it has no time for is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.fed import bare
from bench.fed.workload import BATCH, LR, Workload
from fastsam import fed
from fastsam.fed import models
from fastsam.fed.executors import rowprograms
from fastsam.fed.loop.determinism import repeatable

TABLE8 = ("fedlesam", "fedavg", "fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam-s", "fedlesam-d")
CLIENTS = (100, 20, 8)
TRACED = 20  # clients: a hundred make a trace that takes longer to read than to make
STREAMS = 31  # of the 32 that torch deals out in turn; one is for graphs of all rows. More slots would share them
WITHOUT_ROW_PROGRAMS = "vmap, without row programs"
MARK = "measured: "  # begins a line of a job's output that is a result
MOST_TO_START = 10  # s that a process takes to import torch and to prepare the device
SHARE = 3  # times the average share of the remaining time that a job may take
STATES = "SCAFFOLD, states of 100 clients by parameters"
STATE_WIDTHS = (32, 4096, 32768)  # of an MLP: 2 thousand, 300 thousand and 2 million parameters


@dataclass(frozen=True)
class Series:
    """seconds: of a round, the median; None for what was not measured, with the reason."""

    title: str
    name: str
    at: float | str
    seconds: float | None
    problem: str = ""


class Until:
    """A time by which to be done."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def measure(device: str, seconds: float, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all jobs. `write` is called with the results so far after every series and job."""
    found: dict[str, Any] = {"series": [], "busy": [], "jobs": []}
    until, names = Until(seconds), list(jobs(device))
    for i, name in enumerate(names):
        share = min(until.left, max(SHARE * until.left / (len(names) - i), 2 * MOST_TO_START))
        for kind, entry in run_job(name, device, share):
            found[kind].append(entry)
            print(_line(kind, entry), flush=True)
            write(found)
    return found


def run_job(name: str, device: str, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one job in a process and yield what it prints, then how it ended."""
    if seconds < MOST_TO_START:
        yield "jobs", {"name": name, "problem": "no time left"}
        return
    command = [sys.executable, "-m", "bench.fed.on_gpu", name, device, str(seconds - MOST_TO_START)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, stderr=errors, **options) as process:
        timer = threading.Timer(seconds + MOST_TO_START, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                kind, entry = json.loads(line.removeprefix(MARK))
                yield kind, entry
        timer.cancel()
        problem = ""
        if process.wait() != 0:
            errors.seek(0)
            said = ([line for line in errors.read().splitlines() if line.strip()] or ["nothing on stderr"])[-1]
            problem = f"the process ended with code {process.returncode}: {said}"
        yield "jobs", {"name": name, "problem": problem}


def jobs(device: str) -> dict[str, Callable[[Until], Iterator[Series | dict[str, Any]]]]:
    """Return what each process measures."""
    found: dict[str, Callable[[Until], Iterator[Series | dict[str, Any]]]] = {}
    for model in ("cnn", "mlp"):
        for executor in ("bare loop", *executors(device)):
            found[f"{model} {executor}"] = partial(by_clients, device, model, executor)
    for model in ("mlp:200", "mlp:1024"):
        for executor in ("vmap", WITHOUT_ROW_PROGRAMS):
            found[f"{model} {executor}"] = partial(by_clients, device, model, executor)
    for executor in ("bare loop", *executors(device)[:3]):
        found[f"table 8 {executor}"] = partial(table8, device, executor)
    for executor in executors(device)[:-1]:
        found[f"busy {executor}"] = partial(busy_entry, device, executor)
    for where in ("device", "host"):
        found[f"states {where}"] = partial(client_states, device, where)
    return found


def busy_entry(device: str, executor: str, until: Until) -> Iterator[dict[str, Any]]:
    yield {"executor": executor, "clients": TRACED} | _guarded(lambda: busy(device, executor), until)


def main(argv: Sequence[str]) -> int:
    name, device, seconds = argv
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # a queue of the device for each stream; CUDA has not started yet
    for entry in jobs(device)[name](Until(float(seconds))):
        found = ["series", asdict(entry)] if isinstance(entry, Series) else ["busy", entry]
        print(f"{MARK}{json.dumps(found)}", flush=True)
        # After an error that stays with the device every later call fails with the same words.
        if isinstance(entry, Series) and "CUDA error" in entry.problem:
            return 1
    return 0


def _line(kind: str, entry: dict[str, Any]) -> str:
    if kind == "busy":
        return busy_line(entry)
    if kind == "jobs":
        return f"{entry['name']}: {entry['problem'] or 'done'}"
    series = Series(**entry)
    value = series.problem if series.seconds is None else f"{1e3 * series.seconds:.1f} ms a round"
    if series.title == STATES and series.seconds is not None:
        value += f", {100 / series.seconds:.0f} states/s"
    return f"{series.title}: {series.name}, {series.at}: {value}"


def _guarded(work: Callable[[], dict[str, Any]], until: Until) -> dict[str, Any]:
    """The result, or the error as text: one part that fails does not hide the others."""
    if until.left < 2:
        return {"problem": "no time left"}
    try:
        return work()
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def executors(device: str) -> tuple[str, ...]:
    """Return the executors of a device; the rule that picks one of them comes last."""
    return (
        ("sequential", "streams", "graph", "vmap", "auto")
        if device == "cuda"
        else ("sequential", "threads", "vmap", "auto")
    )


def by_clients(device: str, model: str, executor: str, until: Until) -> Iterator[Series]:
    """Measure a round of n clients by one executor, or by the bare loop under the settings that give the same bits
    every time."""
    if executor == WITHOUT_ROW_PROGRAMS:
        rowprograms.maker = lambda setup: None  # type: ignore[assignment]
    for n in CLIENTS:
        for algorithm in ("fedavg", "fedsam"):
            load = Workload(model, algorithm, clients=n, cohort=n, device=device)
            options = how(executor.split(",")[0], n)

            def work(load: Workload = load, options: dict[str, Any] = options) -> float:
                if executor == "bare loop":
                    return _bare_rounds(load, 3)
                return _rounds(*_parts(load), load.algorithm, 3, **options)

            yield _series(f"{model.upper()}, {algorithm}, by clients", executor, n, until, work)


def how(executor: str, clients: int) -> dict[str, Any]:
    """Its keywords: every client at once, where each has a stream of its own no more than there are; "auto" chooses for
    itself."""
    if executor in ("auto", "sequential"):
        return {"executor": executor}
    return {"executor": executor, "slots": clients if executor == "vmap" else min(clients, STREAMS)}


def client_states(device: str, where: str, until: Until) -> Iterator[Series]:
    """Measure a round of 100 clients of SCAFFOLD with their states on the device or in host memory, small and large
    models, one step each.

    One batch a client: as little work as there can be to hide the copies behind. A round reads and writes one state per
    client.
    """
    options = {"executor": "streams" if device == "cuda" else "sequential", "client_state": where}
    for width in STATE_WIDTHS:
        model, data = _parts(Workload(f"mlp:{width}", clients=100, device=device))
        data = [(x[:BATCH], y[:BATCH]) for x, y in data]
        at = sum(p.numel() for p in model.parameters())
        yield _series(STATES, where, at, until, partial(_rounds, model, data, "scaffold", 4, **options))


def table8(device: str, executor: str, until: Until) -> Iterator[Series]:
    """ResNet-18-GN, 10 of 100 clients with 500 images of 32x32, batch 50; one of the five local epochs, its time taken
    five times.

    Random images: how long a step takes does not depend on what is on them.
    """
    model = models.build("resnet18_gn", (3, 32, 32), 10, 0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5000, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(10, (5000,), generator=generator).to(device)
    data = [(images[i * 50 : i * 50 + 500], labels[i * 50 : i * 50 + 500]) for i in range(90)] * 2
    title, model = "ResNet-18-GN, one local epoch of five", model.to(device)
    if executor == "bare loop":
        yield _series(title, executor, "fedavg", until, lambda: _bare_epoch(model, data[:10]))
        return
    options = how(executor, 10) | {"batch": 50, "cohort": 0.1}
    for algorithm in TABLE8:
        yield _series(title, executor, algorithm, until, partial(_rounds, model, data[:100], algorithm, 2, **options))


def _series(title: str, name: str, at: float | str, until: Until, work: Callable[[], float]) -> Series:
    if until.left < 2:
        return Series(title, name, at, None, "no time left")
    try:
        return Series(title, name, at, work())
    except Exception as error:
        return Series(title, name, at, None, f"{type(error).__name__}: {error}")


def _parts(load: Workload) -> tuple[nn.Module, list[Any]]:
    return load.make_model(), load.tensors()


def _rounds(
    model: nn.Module,
    data: Sequence[Any],
    algorithm: str,
    rounds: int,
    batch: int = BATCH,
    cohort: float = 1.0,
    **how: Any,
) -> float:
    """Median seconds of a round, the first left out."""
    ticks: list[float] = []

    def tick(record: Any) -> None:
        _wait(model)
        ticks.append(time.perf_counter())

    fed.run(
        model, data, fed.algorithms.registry[algorithm](), rounds=rounds + 1, batch_size=batch, lr=LR / 10,
        sampler="fixed",
        participation=cohort, eval_every=rounds + 1, progress=tick, **how,
    )  # fmt: skip
    return median(b - a for a, b in pairwise(ticks))


def _bare_rounds(load: Workload, rounds: int) -> float:
    ticks: list[float] = []
    model = load.make_model()

    def tick() -> None:
        _wait(model)
        ticks.append(time.perf_counter())

    with repeatable(torch.device(load.device)):
        bare.train(load, rounds + 1, tick, "tensors")
    return median(b - a for a, b in pairwise(ticks))


def _bare_epoch(model: nn.Module, data: Sequence[Any]) -> float:
    """Ten clients' local epochs in a bare loop; the first client, taken once more before, warms up."""
    with repeatable(next(model.parameters()).device):
        local = bare.Tensors(model, sharp=False)
        start = local.weights()
        for x, y in zip(data[0][0].split(50), data[0][1].split(50)):
            local.step(x, y)
        _wait(model)
        since = time.perf_counter()
        for x, y in data:
            local.load(start)
            order = torch.randperm(len(y)).to(y.device)
            for part in order.split(50):
                local.step(x[part], y[part])
        _wait(model)
        return time.perf_counter() - since


def _wait(model: nn.Module) -> None:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def busy(device: str, executor: str) -> dict[str, Any]:
    """What a round of small CNNs keeps the device busy with, under the profiler: see `occupation`."""
    load = Workload("cnn", clients=TRACED, cohort=TRACED, device=device)
    model, data = _parts(load)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as profiler:
        _rounds(model, data, "fedavg", 2, **how(executor, TRACED))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return occupation(kernels[len(kernels) // 2 :])  # what is set up and captured first is not what a run consists of


def occupation(kernels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """busy: the fraction of the time from the first kernel to the last in which some kernel runs. at_once: how many
    run, on average over that fraction. streams: on how many. Events as in a Chrome trace."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels)
    if not spans:
        return {"kernels": 0, "streams": 0, "busy": 0.0, "at_once": 0.0}
    covered, end = 0.0, spans[0][0]
    for begin, ends in spans:
        covered += max(0.0, ends - max(begin, end))
        end = max(end, ends)
    return {
        "kernels": len(spans), "streams": len({e["args"]["stream"] for e in kernels}),
        "busy": covered / (end - spans[0][0]), "at_once": sum(e - b for b, e in spans) / covered,
    }  # fmt: skip


def busy_line(found: dict[str, Any]) -> str:
    if "problem" in found:
        return f"{found['executor']} was not traced: {found['problem']}"
    return (
        f"{found['executor']}, {found['clients']} small CNNs: the device is busy {found['busy']:.0%} of the time, then "
        f"with "
        f"{found['at_once']:.1f} kernels at once on average"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
