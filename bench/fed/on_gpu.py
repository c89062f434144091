"""Federated rounds on one GPU, within a time: executors by number of clients, FedLESAM's Table 8 setting, how busy a
round keeps the device, and where client states live.

Everything runs in this process: a GPU's times are steady, and it is ours alone while it is lent. What decides comes
first: most clients, and FedLESAM. A series that would not be done in time is left out, and named.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from fastsam.fed.loop.determinism import repeatable

TABLE8 = ("fedlesam", "fedavg", "fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam-s", "fedlesam-d")
CLIENTS = (100, 20, 8)
TRACED = 20  # clients: a hundred make a trace that takes longer to read than to make
STREAMS = 31  # of the 32 that torch deals out in turn; one is for graphs of all rows. More slots would share them
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
    """All of it. `write` is given what there is after every series, so that nothing is lost with a run that is cut
    short."""
    found: dict[str, Any] = {"series": [], "busy": []}
    until = Until(seconds)

    def enter(parts: Iterator[Series]) -> None:
        for series in parts:
            found["series"].append(asdict(series))
            print(_line(series), flush=True)
            write(found)

    enter(by_clients(device, Until(until.left * 0.6)))
    enter(table8(device, Until(until.left * 0.5)))
    for executor in executors(device)[:-1]:
        found["busy"].append(
            {"executor": executor, "clients": TRACED} | _guarded(lambda e=executor: busy(device, e), until)
        )
        print(busy_line(found["busy"][-1]), flush=True)
        write(found)
    enter(client_states(device, until))
    return found


def _line(series: Series) -> str:
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
    """Those that a device has; the rule that picks one of them comes last."""
    return (
        ("sequential", "streams", "graph", "vmap", "auto")
        if device == "cuda"
        else ("sequential", "threads", "vmap", "auto")
    )


def by_clients(device: str, until: Until) -> Iterator[Series]:
    """A round of n clients, beside the bare loop under the settings that give the same bits every time, as ours has
    them."""
    for n in CLIENTS:
        for model in ("cnn", "mlp"):
            for algorithm in ("fedavg", "fedsam"):
                load = Workload(model, algorithm, clients=n, cohort=n, device=device)
                title = f"{model.upper()}, {algorithm}, by clients"
                yield _series(title, "bare loop", n, until, lambda load=load: _bare_rounds(load, 3))
                for executor in executors(device):
                    options = how(executor, n)
                    yield _series(
                        title, executor, n, until,
                        lambda load=load, options=options: _rounds(*_parts(load), load.algorithm, 3, **options),
                    )  # fmt: skip


def how(executor: str, clients: int) -> dict[str, Any]:
    """Its keywords: every client at once, where each has a stream of its own no more than there are; "auto" chooses for
    itself."""
    if executor in ("auto", "sequential"):
        return {"executor": executor}
    return {"executor": executor, "slots": clients if executor == "vmap" else min(clients, STREAMS)}


def client_states(device: str, until: Until) -> Iterator[Series]:
    """A round of 100 clients of SCAFFOLD with their states on the device and in host memory, small and large models,
    one step each.

    One batch a client: as little work as there can be to hide the copies behind. A round reads and writes one state per
    client.
    """
    for width in STATE_WIDTHS:
        model, data = _parts(Workload(f"mlp:{width}", clients=100, device=device))
        data = [(x[:BATCH], y[:BATCH]) for x, y in data]
        at = sum(p.numel() for p in model.parameters())
        for where in ("device", "host"):
            options = {"executor": "streams" if device == "cuda" else "sequential", "client_state": where}
            yield _series(
                STATES, where, at, until,
                lambda model=model, data=data, options=options: _rounds(model, data, "scaffold", 4, **options),
            )  # fmt: skip


def table8(device: str, until: Until) -> Iterator[Series]:
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
    for algorithm in TABLE8:  # all executors of one, so that a short run compares them
        if algorithm == "fedavg":
            yield _series(title, "bare loop", algorithm, until, lambda: _bare_epoch(model, data[:10]))
        for executor in executors(device)[:3]:
            options = how(executor, 10) | {"batch": 50, "cohort": 0.1}
            yield _series(
                title, executor, algorithm, until,
                lambda algorithm=algorithm, options=options: _rounds(model, data[:100], algorithm, 2, **options),
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
