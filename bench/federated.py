"""How fast federated rounds are: ours on every executor, bare loops, and the simulators that one could pick instead.

    python -m bench.federated                            everything that this machine can measure
    python -m bench.federated --parts speed --quick      a few turns of one part, to see that it works
    python -m bench.federated --peer pfl=/path/python    with a simulator from an environment of its own
    (`make bench-fed` makes them)

Every contender is a process of its own that trains the same workload (bench/fed/workload.py); they take turns
(bench/fed/race.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import environment, report, tables
from bench.environment import command_line, facts
from bench.fed import on_gpu, share
from bench.fed import overhead as costs
from bench.fed.race import Entry, Figure, Result, race
from bench.fed.worker import APART, PEERS
from bench.fed.workload import Workload

# of a chunk; with 20 of the MLP the quartiles of the fastest lay three times as far apart
ROUNDS = {"mlp": 100, "cnn": 2}
LONGER = 10  # times as many of the MLP for those that need half a millisecond


@dataclass(frozen=True)
class Options:
    peers: dict[str, str]
    chunks: int
    quick: bool

    def race(self, title: str, entries: list[Entry], model: str) -> Case:
        rounds = max(1, ROUNDS[model] // (10 if self.quick else 1))
        return Case(title, race(entries, self.chunks, rounds))


@dataclass(frozen=True)
class Case:
    """One race: its title, the unit of its figures (the first), and per figure a number for the axis of a plot."""

    title: str
    result: Result
    axis: str = ""
    at: tuple[float, ...] = ()

    @property
    def figures(self) -> list[Figure]:
        return self.result.figures


def speed(options: Options) -> Iterator[Case]:
    """Everybody on the workload, one thread, and ours with all processors next to the bare loop on one thread."""
    for model, algorithm in itertools.product(("mlp", "cnn"), ("fedavg", "fedsam")):
        load = Workload(model, algorithm)
        entries = [Entry("bare loop", "bare:tensors", load), Entry("bare loop, flat", "bare:flat", load)]
        if model == "cnn":
            entries += [Entry("bare loop, channels_last", "bare:channels_last", load)]
        for executor in ("sequential", "vmap", "auto"):
            longer = LONGER if model == "mlp" and executor != "sequential" else 1
            entries += [Entry(f"fastsam, {executor}", f"ours:{executor}", load, longer=longer)]
        entries += [Entry("fastsam, threads", "ours:threads", load, threads=2)]
        if algorithm == "fedavg":  # the others have no SAM
            entries += [Entry(name, f"{PEERS[name]}:", load, python) for name, python in options.peers.items()]
        yield options.race(f"{model.upper()}, {algorithm}", entries, model)


def overhead(options: Options) -> Iterator[costs.Costs]:
    """Yield what an algorithm costs next to FedAvg, per local step and per round."""
    yield from costs.measure(options.chunks + 3)


def growth(options: Options) -> Iterator[Case]:
    """How the time of a round grows with clients, parameters and slots."""
    widths = (133, 1333) if options.quick else (133, 1333, 13333, 133333)
    clients = {n: Workload("mlp", clients=n, cohort=10) for n in (10, 100, 1000, 10000)[: 3 if options.quick else 4]}
    parameters = {75 * width + 10: Workload(f"mlp:{width}", cohort=4) for width in widths}
    slots = {
        n: Workload("mlp", cohort=64, slots=n) for n in ((1, 4, 16) if options.quick else (1, 2, 4, 8, 16, 32, 64))
    }
    for axis, executor, loads in (
        ("clients", "sequential", clients), ("parameters", "sequential", parameters), ("slots", "vmap", slots)
    ):  # fmt: skip
        entries = [Entry(f"{value:,} {axis}", f"ours:{executor}", load) for value, load in loads.items()]
        result = race(entries, max(3, options.chunks // 3), 1 if options.quick else 3)
        yield Case(f"{executor} by {axis}", result, axis, tuple(map(float, loads)))


def ranks(options: Options) -> Iterator[Case]:
    """Two processes next to one, one thread each; and two that share nothing but the machine: what ranks could reach on
    it."""
    load = Workload("cnn")
    half = replace(load, cohort=load.cohort // 2)
    entries = [Entry("1 rank", "ours:sequential", load), Entry("2 ranks", "ours:sequential", load, ranks=2)]
    entries += [Entry("2 runs apart, half the clients each", f"ours:sequential:{APART}", half, ranks=2)]
    yield options.race("CNN, ranks", entries, "cnn")


PARTS: dict[str, Callable[[Options], Iterator[Case] | Iterator[costs.Costs]]] = {
    "speed": speed,
    "overhead": overhead,
    "growth": growth,
    "ranks": ranks,
}


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    peers = dict(pair.split("=", 1) for pair in arguments.peer)
    options = Options(peers, 3 if arguments.quick else arguments.chunks, arguments.quick)
    content: dict[str, Any] = {"kind": tables.FEDERATED, **facts(command_line("bench.federated"))}
    content |= {"device": arguments.device, "parts": {}}
    if arguments.again is not None:
        content = joined(arguments.again, content, arguments.parts)
    parts, problems = content["parts"], []

    def write(part: str, found: Any) -> None:
        """After every race, so that a run that is cut short leaves what it has."""
        parts[part] = found
        if arguments.out is not None:
            environment.write(content, arguments.out / tables.file_name(content))

    for part in arguments.parts:
        if part == "gpu":
            write(part, on_gpu.measure(arguments.device, arguments.seconds, partial(write, part)))
            entries = parts[part]["series"] + parts[part]["jobs"]
            problems += [e["problem"] for e in entries if e["problem"] not in ("", "no time left")]
        elif part == "share":
            write(part, share.measure(2 if options.quick else 10))
            print(report.share_line(parts[part]), flush=True)
        else:
            cases: list[Any] = []
            for case in PARTS[part](options):
                cases.append(asdict(case))
                print(report.race_table(cases[-1]), flush=True)
                problems += [f.problem for f in case.figures if f.problem and f.label not in PEERS]
                write(part, cases)
    return int(bool(problems))


def joined(path: Path, own: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The content of a JSON whose `parts` are measured again, and when and how that was. own: what is known of this
    run.

    Raises SystemExit where the two were not made on like machines: their figures would stand side by side.
    """
    content: dict[str, Any] = json.loads(path.read_text())
    was, here = (
        f"{c['machine']['cores']} cores of {c['machine']['cpu']}, torch {c['versions']['torch']}, {c['device']}"
        for c in (content, own)
    )
    if was != here:
        raise SystemExit(f"--again {path}: it was measured on {was}, and here are {here}; measure all parts here")
    for part in parts:
        content["parts"][part] = []  # in its place
        content.setdefault("again", {})[part] = {key: own[key] for key in ("command", "date", "commit")}
    return content


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.federated", description=(__doc__ or "").splitlines()[0])
    names = (*PARTS, "share", "gpu")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", nargs="+", choices=names, help="default: all but gpu, which --device cuda takes")
    parser.add_argument("--seconds", type=float, default=80, help="time for the part gpu")
    parser.add_argument("--chunks", type=int, default=12, help="turns that each contender takes")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--quick", action="store_true", help="a few turns, to see that all of it works")
    parser.add_argument("--again", type=Path, metavar="JSON", help="of an earlier run, whose other parts are kept")
    parser.add_argument("--out", type=Path, help="folder for federated.json, on a GPU federated-cuda.json")
    arguments = parser.parse_args(argv)
    arguments.parts = ["gpu"] if arguments.device == "cuda" else arguments.parts or list(names[:-1])
    for pair in arguments.peer:
        name, _, python = pair.partition("=")
        if name not in PEERS or not Path(python).exists():
            parser.error(
                f"--peer takes NAME=PYTHON with a name of {', '.join(PEERS)} and an existing file, got {pair!r}"
            )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
