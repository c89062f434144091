"""The numbers of the bars in the pictures, from bench/results: times of steps and speeds of federated rounds.

All are relative. The copied SAM class is 1 for a step, and a plain PyTorch loop is 1 for a round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.joint import SIZES, shown

RESULTS = Path(__file__).parents[1] / "bench" / "results"
COMPILED, PLAIN, LOOP = ("fastsam compiled", "fastsam plain", "a plain PyTorch loop")
STEP_NAMES = {  # as the result file has it: as the picture shows it
    "fastsam_native": COMPILED,
    "fastsam_foreach": f"{PLAIN} install",
    "compiled": "torch.compile",
    "foreach": "foreach by hand",
    "pytorch_optimizer": "pytorch-optimizer",
    "copied": "the copied SAM class",
}
GPU_STEP_NAMES = {
    "fastsam_native": COMPILED,
    "fastsam_triton": f"{PLAIN}, Triton",
    "foreach": "foreach by hand",
    "copied": "the copied SAM class",
}
GPU_SIZES = ("resnet18", "50k", "30m")
ROUND_NAMES = {name: shown(name) for name in ("jax", "fedjax", "fedlab", "pfl", "blazefl", "flower")} | {
    "bare loop": LOOP
}
ONE_CORE = ", one core"  # end of the name of a contender that has one core in the race of two
UNEQUAL, DIGITS, EQUAL = SIZES
EXECUTORS = {1: ("sequential", "vmap"), 2: ("auto",)}  # by number of cores; the fastest is shown
VARIED = ("jax, float32 products",)  # in the table only
GPU_ROUNDS = {  # title of a case: problem, and the place of its rows on the case's axis
    "MLP, fedavg, by clients": ("MLP, 100 equal clients", 100),
    "CNN, fedavg, by clients": ("CNN, 100 equal clients", 100),
    "ResNet-18-GN, one local epoch of five": ("ResNet-18, 10 clients", "fedavg"),
}

Bars = dict[str, dict[str, float]]  # {problem: {contender: value}}


def step_bars() -> Bars:
    """Return the time of the optimizer part of a step by model, relative to the copied class; one thread."""
    cases = [case for case in _cases("step") if case.get("threads") == 1]
    return {case["title"].removesuffix(", 1 thread"): _relative(case) for case in cases}


def whole_bars() -> Bars:
    """Return the time of a whole training step by model, relative to the copied class."""
    cases = [case for case in _cases("step") if case["part"] == "whole"]
    return {case["title"].removesuffix(", batch of 16"): _relative(case) for case in cases}


def round_bars(num_cores: int, sizes: str) -> Bars:
    """Return the rounds per second of FedAvg by model in a race, relative to a plain PyTorch loop.

    Rows with another number of cores are left out, except rows whose name says that they have one core.

    Args:
        num_cores: number of cores of the race.
        sizes: sizes of the clients, as the title of a case has them.
    """
    result = {}
    for case in _cases("federated"):
        model, _, race = case["title"].partition(", ")
        if case["part"] == f"speed-{num_cores}" and race == f"{sizes}, fedavg":
            rows = [row for row in case["rows"] if "speed" in row and row["cores"] == _cores_of(row["name"], num_cores)]
            speeds = {row["name"]: row["speed"]["median"] for row in rows}
            result[model] = _our_speeds(speeds, EXECUTORS[num_cores]) | {
                f"{title}{end}": speeds[f"{name}{end}"]
                for name, title in ROUND_NAMES.items()
                for end in ("", ONE_CORE)
                if f"{name}{end}" in speeds
            }
    return result


def first_sizes(num_cores: int) -> str:
    """Return the sizes of clients that a chart of this race shows: unequal ones, if they were measured."""
    return next(sizes for sizes in SIZES if round_bars(num_cores, sizes))


def _cores_of(name: str, num_cores: int) -> int:
    return 1 if name.endswith(ONE_CORE) else num_cores


def _our_speeds(speeds: Mapping[str, float], executors: tuple[str, ...]) -> dict[str, float]:
    """Return the fastest executor of each install."""
    result = {}
    for prefix, title in (("fastsam", COMPILED), ("fastsam plain", PLAIN)):
        names = [name for name in executors if f"{prefix}, {name}" in speeds]
        if names:
            best = max(names, key=lambda name: speeds[f"{prefix}, {name}"])
            result[f"{title}, {best}"] = speeds[f"{prefix}, {best}"]
    return result


def gpu_step_bars(clock: str) -> Bars:
    """Return the time of the optimizer part of a step on a GPU by model, relative to the copied class.

    All contenders were measured next to `foreach`, which is the unit that they share.

    Args:
        clock: "eager" includes the host, and "replayed" is a captured graph.
    """
    cases = {case["name"]: case for case in _cases("kernels-cuda") if case["part"] == "steps"}
    bars = {}
    for name in GPU_SIZES:
        times = {row["name"]: row[clock]["to"]["foreach"]["median"] for row in cases[name]["rows"]}
        bars[cases[name]["title"]] = {
            title: times[row] / times["copied"] for row, title in GPU_STEP_NAMES.items() if row in times
        }
    return bars


def gpu_round_bars() -> Bars:
    """Return the rounds per second of FedAvg on a GPU by model and executor, relative to a plain PyTorch loop."""
    cases, bars = {case["title"]: case for case in _cases("federated-cuda")}, {}
    for title, (problem, place) in GPU_ROUNDS.items():
        rows = [row for row in cases[title]["rows"] if row["at"] == place and "seconds" in row]
        seconds = {row["executor"]: row["seconds"] for row in rows}
        loop = seconds.pop("bare loop")
        fastest_first = sorted(seconds, key=lambda name: seconds[name])
        names = {name: ROUND_NAMES.get(name, f"{COMPILED}, {name}") for name in fastest_first if name not in VARIED}
        bars[problem] = {title: loop / seconds[name] for name, title in names.items()} | {LOOP: 1.0}
    return bars


def accuracy_bars() -> Bars:
    """Return the test accuracy in percent on MNIST-1D by fraction of wrong labels and method, of the MLP."""
    cases = [case for case in _cases("evidence") if case["part"] == "methods" and case["name"].startswith("mlp")]
    cases.sort(key=lambda case: case["noise"])
    return {case["title"]: {row["name"]: 100 * row["steps"]["mean"] for row in case["rows"]} for case in cases}


def gpu_name() -> str:
    """Return the name of the GPU of these figures."""
    machines = [_record(name)["environment"]["machine"] for name in ("kernels-cuda", "federated-cuda")]
    (name,) = {machine["gpus"][0] for machine in machines}
    return str(name)


def _record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _cases(name: str) -> list[dict[str, Any]]:
    return _record(name)["cases"]


def _relative(case: Mapping[str, Any]) -> dict[str, float]:
    rows = {row["name"]: row for row in case["rows"] if "eager" in row}
    return {title: rows[name]["eager"]["to"]["copied"]["median"] for name, title in STEP_NAMES.items() if name in rows}
