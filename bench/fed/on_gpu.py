"""Federated rounds on one GPU: small models by number of clients, FedLESAM's Table 8 setting, and a small BERT.

Each contender and model is a process (a job), so that a failed capture or an error that stays with the device costs one
row. The process prints each result as it is measured, and names the results that it has no time for. All times are of
steady rounds (bench/fed/steady.py).
"""

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from bench.fed import bare, steady
from bench.fed.process import Process, answers
from bench.fed.steady import MAX_ROUNDS, Figures, Tick
from bench.fed.workload import BATCH, LR, Workload
from fastsam import fed
from fastsam.fed import models
from fastsam.fed.loop.determinism import repeatable

TABLE8 = ("fedlesam", "fedavg", "fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam-s", "fedlesam-d")
CLIENTS = (100, 20, 8)
STREAMS = 31  # torch deals out 32 in turn, and more slots would share streams
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # a queue of the device for each stream
BARE, CAPTURED, JAX = "bare loop", "captured loop", "jax"
WORDS, WIDTH, TEXTS, COHORT = 32, 64, 16, 20  # longest text of a BERT, its width, texts in a batch, clients
# The curves of a BERT: a point has the width, the texts in a batch, and the clients. The middle is in all of them.
CURVES = {
    "width": [(width, TEXTS, COHORT) for width in (WIDTH, 256, 768)],
    "clients": [(WIDTH, TEXTS, n) for n in (8, COHORT, 100)],
    "texts in a batch": [(WIDTH, texts, COHORT) for texts in (4, TEXTS, 32)],
}
MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX would take most of the device's memory, and torch has some
TO_START = 10.0  # s that a process takes to import torch and to prepare the device
SHARE = 3  # a measurement may take so many times the average share of its job's time

# Part and title of a case, the executor, the place on the axis, and the measurement, which takes its limit in seconds.
Item = tuple[str, str, str, Any, Callable[[float], Figures]]
Loop = Callable[[Tick], Any]  # trains, and calls its argument after every round


def run(name: str, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Run one job in a process and yield the cases of its results; last how it ended, if it failed."""
    limit = max(seconds - TO_START, 1.0)
    process = Process([sys.executable, "-m", "bench.fed.on_gpu", name, device, str(limit)], CONNECTIONS | MEMORY)
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
    """Yield a round of n clients by one executor, by the bare loop with deterministic settings, or by JAX."""
    for n, algorithm in product(CLIENTS, ("fedavg", "fedsam")):
        load = Workload(model, algorithm, clients=n, cohort=n, device=device)
        train: Loop = partial(train_load, load, **executor_options(executor, n))
        if executor in OTHERS:
            train = partial(OTHERS[executor], load)
        yield "gpu", f"{model.upper()}, {algorithm}, by clients", executor, n, partial(time_rounds, device, train)


def table8(device: str, executor: str) -> Iterator[Item]:
    """Yield one of five local epochs of ResNet-18-GN on 10 of 100 clients with 500 random images of 32x32, batch 50."""
    model = models.build("resnet18_gn", (3, 32, 32), 10, 0).to(device)
    data, title = table8_data(device), "ResNet-18-GN, one local epoch of five"
    if executor == BARE:
        work = partial(time_rounds, device, partial(_train_bare_epochs, model, data[:10]))
        yield "gpu", title, executor, "fedavg", work
        return
    options = executor_options(executor, 10) | {"batch": 50, "cohort": 0.1}
    for algorithm in TABLE8:
        train = partial(train_model, model, data, algorithm, **options)
        yield "gpu", title, executor, algorithm, partial(time_rounds, device, train)


def transformers(device: str, executor: str) -> Iterator[Item]:
    """Yield rounds of clients with a BERT with adapters (bench/fed/bert.py), equal and unequal, along `CURVES`."""
    module = importlib.import_module(f"bench.fed.{'jax_bert' if executor == JAX else 'bert'}")
    option = {BARE: "bare", CAPTURED: "captured"}.get(executor, executor)
    known: dict[Workload, Figures] = {}

    def train(load: Workload, tick: Tick) -> None:
        with repeatable(torch.device(device)):
            module.train(load, MAX_ROUNDS, tick, option)

    def time_once(load: Workload, seconds: float) -> Figures:
        if load not in known:
            known[load] = time_rounds(device, partial(train, load), seconds)
        return known[load]

    for sizes, (axis, points) in product(("unequal", "equal"), CURVES.items()):
        for width, texts, n in points:
            slots, place = executor_options(executor, n).get("slots"), dict(zip(CURVES, (width, n, texts), strict=True))
            load = Workload(f"bert:{texts}x{WORDS}x{width}", "fedavg", n, n, sizes, device, slots)
            yield "gpu", f"BERT with LoRA, {sizes}, by {axis}", executor, place[axis], partial(time_once, load)


def table8_data(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random images and labels of ten classes for each client. Some images belong to several."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5000, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(10, (5000,), generator=generator).to(device)
    return [(images[start : start + 500], labels[start : start + 500]) for start in (i % 90 * 50 for i in range(100))]


def jobs(device: str) -> dict[str, Callable[[], Iterator[Item]]]:
    """Return what each process measures."""
    executors = ("sequential", "streams", "graph", "vmap") if device == "cuda" else ("sequential", "threads", "vmap")
    others = [name for name in OTHERS if name != JAX or importlib.util.find_spec("jax")]
    pairs = product(("cnn", "mlp"), (*others, *executors, "auto"))
    table: dict[str, Callable[[], Iterator[Item]]] = {f"{m} {e}": partial(by_clients, device, m, e) for m, e in pairs}
    table |= {f"table 8 {e}": partial(table8, device, e) for e in (BARE, *executors)}
    if all(map(importlib.util.find_spec, ("transformers", "peft"))):
        contenders = [*others, *executors] + [CAPTURED] * (device == "cuda")
        table |= {f"transformers {e}": partial(transformers, device, e) for e in contenders}
    return table


def measure(items: Iterator[Item], end: float) -> Iterator[dict[str, Any]]:
    """Yield a case with one row per item. A failure does not hide the other results."""
    queue = list(items)
    for number, (part, title, executor, value, work) in enumerate(queue):
        row: Figures = {
            "name": f"{executor}, {value}",
            "title": executor,
            "ours": executor not in (*OTHERS, CAPTURED),
            "executor": executor,
            "at": value,
        }
        seconds_left = end - time.monotonic()
        if seconds_left < 2:
            row["absent"] = "no time left"
        else:
            try:
                row |= work(min(seconds_left - 1, SHARE * seconds_left / (len(queue) - number)))
            except Exception as error:
                row["problem"] = f"{type(error).__name__}: {error}"
        if executor == JAX and "seconds" in row:
            compiled = f"without XLA's compilation: the first round ended after {row['first']:.1f} s"
            row["note"] = ": ".join(filter(None, (row.get("note"), compiled)))
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


def train_model(
    model: nn.Module, data: Sequence[Any], algorithm: str, tick: Tick, batch: int = BATCH, cohort: float = 1.0,
    **options: Any,
) -> Any:  # fmt: skip
    """Train by `fed.run` until `tick` raises."""
    return fed.run(
        model, data, fed.algorithms.registry[algorithm](), rounds=MAX_ROUNDS, batch_size=batch, lr=LR / 10,
        sampler="fixed", participation=cohort, eval_every=MAX_ROUNDS, progress=tick, **options,
    )  # fmt: skip


def train_load(load: Workload, tick: Tick, **options: Any) -> Any:
    """Train a workload by `fed.run` until `tick` raises."""
    return train_model(load.make_model(), load.tensors(), load.algorithm, tick, **options)


def _train_bare(load: Workload, tick: Tick) -> None:
    with repeatable(torch.device(load.device)):
        bare.train(load, MAX_ROUNDS, tick, "tensors")


def _train_jax(load: Workload, tick: Tick) -> None:
    from bench.fed import jax_round

    jax_round.train(load, MAX_ROUNDS, tick, "")


OTHERS: dict[str, Callable[[Workload, Tick], None]] = {BARE: _train_bare, JAX: _train_jax}


def _train_bare_epochs(model: nn.Module, data: Sequence[Any], tick: Tick) -> None:
    """Take local epochs of ten clients in a bare loop, without a server, until `tick` raises."""
    with repeatable(next(model.parameters()).device):
        local = bare.Tensors(model, sharp=False)
        start = local.weights()
        for _ in range(MAX_ROUNDS):
            for x, y in data:
                local.load(start)
                for part in torch.randperm(len(y)).to(y.device).split(50):
                    local.step(x[part], y[part])
            tick()


def time_rounds(device: str, train: Loop, seconds: float) -> Figures:
    """Return the times of steady rounds."""
    return steady.measure(device, train, seconds).figures()


if __name__ == "__main__":
    main(sys.argv[1:])
