"""Federated rounds on one GPU, within a time: executors by number of clients, FedLESAM's Table 8 setting, how busy a
round keeps the device, and where client states live.

Each executor and model is a process (`jobs`), so that a failed capture or an error that stays with the device costs one
row. The process prints each result as it is measured, and names the results that it has no time for.
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
STATE_WIDTHS = (32, 4096, 32768)  # width of an MLP: 2 thousand, 300 thousand and 2 million parameters

Entry = dict[str, Any]
# A list of the results ("series", "busy", "jobs"), and an entry of it.
Found = Iterator[tuple[str, Entry]]


def measure(device: str, seconds: float, write: Callable[[Entry], None]) -> Entry:
    """Run all jobs. `write` is called with the results so far after every result and job."""
    found: Entry = {"series": [], "busy": [], "jobs": []}
    end, names = time.monotonic() + seconds, list(jobs(device))
    for i, name in enumerate(names):
        left = end - time.monotonic()
        for kind, entry in run_job(name, device, min(left, max(SHARE * left / (len(names) - i), 2 * MOST_TO_START))):
            found[kind].append(entry)
            print(", ".join(f"{key} {value}" for key, value in entry.items()), flush=True)
            write(found)
    return found


def run_job(name: str, device: str, seconds: float) -> Found:
    """Run one job in a process and yield what it prints, then how it ended."""
    if seconds < MOST_TO_START:
        yield "jobs", {"name": name, "problem": "no time left"}
        return
    command = [sys.executable, "-m", "bench.fed.on_gpu", name, device, str(seconds - MOST_TO_START)]
    options: Entry = {"stdout": subprocess.PIPE, "text": True}
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


class Job:
    """The measurements of one process, until a time."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.end = device, time.monotonic() + seconds

    def guarded(self, work: Callable[[], Any]) -> tuple[Any, str]:
        """Return the result and "", or None and the problem. A failure does not hide the other results."""
        if time.monotonic() > self.end - 2:
            return None, "no time left"
        try:
            return work(), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def series(self, title: str, name: str, at: float | str, work: Callable[[], float]) -> tuple[str, Entry]:
        """Return an entry with the median seconds of a round; None with the reason if it was not measured."""
        seconds, problem = self.guarded(work)
        return "series", {"title": title, "name": name, "at": at, "seconds": seconds, "problem": problem}

    def by_clients(self, model: str, executor: str) -> Found:
        """Measure a round of n clients by one executor, or by the bare loop under the settings that give the same bits
        every time."""
        if executor == WITHOUT_ROW_PROGRAMS:
            rowprograms.maker = lambda setup: None  # type: ignore[assignment]
        for n in CLIENTS:
            for algorithm in ("fedavg", "fedsam"):
                load = Workload(model, algorithm, clients=n, cohort=n, device=self.device)
                bare_loop = partial(_bare_rounds, load, 3)
                ours = partial(_load_rounds, load, 3, **how(executor.split(",")[0], n))
                work = bare_loop if executor == "bare loop" else ours
                yield self.series(f"{model.upper()}, {algorithm}, by clients", executor, n, work)

    def client_states(self, where: str) -> Found:
        """Measure a round of 100 clients of SCAFFOLD with their states on the device or in host memory, small and large
        models.

        One batch a client: as little work as there can be to hide the copies. A round reads and writes one state per
        client.
        """
        options = {"executor": "streams" if self.device == "cuda" else "sequential", "client_state": where}
        for width in STATE_WIDTHS:
            load = Workload(f"mlp:{width}", clients=100, device=self.device)
            model, data = load.make_model(), [(x[:BATCH], y[:BATCH]) for x, y in load.tensors()]
            at = sum(p.numel() for p in model.parameters())
            work = partial(_rounds, model, data, "scaffold", 4, **options)
            yield self.series("SCAFFOLD, states of 100 clients by parameters", where, at, work)

    def table8(self, executor: str) -> Found:
        """ResNet-18-GN, 10 of 100 clients with 500 images of 32x32, batch 50; one of the five local epochs, its time
        taken five times.

        Random images: how long a step takes does not depend on what is on them.
        """
        model = models.build("resnet18_gn", (3, 32, 32), 10, 0).to(self.device)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(5000, 3, 32, 32, generator=generator).to(self.device)
        labels = torch.randint(10, (5000,), generator=generator).to(self.device)
        data = [(images[i * 50 : i * 50 + 500], labels[i * 50 : i * 50 + 500]) for i in range(90)] * 2
        title = "ResNet-18-GN, one local epoch of five"
        if executor == "bare loop":
            yield self.series(title, executor, "fedavg", partial(_bare_epoch, model, data[:10]))
            return
        options = how(executor, 10) | {"batch": 50, "cohort": 0.1}
        for algorithm in TABLE8:
            yield self.series(title, executor, algorithm, partial(_rounds, model, data[:100], algorithm, 2, **options))

    def busy(self, executor: str) -> Found:
        """Measure what a round of small CNNs keeps the device busy with, under the profiler: see `occupation`."""
        found, problem = self.guarded(lambda: _profiled(self.device, executor))
        yield "busy", {"executor": executor, "clients": TRACED} | (found or {"problem": problem})


def jobs(device: str) -> dict[str, Callable[[Job], Found]]:
    """Return what each process measures."""
    ours = ("sequential", "streams", "graph", "vmap") if device == "cuda" else ("sequential", "threads", "vmap")
    both = ("vmap", WITHOUT_ROW_PROGRAMS)
    models = [(m, e) for m in ("cnn", "mlp") for e in ("bare loop", *ours, "auto")]
    found: dict[str, Callable[[Job], Found]] = {}
    for m, e in [*models, *((m, e) for m in ("mlp:200", "mlp:1024") for e in both)]:
        found[f"{m} {e}"] = partial(Job.by_clients, model=m, executor=e)
    found |= {f"table 8 {e}": partial(Job.table8, executor=e) for e in ("bare loop", *ours[:3])}
    found |= {f"busy {e}": partial(Job.busy, executor=e) for e in ours}
    return found | {f"states {where}": partial(Job.client_states, where=where) for where in ("device", "host")}


def main(argv: Sequence[str]) -> int:
    name, device, seconds = argv
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # a queue of the device for each stream; CUDA has not started yet
    for kind, entry in jobs(device)[name](Job(device, float(seconds))):
        print(f"{MARK}{json.dumps([kind, entry])}", flush=True)
        # After an error that stays with the device every later call fails with the same words.
        if "CUDA error" in entry.get("problem", ""):
            return 1
    return 0


def how(executor: str, clients: int) -> Entry:
    """Return the keywords of an executor: all clients at once, but no more than there are streams; "auto" chooses."""
    if executor in ("auto", "sequential"):
        return {"executor": executor}
    return {"executor": executor, "slots": clients if executor == "vmap" else min(clients, STREAMS)}


class Ticks:
    """Called after every round, when the device is done. seconds: median of the rounds after the first."""

    def __init__(self, device: str | torch.device) -> None:
        self.cuda, self.at = torch.device(device).type == "cuda", list[float]()

    def __call__(self, record: Any = None) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.at.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return median(b - a for a, b in pairwise(self.at))


def _rounds(
    model: nn.Module, data: Sequence[Any], algorithm: str, rounds: int, batch: int = BATCH, cohort: float = 1.0,
    **how: Any,
) -> float:  # fmt: skip
    ticks = Ticks(next(model.parameters()).device)
    fed.run(
        model, data, fed.algorithms.registry[algorithm](), rounds=rounds + 1, batch_size=batch, lr=LR / 10,
        sampler="fixed", participation=cohort, eval_every=rounds + 1, progress=ticks, **how,
    )  # fmt: skip
    return ticks.seconds


def _load_rounds(load: Workload, rounds: int, **how: Any) -> float:
    return _rounds(load.make_model(), load.tensors(), load.algorithm, rounds, **how)


def _bare_rounds(load: Workload, rounds: int) -> float:
    ticks = Ticks(load.device)
    with repeatable(torch.device(load.device)):
        bare.train(load, rounds + 1, ticks, "tensors")
    return ticks.seconds


def _bare_epoch(model: nn.Module, data: Sequence[Any]) -> float:
    """Return the seconds of ten clients' local epochs in a bare loop; the first client, taken once before, warms up."""
    ticks = Ticks(next(model.parameters()).device)
    with repeatable(next(model.parameters()).device):
        local = bare.Tensors(model, sharp=False)
        start = local.weights()
        for number, (x, y) in enumerate([data[0], *data]):
            if number == 1:
                ticks()
            local.load(start)
            for part in torch.randperm(len(y)).to(y.device).split(50):
                local.step(x[part], y[part])
        ticks()
    return ticks.seconds


def _profiled(device: str, executor: str) -> Entry:
    load = Workload("cnn", clients=TRACED, cohort=TRACED, device=device)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as profiler:
        _load_rounds(load, 2, **how(executor, TRACED))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return occupation(kernels[len(kernels) // 2 :])  # what is set up and captured first is not what a run consists of


def occupation(kernels: Sequence[Entry]) -> Entry:
    """Return how kernels, events of a Chrome trace, occupy a device.

    busy: the fraction of the time from the first kernel to the last in which some kernel runs. at_once: how many run,
    on average over that fraction. streams: on how many.
    """
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
