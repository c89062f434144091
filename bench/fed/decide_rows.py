"""The rows of the measurements M1 to M9 (see bench/fed/decide.py), and the process that measures some of them.

A row knows which part of the package it needs (`missing`). It is skipped until that part exists, and measured from then
on. An executor that refuses a run is not built for it either.
"""

import cProfile
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn

import fastsam
from bench import ROOT
from bench.fed import equal_bits, on_gpu, steady
from bench.fed.on_gpu import CONNECTIONS, WITHOUT_ROW_PROGRAMS, executor_options, table8_data, train_load, train_model
from bench.fed.process import Process, answers
from bench.fed.race import Entry
from bench.fed.steady import Figures
from bench.fed.worker import peak_mib
from bench.fed.workload import CLASSES, Workload
from fastsam.fed import models
from fastsam.fed.executors import graph, rowprograms
from fastsam.fed.sums import ranks

NOT_BUILT = "not built"
REFUSAL = "cannot serve here"  # words of an executor that refuses a run
NO_TIME = "no time left"
MIN_SECONDS = 1.0  # seconds that a row needs
LASTING = ("CUDA error", "CaptureError")  # errors after which a process cannot go on
STEPS = "GRAPH_STEPS"  # constant of executors/graph.py: the largest number of steps in a lane's graph
# Kinds of processes: the names of their environments.
PLAIN, FEW_CONNECTIONS, OTHER_TREE, LAUNCHER = "plain", "8 connections", "other tree", "launcher"
ENVIRONMENTS = {FEW_CONNECTIONS: {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}  # the others have `CONNECTIONS`
LONG_ROUND = 10.0  # seconds that the first round of a process may take, which prepares torch
FUNCTIONS = 12  # lines of the host's profile that are stored


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        dropped, rounds: rounds before the first time, and number of times.
        clients: number of clients of a round.
        slots: numbers of slots of `graph`, the most important first.
        lanes: numbers of slots for comparisons, the last one the largest.
        counts: numbers of clients for the crossing of `vmap` and `graph`.
        images: samples of a ResNet client, in a cohort of a tenth of `resnet_clients`.
        resnet_clients: number of ResNet clients.
        widths: channels of the ResNet.
        processes: numbers of processes on one device.
    """

    dropped: int = steady.DROPPED
    rounds: int = steady.ROUNDS
    clients: int = 100
    slots: Sequence[int] = (8, 31, 16, 4, 2, 1)
    lanes: Sequence[int] = (8, 31)
    counts: Sequence[int] = (2, 4, 8, 16, 31, 100)
    images: int = 500
    resnet_clients: int = 100
    widths: Sequence[int] = (64, 128, 256, 512)
    processes: Sequence[int] = (1, 2, 4, 8)


QUICK = Sizes(1, 2, 4, (2, 1), (2,), (2, 3), 20, 20, (16, 16, 16, 16), (1, 2))


@dataclass(frozen=True)
class Setting:
    """A device and the sizes of the measurements."""

    device: str
    sizes: Sizes

    def measure(self, train: on_gpu.Loop, seconds: float, **options: Any) -> steady.SteadyRounds:
        keywords = {"dropped": self.sizes.dropped, "rounds": self.sizes.rounds} | options
        return steady.measure(self.device, train, seconds, **keywords)

    def load(self, model: str, clients: int | None = None, algorithm: str = "fedavg") -> Workload:
        n = clients or self.sizes.clients
        return Workload(model, algorithm, clients=n, cohort=n, device=self.device)


@dataclass(frozen=True)
class Row:
    """A measurement.

    Args:
        name: name of the row.
        work: function of a time limit in seconds that returns figures.
        process: kind of the process in which it runs.
        missing: function that returns what the package lacks for it, or an empty string.
    """

    name: str
    work: Callable[[float], Figures]
    process: str = PLAIN
    missing: Callable[[], str] = str


# --- the parts ---


def bits(setting: Setting) -> Iterator[Row]:
    """M1: weights with the bits of `sequential`, in two runs, because the second one captures again."""
    for case, executor in product(equal_bits.CASES, ("graph", "streams")):
        yield Row(f"{case}, {executor}", lambda _, c=case, e=executor: equal_bits.compare(setting.device, c, e))


def lanes(setting: Setting) -> Iterator[Row]:
    """M2: a round of CNN clients under `graph`, by slots, steps in a graph, and connections; and of another tree."""
    sizes = setting.sizes
    for slots in sizes.slots:
        yield Row(f"graph, {slots} slots", partial(_graph_rounds, setting, slots))
    for steps, slots in product((1, 4, 8), sizes.lanes):
        work = partial(_graph_rounds, setting, slots, steps=steps)
        yield Row(f"graphs of {steps} steps, {slots} slots", work, missing=_lacks_steps)
    for slots in dict.fromkeys((*sizes.lanes, sizes.slots[-1])):
        yield Row(f"other tree, {slots} slots", partial(_graph_rounds, setting, slots), OTHER_TREE)
    for slots in sizes.lanes:
        yield Row(f"8 connections, {slots} slots", partial(_graph_rounds, setting, slots), FEW_CONNECTIONS)


def kernels_at_once(setting: Setting) -> Iterator[Row]:
    """M3: kernels at once, and the busy part of steady rounds."""
    few = setting.sizes.lanes[0]
    for executor, slots in (*(("graph", n) for n in setting.sizes.lanes), ("streams", few)):
        train = partial(train_load, setting.load("cnn", 2 * slots), executor=executor, slots=slots)
        yield Row(f"{executor}, {slots} lanes", partial(on_gpu.profile, setting.device, train))


def crossing(setting: Setting) -> Iterator[Row]:
    """M4: `vmap` and `graph` by clients; and models beyond the limits of size."""
    most = setting.sizes.counts[-1]
    pairs = [("cnn", n) for n in setting.sizes.counts], [("cnn:2", most)]
    for (model, n), executor in product([*pairs[0], *pairs[1]], ("vmap", "graph")):
        yield _rounds_row(setting, f"{model.upper()}, {executor}, {n} clients", model, executor, n)
    for n in setting.sizes.counts:
        yield _rounds_row(setting, f"MLP, vmap, {n} clients", "mlp", "vmap", n)
    for executor in ("vmap", "graph"):
        yield _rounds_row(setting, f"MLP:1024, {executor}, {most} clients", "mlp:1024", executor, most)


def dense(setting: Setting) -> Iterator[Row]:
    """M5: executors for dense models, also without a row program."""
    for executor in ("graph", WITHOUT_ROW_PROGRAMS, "sequential"):
        yield _rounds_row(setting, executor, "mlp", executor, setting.sizes.clients)


def resnet(setting: Setting) -> Iterator[Row]:
    """M6: a local epoch of ResNet-18-GN under `graph`, by slots, algorithm, precision, stem and memory format."""
    count = setting.sizes.resnet_clients // 10
    for slots in dict.fromkeys(n for n in (count, count // 2, 2, 1) if n):
        yield Row(f"{slots} slots", partial(_resnet_rounds, setting, slots))
    yield Row("fedsam", partial(_resnet_rounds, setting, count, algorithm="fedsam"))
    formats = ("preserve", "channels_last")
    for stem, (precision, memory_format) in product(("7x7", "3x3"), [*product(PRECISIONS, formats)]):
        names = [f"{stem} stem", precision * (precision != TORCHS_OWN), memory_format * (memory_format != "preserve")]
        options = {"stem": stem, "precision": precision, "memory_format": memory_format}
        if names != ["7x7 stem", "", ""] and names[1:] != ["no TF32", "channels_last"]:  # the first is the first row
            yield Row(", ".join(filter(None, names)), partial(_resnet_rounds, setting, count, **options))


def dropout(setting: Setting) -> Iterator[Row]:
    """M7: a CNN with dropout."""
    for executor in ("graph", "streams", "sequential"):
        yield _rounds_row(setting, executor, "dropout", executor, setting.sizes.clients)


def several_processes(setting: Setting) -> Iterator[Row]:
    """M8: `sequential` in several processes on one device."""
    for n in setting.sizes.processes:
        missing = partial(_lacks_ranks, setting.device) if n > 1 else str
        yield Row(f"{n} process{'es' * (n > 1)}", partial(_rank_rounds, setting, n), LAUNCHER, missing)


def host(setting: Setting) -> Iterator[Row]:
    """M9: where the host spends a round, and the largest memory."""
    for executor in ("graph", "vmap"):
        yield Row(executor, partial(_host_profile, setting, executor))


ROWS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "M1": bits, "M2": lanes, "M3": kernels_at_once, "M4": crossing, "M5": dense, "M6": resnet, "M7": dropout,
    "M8": several_processes, "M9": host,
}  # fmt: skip


# --- what the package lacks ---


def _lacks_steps() -> str:
    return "" if hasattr(graph, STEPS) else f"executors/graph.py has no {STEPS}"


def _lacks_ranks(device: str) -> str:
    """Return why several ranks cannot share one GPU, or an empty string."""
    count = torch.cuda.device_count()
    if device != "cuda":
        return ""
    with mock.patch.dict(os.environ, LOCAL_RANK=str(count)):
        index = ranks.local_device().index
    return "" if index < count else f"rank {count} of a machine takes GPU {index}, of {count}"


# --- measurements ---


def _graph_rounds(setting: Setting, slots: int, seconds: float, steps: int | None = None) -> Figures:
    """Return the times of rounds of CNNs, and the host's time of a replay; with `steps` steps in a graph."""
    train = partial(train_load, setting.load("cnn"), executor="graph", slots=slots)
    with nullcontext() if steps is None else mock.patch.object(graph, STEPS, steps):
        rounds = setting.measure(train, seconds, window=replay_times)
    figures = rounds.figures()
    if rounds.times and rounds.context:
        figures |= {"replays": len(rounds.context) / len(rounds.times), "replay_seconds": median(rounds.context)}
    return figures


@contextmanager
def replay_times() -> Iterator[list[float]]:
    """Yield the list of the seconds that the host needs for each replay of a graph in this context."""
    times, replay = list[float](), torch.cuda.CUDAGraph.replay

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        start = time.perf_counter()
        replay(graph)
        times.append(time.perf_counter() - start)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed_replay):
        yield times


def _rounds_row(setting: Setting, name: str, model: str, executor: str, clients: int) -> Row:
    def work(seconds: float) -> Figures:
        options = executor_options(executor.split(",")[0], clients)
        load = setting.load("cnn" if model == "dropout" else model, clients)
        train = partial(train_load, load, **options)
        if model == "dropout":
            module = equal_bits.dropout_cnn().to(setting.device)
            train = partial(train_model, module, load.tensors(), "fedavg", **options)
        without = mock.patch.object(rowprograms, "maker", lambda setup: None)
        with without if executor == WITHOUT_ROW_PROGRAMS else nullcontext():
            return setting.measure(train, seconds).figures()

    return Row(name, work)


class HalfPrecision(nn.Module):
    """A model that runs in bfloat16 where torch's autocast does; weights and gradients stay float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x).float()


@contextmanager
def no_tf32() -> Iterator[None]:
    """Compute convolutions and matrix products in float32."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    old_values = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = old_values


TORCHS_OWN = "torch's own precision"  # TF32 in convolutions
PRECISIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    TORCHS_OWN: nullcontext, "no TF32": no_tf32, "bfloat16": nullcontext,
}  # fmt: skip


def _resnet_rounds(
    setting: Setting, slots: int, seconds: float, algorithm: str = "fedavg", stem: str = "7x7",
    precision: str = TORCHS_OWN, memory_format: str = "preserve",
) -> Figures:  # fmt: skip
    """Return the times of local epochs of a tenth of the clients of Table 8."""
    sizes = setting.sizes
    model = models.build("resnet18_gn", (3, 32, 32), CLASSES, 0, stem=stem, widths=sizes.widths).to(setting.device)
    model = HalfPrecision(model) if precision == "bfloat16" else model
    data = table8_data(setting.device, sizes.resnet_clients, sizes.images)
    options = {"executor": "graph", "slots": slots, "batch": 50, "cohort": 0.1, "memory_format": memory_format}
    with PRECISIONS[precision]():
        return setting.measure(partial(train_model, model, data, algorithm, **options), seconds).figures()


def _rank_rounds(setting: Setting, processes: int, seconds: float) -> Figures:
    """Return the times of rounds of a run in several processes, as the first one takes them."""
    sizes, end = setting.sizes, time.monotonic() + seconds
    entry, total = Entry("", "ours:sequential", setting.load("cnn"), ranks=processes), sizes.dropped - 1 + sizes.rounds
    process = entry.start(total, 1)  # the worker drops the first round itself
    times: list[float] = []
    try:
        process.answer(seconds)
        while len(times) < total and time.monotonic() < end:
            process.send(None)
            times.append(process.answer(max(end - time.monotonic(), 1.0)))
    except RuntimeError:
        if time.monotonic() < end:
            raise
    finally:
        process.close()
    return steady.figures_of(times[sizes.dropped - 1 :], sizes.rounds, len(times) + 1)


def _host_profile(setting: Setting, executor: str, seconds: float) -> Figures:
    """Return the functions in which the host spends most of a round, and the peak of the device's memory in MiB."""
    if setting.device == "cuda":
        torch.cuda.init()  # without it there is nothing to reset
        torch.cuda.reset_peak_memory_stats()
    train = partial(train_load, setting.load("cnn"), **executor_options(executor, setting.sizes.clients))
    rounds = setting.measure(train, seconds, window=cProfile.Profile)
    peak = torch.cuda.max_memory_allocated() / 2**20 if setting.device == "cuda" else peak_mib()
    figures = rounds.figures() | {"peak_mib": round(peak, 1)}
    if rounds.times and rounds.context is not None:
        stats = pstats.Stats(rounds.context).stats  # type: ignore[attr-defined]
        lines = sorted(((own, calls, *where) for where, (_, calls, own, _, _) in stats.items()), reverse=True)
        n = len(rounds.times)
        figures["functions"] = [
            {"name": f"{Path(file).name}:{line} {name}".removeprefix("~:0 "), "seconds": own / n, "calls": calls / n}
            for own, calls, file, line, name in lines[:FUNCTIONS]
        ]
    return figures


# --- the process ---


def start(
    part: str, kind: str, setting: Setting, seconds: float, names: Sequence[str], tree: Path | None = None
) -> Process:  # fmt: skip
    """Start the process that measures rows of one kind, with the package in `tree`. It answers row by row."""
    is_quick = str(int(setting.sizes is QUICK))
    arguments = [part, setting.device, str(seconds), is_quick, json.dumps(list(names))]
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = ENVIRONMENTS.get(kind, CONNECTIONS) | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "bench.fed.decide_rows", *arguments]
    return Process(command, environment, ROOT if tree is None else tree)


def measure_row(row: Row, seconds: float) -> Figures:
    """Return a row with its figures, or why it has none."""
    result: Figures = {"name": row.name, "title": row.name, "ours": True}
    if seconds < MIN_SECONDS:
        return result | {"absent": NO_TIME}
    try:
        return result | row.work(seconds)
    except ValueError as error:
        if REFUSAL not in str(error):
            return result | {"problem": f"ValueError: {error}"}
        return result | {"absent": f"{NOT_BUILT}: {error}"}
    except Exception as error:
        return result | {"problem": f"{type(error).__name__}: {error}"}


def main(argv: Sequence[str]) -> None:
    part, device, seconds, is_quick, names = argv
    say, end = answers(), time.monotonic() + float(seconds)
    assert fastsam.__file__ is not None and Path(fastsam.__file__).is_relative_to(Path.cwd()), fastsam.__file__
    torch.set_num_threads(1)
    table = {row.name: row for row in ROWS[part](Setting(device, QUICK if is_quick == "1" else Sizes()))}
    queue = json.loads(names)
    for number, name in enumerate(queue):
        left = end - time.monotonic()
        row = measure_row(table[name], min(left, max(on_gpu.SHARE * left / (len(queue) - number), LONG_ROUND)))
        say(row)
        if any(words in row.get("problem", "") for words in LASTING):
            break  # a new process goes on
    say(None)


if __name__ == "__main__":
    main(sys.argv[1:])
