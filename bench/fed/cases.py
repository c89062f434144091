"""The cases of `python -m bench federated`: our executors, bare loops, and other simulators.

Every contender is a separate process that trains the same workload (bench/fed/workload.py); they take turns
(bench/fed/race.py). `make bench-fed` makes the environments of the other simulators.

Two races measure speed: all contenders on one core (`speed-1`), and on two cores by their own settings (`speed-2`).
Clients with a small BERT race on one core (`bert`), if transformers and peft are installed.
"""

import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.case import Case, Options
from bench.fed import cores, on_gpu, overhead
from bench.fed.peers import WITH_SAM
from bench.fed.race import Entry, race
from bench.fed.worker import APART
from bench.fed.workload import DIGITS, Workload
from fastsam import fed

ROUNDS = {"mlp": 30, "gelu": 30, "cnn": 2, "bert": 2}  # rounds of a chunk, half a second or more for most contenders
LONGER = 10  # factor on the MLPs' rounds for contenders with rounds of one or two milliseconds
SHORTER = {("mlp", "flower"): 0.1}  # a round of Flower takes 400 times as long
CHUNKS = 12  # turns that each contender takes
PLAIN_EXECUTOR = {
    "mlp": "vmap",
    "gelu": "vmap",
    "cnn": "sequential",
}  # the better executor of a plain install on one core
SIZES = {"unequal": "unequal clients", "digits": "digits, alpha 0.3", "equal": "equal clients"}
TITLES = {"mlp": "MLP", "cnn": "CNN", "gelu": "MLP with LayerNorm and GELU"}
MODELS, ALGORITHMS = ("mlp", "cnn"), ("fedavg", "fedsam")
RACES = {  # by number of cores: sizes of the clients, model, algorithm
    1: [
        *itertools.product(["unequal"], MODELS, ALGORITHMS), ("digits", "mlp", "fedavg"),
        *itertools.product(["equal"], MODELS, ["fedavg"]), ("unequal", "gelu", "fedavg"),
    ],
    2: [*itertools.product(["unequal"], MODELS, ALGORITHMS)],
}  # fmt: skip
# Batches and longest texts of BERT's clients, sizes of the clients, algorithm.
TEXTS = [
    ("8x16", "unequal", "fedavg"), ("16x16", "unequal", "fedavg"), ("16x32", "unequal", "fedavg"),
    ("16x32", "unequal", "fedsam"), ("16x32", "equal", "fedavg"),
]  # fmt: skip
BOTH = min(2, cores.available())  # cores of contenders that use several
ONE_CORE = ", one core"  # end of the label of a contender that has one core in the race of two
USE_TWO = ("flower", "blazefl")  # simulators that train a client on each core at the same time


def all_of(options: Options) -> Iterator[Case]:
    """Yield federated rounds: our executors, bare loops and other simulators."""
    if options.device == "cuda":
        for name in on_gpu.jobs(options.device):
            yield Case("gpu", name, (), partial(on_gpu.run, name, options.device), takes_seconds=True)
        return
    for part in (speed, transformers, overheads, growth, ranks):
        yield from part(options)


def _race(options: Options, part: str, title: str, entries: list[Entry], *turns: int, **facts: Any) -> Iterator[Case]:
    names = options.select(entry.label for entry in entries[1:])
    entries = [entries[0], *(entry for entry in entries if entry.label in names)]  # the first is the unit

    def measure() -> dict[str, Any]:
        result = race(entries, *turns)
        for row, value in zip(result["rows"], facts.get("at", ())):
            row["at"] = value
        return ({"axis": facts["axis"]} if facts else {}) | result

    yield Case(part, title, [entry.label for entry in entries], measure)


def speed(options: Options) -> Iterator[Case]:
    """Yield the races of all contenders on one core, and on two cores. Unequal clients come first."""
    write_digits()
    for num_cores, make_entries in ((1, entries_of_one_core), (2, entries_of_two_cores))[:BOTH]:
        for sizes, model, algorithm in RACES[num_cores]:
            load = Workload(model, algorithm, sizes=sizes)
            peers = {name: p for name, p in options.peers.items() if algorithm == "fedavg" or name in WITH_SAM}
            peers = peers if model in MODELS else {}
            rounds = max(1, ROUNDS[model] // (10 if options.quick else 1))
            turns = (options.number(CHUNKS, 3), rounds)
            title = f"{TITLES[model]}, {SIZES[sizes]}, {algorithm}"
            yield from _race(options, f"speed-{num_cores}", title, make_entries(load, peers), *turns)


def transformers(options: Options) -> Iterator[Case]:
    """Yield the races of clients with a small BERT on one core (see bench/fed/bert.py)."""
    if any(importlib.util.find_spec(package) is None for package in ("transformers", "peft")):
        return
    for texts, sizes, algorithm in TEXTS:
        load = Workload(f"bert:{texts}", algorithm, sizes=sizes)
        names = {"bare loop": "bare", "fastsam, sequential": "sequential", "fastsam, vmap": "vmap"}
        names |= {"fastsam plain, vmap": "plain-vmap"}
        entries = [Entry(label, f"bert:{option}", load, ours=option != "bare") for label, option in names.items()]
        turns = (options.number(CHUNKS, 3), 1 if options.quick else ROUNDS["bert"])
        yield from _race(options, "bert", f"{texts} words, {SIZES[sizes]}, {algorithm}", entries, *turns)


def write_digits() -> None:
    """Write the digits of 100 clients, a Dirichlet split with alpha 0.3, where the contenders read them."""
    if not DIGITS.exists():
        DIGITS.parent.mkdir(parents=True, exist_ok=True)
        pairs = fed.digits(clients=100, alpha=0.3, seed=0).clients
        arrays = {f"x{i}": x.flatten(1).numpy() for i, (x, _) in enumerate(pairs)}
        np.savez(DIGITS, **arrays, **{f"y{i}": y.numpy() for i, (_, y) in enumerate(pairs)})


def entries_of_one_core(load: Workload, peers: Mapping[str, str]) -> list[Entry]:
    """Return contenders on one core; the first is the unit."""
    bare = partial(Entry, workload=load, ours=False)
    result = [bare("bare loop", "bare:tensors"), bare("bare loop, flat", "bare:flat")]
    if load.model == "cnn":
        result += [bare("bare loop, channels_last", "bare:channels_last")]
    for executor in ("sequential", "vmap"):
        result += [Entry(f"fastsam, {executor}", f"ours:{executor}", load, longer=_longer(load, executor))]
    executor = PLAIN_EXECUTOR[load.model]
    result += [Entry(f"fastsam plain, {executor}", f"plain:{executor}", load)]
    return result + [_peer(load, name, python) for name, python in peers.items()]


def entries_of_two_cores(load: Workload, peers: Mapping[str, str]) -> list[Entry]:
    """Return contenders on two cores, and next to them contenders that train one client after another on one core."""
    two = {"threads": 2, "cores": 2}
    result = [Entry(f"bare loop{ONE_CORE}", "bare:tensors", load, ours=False)]
    result += [Entry("bare loop, two threads", "bare:tensors", load, ours=False, **two)]
    result += [Entry("fastsam, auto", "ours:auto", load, longer=_longer(load, "auto"), **two)]
    result += [Entry("fastsam plain, auto", "plain:auto", load, **two)]
    result += [Entry("fastsam, threads", "ours:threads", load, **two)]
    for name, python in peers.items():
        one = _peer(load, name, python)
        result += [replace(one, **two) if name in USE_TWO else replace(one, label=f"{name}{ONE_CORE}")]
    return result


def _longer(load: Workload, executor: str) -> float:
    return LONGER if load.model != "cnn" and executor in ("vmap", "auto") else 1


def _peer(load: Workload, name: str, python: str) -> Entry:
    return Entry(name, f"peers:{name}", load, python, longer=SHORTER.get((load.model, name), 1), ours=False)


def overheads(options: Options) -> Iterator[Case]:
    """Yield the cost of each algorithm next to FedAvg, on the plain executor with one thread and on the default one."""
    for model, executor in itertools.product(overhead.CLIENTS, overhead.EXECUTORS):
        title = f"{model.upper()}, {executor}"
        for label, load in overhead.loads(model).items():
            if options.select([label]):
                run = partial(overhead.compare, label, load, executor, options.number(CHUNKS + 3, 3))
                yield Case("overhead", title, [label], lambda run=run: {"rows": [run()]})  # type: ignore[misc]


def growth(options: Options) -> Iterator[Case]:
    """Yield the growth of a round's time with clients, parameters and slots."""
    widths = (133, 1333) if options.quick else (133, 1333, 13333, 133333)
    clients = {n: Workload("mlp", clients=n, cohort=10) for n in (10, 100, 1000, 10000)[: 3 if options.quick else 4]}
    parameters = {75 * width + 10: Workload(f"mlp:{width}", cohort=4) for width in widths}
    counts = (1, 4, 16) if options.quick else (1, 2, 4, 8, 16, 32, 64)
    slots = {n: Workload("mlp", cohort=64, slots=n) for n in counts}
    for axis, executor, loads in (
        ("clients", "sequential", clients), ("parameters", "sequential", parameters), ("slots", "vmap", slots)
    ):  # fmt: skip
        entries = [Entry(f"{value:,} {axis}", f"ours:{executor}", load) for value, load in loads.items()]
        facts = {"axis": axis, "at": list(map(float, loads))}
        chunks, rounds = max(3, options.number(CHUNKS, 3) // 3), 1 if options.quick else 3
        yield from _race(options, "growth", f"{executor} by {axis}", entries, chunks, rounds, **facts)


def ranks(options: Options) -> Iterator[Case]:
    """Yield the race of one process, two, and two that share only the machine: the bound for ranks."""
    load = Workload("cnn")
    half = replace(load, cohort=load.cohort // 2)
    entries = [Entry("1 rank", "ours:sequential", load), Entry("2 ranks", "ours:sequential", load, ranks=2, cores=BOTH)]
    entries += [Entry("2 runs apart, half the clients each", f"ours:sequential:{APART}", half, ranks=2, cores=BOTH)]
    yield from _race(options, "ranks", "CNN, ranks", entries, options.number(CHUNKS, 3), ROUNDS["cnn"])
