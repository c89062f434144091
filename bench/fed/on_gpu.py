"""Federated rounds on one GPU, within a time: executors by number of clients, where client states live, FedLESAM's Table 8
setting, and a trace of what overlaps.

Everything runs in this process: a GPU's times are steady, and it is ours alone while it is lent. A series that would not be done in time
is left out, and named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.fed import bare
from bench.fed.workload import BATCH, LR, Workload
from fastsam import fed
from fastsam.fed import models

TABLE8 = ("fedavg", "fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam", "fedlesam-s", "fedlesam-d")
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 100)
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


def measure(device: str, seconds: float, out: Path | None, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All of it; the trace goes to `out`. `write` is given what there is after every series, so that nothing is lost with a run that is cut
    short."""
    found: dict[str, Any] = {"series": [], "overlap": {}}
    until = Until(seconds)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found["overlap"] = _guarded(lambda: overlap(device, out)) or {}
    parts = (
        by_clients(device, Until(until.left * 0.5)),
        client_states(device, Until(until.left * 0.65)),
        table8(device, until),
    )
    for series in chain(*parts):
        found["series"].append(asdict(series))
        print(_line(series), flush=True)
        write(found)
    return found


def _line(series: Series) -> str:
    value = series.problem if series.seconds is None else f"{1e3 * series.seconds:.1f} ms a round"
    if series.title == STATES and series.seconds is not None:
        value += f", {100 / series.seconds:.0f} states/s"
    return f"{series.title}: {series.name}, {series.at}: {value}"


def _guarded(work: Callable[[], Any]) -> Any:
    """The result, or the error as text: one part that fails does not hide the others."""
    try:
        return work()
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def executors(device: str) -> tuple[str, ...]:
    return ("sequential", "streams", "graph", "vmap") if device == "cuda" else ("sequential", "threads", "vmap")


def by_clients(device: str, until: Until) -> Iterator[Series]:
    """A round of n small CNNs, every client at once, beside the bare loop."""
    for n in CLIENTS:
        load = Workload("cnn", clients=n, cohort=n, device=device)
        title = "small CNN by clients"
        yield _series(title, "bare loop", n, until, lambda load=load: _bare_rounds(load, 4))
        for executor in executors(device):
            how = {"executor": executor, "slots": n}
            yield _series(
                title, executor, n, until, lambda load=load, how=how: _rounds(*_parts(load), "fedavg", 4, **how)
            )


def client_states(device: str, until: Until) -> Iterator[Series]:
    """A round of 100 clients of SCAFFOLD with their states on the device and in host memory, small and large models, one step each.

    One batch a client: as little work as there can be to hide the copies behind. A round reads and writes one state per client.
    """
    for width in STATE_WIDTHS:
        model, data = _parts(Workload(f"mlp:{width}", clients=100, device=device))
        data = [(x[:BATCH], y[:BATCH]) for x, y in data]
        at = sum(p.numel() for p in model.parameters())
        for where in ("device", "host"):
            how = {"executor": "streams" if device == "cuda" else "sequential", "client_state": where}
            yield _series(
                STATES, where, at, until,
                lambda model=model, data=data, how=how: _rounds(model, data, "scaffold", 4, **how),
            )  # fmt: skip


def table8(device: str, until: Until) -> Iterator[Series]:
    """ResNet-18-GN, 10 of 100 clients with 500 images of 32x32, batch 50; one of the five local epochs, its time taken five times.

    Random images: how long a step takes does not depend on what is on them.
    """
    model = models.build("resnet18_gn", (3, 32, 32), 10, 0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5000, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(10, (5000,), generator=generator).to(device)
    data = [(images[i * 50 : i * 50 + 500], labels[i * 50 : i * 50 + 500]) for i in range(90)] * 2
    title, model = "ResNet-18-GN, one local epoch of five", model.to(device)
    yield _series(title, "bare loop", "fedavg", until, lambda: _bare_epoch(model, data[:10]))
    for algorithm in TABLE8:  # all executors of one, so that a short run compares them
        for executor in executors(device)[:3]:
            how = {"executor": executor, "slots": 10, "batch": 50, "cohort": 0.1}
            yield _series(
                title, executor, algorithm, until,
                lambda algorithm=algorithm, how=how: _rounds(model, data[:100], algorithm, 2, **how),
            )  # fmt: skip


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
        model, data, fed.algorithms.registry[algorithm](), rounds=rounds + 1, batch_size=batch, lr=LR / 10, sampler="fixed",
        participation=cohort, eval_every=rounds + 1, progress=tick, **how,
    )  # fmt: skip
    return median(b - a for a, b in pairwise(ticks))


def _bare_rounds(load: Workload, rounds: int) -> float:
    ticks: list[float] = []
    model = load.make_model()

    def tick() -> None:
        _wait(model)
        ticks.append(time.perf_counter())

    bare.train(load, rounds + 1, tick, "tensors")
    return median(b - a for a, b in pairwise(ticks))


def _bare_epoch(model: nn.Module, data: Sequence[Any]) -> float:
    """Ten clients' local epochs in a bare loop; the first client, taken once more before, warms up."""
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


def overlap(device: str, out: Path) -> dict[str, Any]:
    """A round of eight small CNNs on streams under the profiler: how many streams have a kernel running at the same time, at most."""
    load = Workload("cnn", clients=8, cohort=8, device=device)
    model, data = _parts(load)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    path = out / "overlap.json"
    with torch.profiler.profile(activities=activities) as profiler:
        _rounds(model, data, "fedavg", 1, executor="streams" if device == "cuda" else "threads", slots=8)
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    path.write_text(json.dumps({"traceEvents": kernels[-2000:]}))
    return {"kernels": len(kernels), "streams_at_once": at_once(kernels)}


def at_once(kernels: Sequence[dict[str, Any]]) -> int:
    """The largest number of streams that have a kernel running at the same instant. Events as in a Chrome trace."""
    marks = []
    for event in kernels:
        stream = event["args"]["stream"]
        marks += [(event["ts"], 1, stream), (event["ts"] + event["dur"], 0, stream)]
    running: dict[Any, int] = {}
    most = 0
    for _, starts, stream in sorted(marks, key=lambda m: (m[0], m[1])):
        running[stream] = running.get(stream, 0) + (1 if starts else -1)
        most = max(most, sum(1 for n in running.values() if n > 0))
    return most
