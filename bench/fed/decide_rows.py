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
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from unittest import mock

import torch

import fastsam
from bench import ROOT
from bench.fed import equal_bits, on_gpu, resnet, steady
from bench.fed.on_gpu import CONNECTIONS, WITHOUT_ROW_PROGRAMS, executor_options, train_load, train_model
from bench.fed.process import Process, answers
from bench.fed.race import Entry
from bench.fed.setting import QUICK, Row, Setting, Sizes
from bench.fed.steady import Figures
from bench.fed.worker import peak_mib
from fastsam.fed.executors import graph, rowprograms
from fastsam.fed.sums import ranks

NOT_BUILT = "not built"
REFUSAL = "cannot serve here"  # words of an executor that refuses a run
NO_TIME = "no time left"
MIN_SECONDS = 1.0  # seconds that a row needs
LASTING = ("CUDA error", "CaptureError")  # errors after which a process cannot go on
STEPS = "GRAPH_STEPS"  # constant of executors/graph.py: the largest number of steps in a lane's graph
# Kinds of processes in addition to `PLAIN`: the names of their environments.
FEW_CONNECTIONS, OTHER_TREE, LAUNCHER = "8 connections", "other tree", "launcher"
ENVIRONMENTS = {FEW_CONNECTIONS: {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}  # the others have `CONNECTIONS`
LONG_ROUND = 10.0  # seconds that the first round of a process may take, which prepares torch
FUNCTIONS = 12  # lines of the host's profile that are stored


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
    pairs = [*(("cnn", n) for n in setting.sizes.counts), ("cnn:2", most)]
    for (model, n), executor in product(pairs, ("vmap", "graph")):
        yield _rounds_row(setting, f"{model.upper()}, {executor}, {n} clients", model, executor, n)
    for n in setting.sizes.counts:
        yield _rounds_row(setting, f"MLP, vmap, {n} clients", "mlp", "vmap", n)
    for executor in ("vmap", "graph"):
        yield _rounds_row(setting, f"MLP:1024, {executor}, {most} clients", "mlp:1024", executor, most)


def dense(setting: Setting) -> Iterator[Row]:
    """M5: executors for dense models, also without a row program."""
    for executor in ("graph", WITHOUT_ROW_PROGRAMS, "sequential"):
        yield _rounds_row(setting, executor, "mlp", executor, setting.sizes.clients)


def resnet18(setting: Setting) -> Iterator[Row]:
    """M6: a local epoch of ResNet-18-GN under `graph`, by slots, algorithm, precision, stem and memory format."""
    count = setting.sizes.resnet_clients // 10
    for slots in dict.fromkeys(n for n in (count, count // 2, 2, 1) if n):
        yield Row(f"{slots} slots", partial(resnet.rounds, setting, slots))
    yield Row("fedsam", partial(resnet.rounds, setting, count, algorithm="fedsam"))
    for name, options in resnet.VARIANTS.items():
        yield Row(name, partial(resnet.rounds, setting, count, **options))


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
    "M1": bits, "M2": lanes, "M3": kernels_at_once, "M4": crossing, "M5": dense, "M6": resnet18, "M7": dropout,
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
