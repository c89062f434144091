"""Executors beside a bare PyTorch loop, and algorithms beside FedAvg: ratios of interleaved rounds.

    python -m bench.executors mlp sequential threads vmap compiled
    python -m bench.executors --overhead cnn scaffold fedcm feddyn

The contenders take turns, a few rounds each, so that what else the machine does hits all of them; a ratio is the median
over the turns.
Clock: CPU seconds of the process for one thread, the wall's for `threads`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from bench.fed import bare, ours
from bench.fed.workload import Workload

TURNS, WARM = 7, 2


def seconds(
    train: Callable[..., object], workload: Workload, option: str, rounds: int, clock: Callable[[], float]
) -> float:
    """Of a round, without the first ones (they compile and allocate)."""
    marks: list[float] = []
    train(workload, rounds + WARM, lambda: marks.append(clock()), option)
    return (marks[-1] - marks[WARM - 1]) / rounds


def ratios(model: str, options: list[str], rounds: int, algorithm: str) -> dict[str, float]:
    """How many times as fast as the bare loop each executor is."""
    found: dict[str, list[float]] = {option: [] for option in options}
    for _ in range(TURNS):
        for option in options:
            clock = time.perf_counter if option in ("threads", "auto") else time.process_time
            workload = Workload(model, algorithm)
            base = seconds(bare.train, workload, "tensors", rounds, clock)
            found[option].append(base / seconds(ours.train, workload, option, rounds, clock))
    return {option: statistics.median(values) for option, values in found.items()}


def overheads(model: str, algorithms: list[str], rounds: int) -> dict[str, float]:
    """Seconds of a round over those of FedAvg, both by the plain executor."""
    found: dict[str, list[float]] = {name: [] for name in algorithms}
    for _ in range(TURNS):
        for name in algorithms:
            base = seconds(ours.train, Workload(model), "sequential", rounds, time.process_time)
            found[name].append(
                seconds(ours.train, Workload(model, name), "sequential", rounds, time.process_time) / base
            )
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="cnn, digits, mlp or mlp:WIDTH")
    parser.add_argument("names", nargs="+", help="executors, or with --overhead algorithms")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.overhead:
        found = overheads(args.model, args.names, args.rounds)
    else:
        found = ratios(args.model, args.names, args.rounds, args.algorithm)
    for name, ratio in found.items():
        print(f"{args.model:10s} {name:12s} {ratio:.2f}")


if __name__ == "__main__":
    main()
