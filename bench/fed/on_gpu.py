"""Federated rounds on one GPU: executors by number of clients, FedLESAM's Table 8 setting, how busy a round keeps the
device, and where client states live.

Each executor and model is a process (a job), so that a failed capture or an error that stays with the device costs one
row. The process prints each result as it is measured, and names the results that it has no time for.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.fed import bare
from bench.fed.process import Process, answers
from bench.fed.workload import BATCH, LR, Workload
from fastsam import fed
from fastsam.fed import models
from fastsam.fed.executors import rowprograms
from fastsam.fed.loop.determinism import repeatable

TABLE8 = ("fedlesam", "fedavg", "fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam-s", "fedlesam-d")
CLIENTS = (100, 20, 8)
TRACED = 20  # clients: a hundred make a trace that takes longer to read than to make
STREAMS = 31  # torch deals out 32 in turn, and one is for graphs of all rows. More slots would share streams
WITHOUT_ROW_PROGRAMS = "vmap, without row programs"
STATE_WIDTHS = (32, 4096, 32768)  # width of an MLP: 2 thousand, 300 thousand and 2 million parameters
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # a queue of the device for each stream
TO_START = 10.0  # s that a process takes to import torch and to prepare the device

Figures = dict[str, Any]
# Part and title of a case, the executor, the place on the axis, and the measurement.
Item = tuple[str, str, str, Any, Callable[[], Figures]]


def run(name: str, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Run one job in a process and yield the cases of its results; last how it ended, if it failed."""
    limit = max(seconds - TO_START, 1.0)
    process = Process([sys.executable, "-m", "bench.fed.on_gpu", name, device, str(limit)], CONNECTIONS)
    end, problem = time.monotonic() + limit + 2 * TO_START, ""
    try:
        while case := process.answer(max(end - time.monotonic(), 1.0)):
            yield case
    except RuntimeError as error:
        problem = str(error)
    process.close()
    if problem:
        row = {"name": name, "title": name, "ours": True, "problem": problem}
        yield {"part": "jobs", "name": "jobs", "title": "Processes that failed", "rows": [row]}


def by_clients(device: str, model: str, executor: str) -> Iterator[Item]:
    """Yield a round of n clients by one executor, or by the bare loop with deterministic settings."""
    if executor == WITHOUT_ROW_PROGRAMS:
        rowprograms.maker = lambda setup: None  # type: ignore[assignment]
    for n, algorithm in product(CLIENTS, ("fedavg", "fedsam")):
        load = Workload(model, algorithm, clients=n, cohort=n, device=device)
        load_rounds = partial(_load_rounds, load, 3, **executor_options(executor.split(",")[0], n))
        work = partial(_bare_rounds, load, 3) if executor == "bare loop" else load_rounds
        yield "gpu", f"{model.upper()}, {algorithm}, by clients", executor, n, work


def client_states(device: str, location: str) -> Iterator[Item]:
    """Yield a round of 100 clients of SCAFFOLD with their states on the device or in host memory, by model size.

    A client has one batch, the least work that can hide the copies of its state.
    """
    options = {"executor": "streams" if device == "cuda" else "sequential", "client_state": location}
    for width in STATE_WIDTHS:
        load = Workload(f"mlp:{width}", clients=100, device=device)
        model, data = load.make_model(), [(x[:BATCH], y[:BATCH]) for x, y in load.tensors()]
        size = sum(p.numel() for p in model.parameters())
        work = partial(_rounds, model, data, "scaffold", 4, **options)
        yield "gpu", "SCAFFOLD, states of 100 clients by parameters", location, size, work


def table8(device: str, executor: str) -> Iterator[Item]:
    """Yield one of five local epochs of ResNet-18-GN on 10 of 100 clients with 500 random images of 32x32, batch 50."""
    model = models.build("resnet18_gn", (3, 32, 32), 10, 0).to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5000, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(10, (5000,), generator=generator).to(device)
    data = [(images[i * 50 : i * 50 + 500], labels[i * 50 : i * 50 + 500]) for i in range(90)] * 2
    title = "ResNet-18-GN, one local epoch of five"
    if executor == "bare loop":
        yield "gpu", title, executor, "fedavg", partial(_bare_epoch, model, data[:10])
        return
    options = executor_options(executor, 10) | {"batch": 50, "cohort": 0.1}
    for algorithm in TABLE8:
        yield "gpu", title, executor, algorithm, partial(_rounds, model, data[:100], algorithm, 2, **options)


def busy(device: str, executor: str) -> Iterator[Item]:
    """Yield what a round of small CNNs keeps the device busy with, under the profiler: see `occupation`."""
    title = f"A round of {TRACED} small CNNs under the profiler"
    yield "busy", title, executor, TRACED, partial(_profile, device, executor)


def jobs(device: str) -> dict[str, Callable[[], Iterator[Item]]]:
    """Return what each process measures."""
    executors = ("sequential", "streams", "graph", "vmap") if device == "cuda" else ("sequential", "threads", "vmap")
    pairs = list(product(("cnn", "mlp"), ("bare loop", *executors, "auto")))
    pairs += product(("mlp:200", "mlp:1024"), ("vmap", WITHOUT_ROW_PROGRAMS))
    table: dict[str, Callable[[], Iterator[Item]]] = {f"{m} {e}": partial(by_clients, device, m, e) for m, e in pairs}
    table |= {f"table 8 {e}": partial(table8, device, e) for e in ("bare loop", *executors)}
    table |= {f"busy {e}": partial(busy, device, e) for e in executors}
    return table | {f"states {location}": partial(client_states, device, location) for location in ("device", "host")}


def measure(items: Iterator[Item], end: float) -> Iterator[dict[str, Any]]:
    """Yield a case with one row per item. A failure does not hide the other results."""
    for part, title, executor, value, work in items:
        row: Figures = {
            "name": f"{executor}, {value}",
            "title": executor,
            "ours": True,
            "executor": executor,
            "at": value,
        }
        if time.monotonic() > end - 2:
            row["absent"] = "no time left"
        else:
            try:
                row |= work()
            except Exception as error:
                row["problem"] = f"{type(error).__name__}: {error}"
        yield {"part": part, "name": title, "title": title, "rows": [row]}


def main(argv: Sequence[str]) -> None:
    name, device, seconds = argv
    say = answers()
    for case in measure(jobs(device)[name](), time.monotonic() + float(seconds)):
        say(case)
        # After an error that stays with the device every later call fails with the same words.
        if "CUDA error" in case["rows"][0].get("problem", ""):
            raise SystemExit(case["rows"][0]["problem"])
    say(None)


def executor_options(executor: str, clients: int) -> Figures:
    """Return the keywords of an executor: all clients at once, but no more than there are streams; "auto" chooses."""
    if executor in ("auto", "sequential"):
        return {"executor": executor}
    return {"executor": executor, "slots": clients if executor == "vmap" else min(clients, STREAMS)}


class Ticks:
    """Called after every round, when the device is done."""

    def __init__(self, device: str | torch.device) -> None:
        self.cuda, self.times, self.start = torch.device(device).type == "cuda", list[float](), time.perf_counter()

    def __call__(self, record: Any = None) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def figures(self) -> Figures:
        """Return the median seconds of the rounds after the first, and the seconds until the first has ended."""
        return {"seconds": median(b - a for a, b in pairwise(self.times)), "first": self.times[0] - self.start}


def _rounds(
    model: nn.Module, data: Sequence[Any], algorithm: str, rounds: int, batch: int = BATCH, cohort: float = 1.0,
    **options: Any,
) -> Figures:  # fmt: skip
    ticks = Ticks(next(model.parameters()).device)
    fed.run(
        model, data, fed.algorithms.registry[algorithm](), rounds=rounds + 1, batch_size=batch, lr=LR / 10,
        sampler="fixed", participation=cohort, eval_every=rounds + 1, progress=ticks, **options,
    )  # fmt: skip
    return ticks.figures()


def _load_rounds(load: Workload, rounds: int, **options: Any) -> Figures:
    return _rounds(load.make_model(), load.tensors(), load.algorithm, rounds, **options)


def _bare_rounds(load: Workload, rounds: int) -> Figures:
    ticks = Ticks(load.device)
    with repeatable(torch.device(load.device)):
        bare.train(load, rounds + 1, ticks, "tensors")
    return ticks.figures()


def _bare_epoch(model: nn.Module, data: Sequence[Any]) -> Figures:
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
    return ticks.figures()


def _profile(device: str, executor: str) -> Figures:
    load = Workload("cnn", clients=TRACED, cohort=TRACED, device=device)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as profiler:
        _load_rounds(load, 2, **executor_options(executor, TRACED))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return occupation(kernels[len(kernels) // 2 :])  # without the set-up and the capture, which come first


def occupation(kernels: Sequence[Mapping[str, Any]]) -> Figures:
    """Return how kernels, events of a Chrome trace, occupy a device.

    busy: the fraction of the time from the first kernel to the last in which some kernel runs. at_once: how many run,
    on average over that fraction. streams: on how many.
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels)
    if not spans:
        return {"kernels": 0, "streams": 0, "busy": 0.0, "at_once": 0.0}
    busy_time, end = 0.0, spans[0][0]
    for begin, ends in spans:
        busy_time += max(0.0, ends - max(begin, end))
        end = max(end, ends)
    return {
        "kernels": len(spans), "streams": len({e["args"]["stream"] for e in kernels}),
        "busy": busy_time / (end - spans[0][0]), "at_once": sum(e - b for b, e in spans) / busy_time,
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
