"""What a GPU should take for every kernel, step and round, by arithmetic in bytes and launches: written before anything
was measured on one.

docs/kernels.md shows it beside what `make gpu` measures (`python -m bench.report`). A figure that misses its
prediction, in either direction, says that something in this file is not understood. The constants are stated here and
nowhere fitted; H200 is the device that they are for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from bench.fed.workload import BATCH, SAMPLES
from bench.kernel_cases import KERNEL_SIZES, OPS, STEP
from bench.problem import Size
from bench.tables import table

LAUNCH = 2e-6  # s that a kernel of a replayed graph takes in addition to its memory accesses: start and end
BANDWIDTH = {"H100": 2.9e12, "H200": 4.3e12}  # bytes/s of a large copy, read plus written
# s of dependent accesses to memory that no bandwidth shortens, 0.7 us each: the scalars, then the elements. A sum also
# writes its partial sums, takes a ticket and reads the partial sums of the other blocks.
LATENCY, SUM_LATENCY = 1.5e-6, 3e-6
SIZES = ("resnet18", "100m", "50k", "rows100", "cut1000")
# Segments that a launch holds, by its list operands: csrc/cuda/common.cuh, held to it by a test.
LARGE = {lists: (32764 - 200 - 16) // (3 * 4 + 2 + 2 * 8 + 16 * lists) for lists in (1, 2, 3)}
LISTS = {
    "norm_": 1,
    "perturb_": 2,
    "restore_": 1,
    "update_": 2,
    "update_norm_": 3,
    "dual_norm_": 1,
    "dual_perturb_": 2,
    "inner_": 2,
}

# --- of a round ---
CLIENTS, LANES = 100, 31
OPERATIONS = {"mlp": 14, "cnn": 27}  # that torch dispatches for a forward and backward pass
KERNELS = {"mlp": 14, "cnn": 35}  # that they launch: a convolution adds its bias, its backward pass is three
PARAMETERS = {"mlp": 4, "cnn": 8}
HOST = 5e-6  # s of the host for an operation of torch
CALL = 1e-5  # for a call of ours
NODE = 4e-7  # s of the device for a node of a graph with many branches
# for a parameter that lies in its gradient and comes home: 1.9 us as measured (docs/kernels.md), 0.5 for
# `record_stream`
EXCHANGE = 2.4e-6
OPEN = 1e-4  # s of the host to open and close a client by itself: some twenty operations
STACKED = 2e-5  # the same for one of many stacked clients
# A pass of the MLP by one block (csrc/cuda/rowprograms.cu), in cycles: 80,896 multiplications, 2,528 of a warp.
# Products of fewer than 1,024 elements load two numbers for each, the others five for four; a warp's load is a cycle,
# its instructions half as long again. 18 instructions end with a barrier, about 250 cycles of latency each; 16 columns
# of 10 classes, each in one thread.
ROW_PRODUCTS = (1024 * 2 + 1024 * 1.25 + 480 * 2) * 1.5
ROW_PASS = ROW_PRODUCTS + 18 * 250 + 3700
ROW_NORM, ROW_UPDATE = 4500, 1500  # norm and perturbation: 32 additions in a row; update and batch
CYCLE = 1 / 1.8e9  # s
ROUND = 1e-3  # the server's step, records, the wait for numbers


def launches(function: str, tensors: int) -> int:
    """Of one call on so many segments. `accumulate_` has no table."""
    return 1 if function not in LISTS else -(-tensors // LARGE[LISTS[function]])


def kernel_seconds(op: str, size: Size, device: str = "H200") -> float:
    """Return the time of a replayed call on operands that no cache holds: launches, latency and bytes."""
    entry = OPS[op]
    fixed = launches(entry.function, len(size.shapes)) * LAUNCH + (SUM_LATENCY if entry.sums else LATENCY)
    return fixed + entry.bytes_per_parameter * size.parameters / BANDWIDTH[device]


def step_seconds(size: Size, device: str = "H200") -> float:
    """Return the time of the optimizer part of a replayed step: norm, perturbation, update, 40 bytes per parameter."""
    return sum(kernel_seconds(op, size, device) for op in STEP)


def exchange_elements(device: str = "H200") -> float:
    """Elements per tensor from which an exchange of float32 parameters' memory (`assume_no_alias=True`) is worth its
    time on
    the host: 4 bytes of each."""
    return EXCHANGE * BANDWIDTH[device] / 4


def foreach_seconds(size: Size, device: str = "H200") -> float:
    """That of torch's foreach functions and fused SGD, replayed: 52 bytes, and launches of at most 320 blocks of 65,536
    elements or of 110, 64 and 48 tensors with one, two and three lists; each of its twelve kernels has a latency."""
    blocks = sum(-(-n // 65536) for n in size.lengths)
    calls = [max(-(-blocks // 320), -(-len(size.shapes) // held)) for held in (110, 64, 64, 64, 48)]
    return (sum(calls) + 7) * (LAUNCH + LATENCY) + 52 * size.parameters / BANDWIDTH[
        device
    ]  # 7: the norm of the norms and the rate


def round_seconds(executor: str, model: str, algorithm: str) -> float:
    """Return the time of a round of 100 clients, one epoch of 64 samples in batches of 16; FedAvg or FedSAM."""
    passes, ours = (2, 3) if algorithm == "fedsam" else (1, 1)
    steps = SAMPLES // BATCH
    model, _, width = model.partition(":")
    by_hand = PARAMETERS[model] * (6 if passes == 2 else 1) + (4 if passes == 2 else 0)
    if executor == "bare loop":
        return CLIENTS * (steps * (passes * OPERATIONS[model] + by_hand) + 2 * PARAMETERS[model] + 4) * HOST
    if executor in ("sequential", "streams"):  # both wait for the host, which queues one operation after the other
        return ROUND + CLIENTS * (OPEN + steps * (passes * OPERATIONS[model] * HOST + ours * CALL))
    if executor == "graph":
        chain, groups = passes * KERNELS[model] + ours, -(-CLIENTS // LANES)
        replay = max(chain * LAUNCH, LANES * chain * NODE)
        return ROUND + CLIENTS * OPEN + groups * steps * (replay + LANES * HOST)
    if executor == "vmap" and model == "mlp":  # row programs: a launch
        return ROUND + CLIENTS * STACKED + epoch_seconds(algorithm, int(width or 32))
    if executor.startswith("vmap"):  # the host's time; the device's is shorter up to a width of 1,024
        return ROUND + CLIENTS * STACKED + steps * (passes * OPERATIONS[model] * HOST + ours * CALL)
    return round_seconds("vmap" if model == "mlp" else "graph", model, algorithm)  # what the rule of "auto" takes


def epoch_seconds(algorithm: str, width: int = 32) -> float:
    """Return the device's time for a local epoch of up to 132 MLP clients by a row program: a block each, side by side;
    FedAvg or FedSAM. Work on elements grows with the width of the hidden layer. From 500 on a row is larger than the
    shared memory of a block, and the second-level cache gives a multiprocessor half as many bytes per cycle."""
    growth = width / 32 * (2 if width >= 500 else 1)
    once = ROW_PASS + ROW_PRODUCTS * (growth - 1)
    step = (2 * once + ROW_NORM * growth if algorithm == "fedsam" else once) + ROW_UPDATE * growth
    return LAUNCH + SAMPLES // BATCH * step * CYCLE


EXECUTORS = ("bare loop", "sequential", "streams", "graph", "vmap", "auto")
STACKED_EXECUTORS = ("vmap", "vmap, without row programs")
ROUND_EXECUTORS = {"mlp": EXECUTORS, "cnn": EXECUTORS, "mlp:200": STACKED_EXECUTORS, "mlp:1024": STACKED_EXECUTORS}


def _us(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e6:,.1f}"


def _replayed(case: Mapping[str, Any] | None, name: str) -> str:
    row: dict[str, Any] = next((r for r in case["rows"] if r["name"] == name), {}) if case else {}
    return _us(row["replayed"]["seconds"]["median"] if "replayed" in row else None)


def tables(merged: Mapping[str, Any]) -> str:
    """Return the three tables, with what the merged file says in the last column, and where it was measured."""
    found, rounds = merged.get("kernels") or {"ops": [], "steps": []}, merged.get("federated")
    by_name = {case["name"]: case for case in found["ops"]} | {case["size"]: case for case in found["steps"]}
    kernels, steps = [], []
    for op, entry in OPS.items():
        for size in (KERNEL_SIZES[name] for name in SIZES if name != "cut1000" or op in STEP):
            predicted = [_us(kernel_seconds(op, size, device)) for device in BANDWIDTH]
            took = _replayed(by_name.get(f"{op}-{size.name}-{'flat' if entry.whole else 'scattered'}"), "native")
            calls = launches(entry.function, len(size.shapes))
            kernels.append([f"`{op}`", size.title, entry.bytes_per_parameter, calls, *predicted, took])
    for size in (KERNEL_SIZES[name] for name in SIZES if KERNEL_SIZES[name].rows == 1):
        for who, title, predict in (
            ("fastsam_native", "step", step_seconds),
            ("foreach", "step, foreach and fused SGD", foreach_seconds),
        ):
            predicted = [_us(predict(size, device)) for device in BANDWIDTH]
            steps.append([title, size.title, *predicted, _replayed(by_name.get(size.name), who)])
    series = [s for s in rounds["parts"]["gpu"]["series"] if s["at"] == CLIENTS] if rounds else []
    measured = {(s["title"], s["name"]): s["seconds"] for s in series}
    by_executor = []
    for model, algorithm in itertools.product(ROUND_EXECUTORS, ("fedavg", "fedsam")):
        for executor in ROUND_EXECUTORS[model]:
            title = f"{model.upper()}, {algorithm}"
            seconds = measured.get((f"{title}, by clients", executor))
            took = "not measured" if seconds is None else f"{seconds * 1e3:.1f}"
            by_executor.append([title, executor, f"{round_seconds(executor, model, algorithm) * 1e3:.1f}", took])
    where = ["H100, µs", "H200, µs", "measured, µs"]
    parts = [
        table(["kernel", "size", "bytes per parameter", "launches", *where], kernels, "llrrrrr"),
        table(["optimizer part of a step, replayed", "size", *where], steps, "llrrr"),
        table([f"round of {CLIENTS} clients", "executor", "predicted, ms", "measured, ms"], by_executor, "llrr"),
    ]
    for content in filter(None, (found.get("environment"), rounds)):
        gpu = ", ".join(content["machine"].get("gpus", [])[:1])
        parts.append(f"Measured on {gpu}, commit `{content['commit'][:12]}`, `{content['command']}`.")
    return "\n\n".join(parts)
