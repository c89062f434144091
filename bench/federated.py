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
from bench.fed.worker import PEERS
from bench.fed.workload import Workload

# of a chunk; with 20 of the MLP the quartiles of the fastest lay three times as far apart
ROUNDS = {"mlp": 100, "cnn": 2}
LONGER = 10  # times as many of the MLP for those that need half a millisecond


@dataclass(frozen=True)
class Options:
    device: str
    peers: dict[str, str]
    chunks: int
    quick: bool

    def rounds(self, model: str) -> int:
        return max(1, ROUNDS[model.split(":")[0]] // (10 if self.quick else 1))


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


def _race(options: Options, entries: list[Entry], model: str) -> Result:
    return race(entries, options.chunks, options.rounds(model))


def speed(options: Options) -> Iterator[Case]:
    """Everybody on the workload, one thread, and ours with all processors beside the bare loop on one thread."""
    cuda = options.device == "cuda"
    executors = ("sequential", "streams", "graph", "vmap") if cuda else ("sequential", "vmap")
    for model in ("mlp", "cnn"):
        for algorithm in ("fedavg", "fedsam"):
            load = Workload(model, algorithm, device=options.device)
            entries = [Entry("bare loop", "bare", load), Entry("bare loop, flat", "bare-flat", load)]
            if model == "cnn":
                entries += [Entry("bare loop, channels_last", "bare-channels-last", load)]
            for executor in (*executors, "auto"):
                longer = LONGER if model == "mlp" and executor in ("vmap", "auto") else 1
                name = "fastsam" if executor == "auto" else f"fastsam-{executor}"
                entries += [Entry(f"fastsam, {executor}", name, load, longer=longer)]
            if not cuda:
                entries += [Entry("fastsam, threads", "fastsam-threads", load, threads=2)]
            if algorithm == "fedavg" and not cuda:  # the others have no SAM
                entries += [Entry(name, name, load, python) for name, python in options.peers.items()]
            yield Case(f"{model.upper()}, {algorithm}", _race(options, entries, model))


def overhead(options: Options) -> Iterator[costs.Costs]:
    """Yield what an algorithm costs next to FedAvg, per local step and per round."""
    yield from costs.measure(options.device, options.chunks + 3)


def growth(options: Options) -> Iterator[Case]:
    """How the time of a round grows with clients, parameters and slots."""
    small = options.quick
    counts = (10, 100, 1000) if small else (10, 100, 1000, 10000)
    yield _series(options, "clients", counts, lambda n: Workload("mlp", clients=n, cohort=10, device=options.device))
    widths = (133, 1333) if small else (133, 1333, 13333, 133333)
    yield _series(options, "parameters", [75 * w + 10 for w in widths], lambda p: _wide(p, options.device))
    slots = (1, 4, 16) if small else (1, 2, 4, 8, 16, 32, 64)
    for executor in ("vmap",) if options.device == "cpu" else ("streams", "graph", "vmap"):
        load = {n: Workload("mlp", cohort=64, device=options.device, slots=n) for n in slots}
        yield _series(options, "slots", slots, load.__getitem__, f"fastsam-{executor}")


def _wide(parameters: float, device: str) -> Workload:
    return Workload(f"mlp:{(int(parameters) - 10) // 75}", cohort=4, device=device)


def _series(
    options: Options,
    axis: str,
    values: Any,
    workload: Callable[[Any], Workload],
    contender: str = "fastsam-sequential",
) -> Case:
    entries = [Entry(f"{value:,} {axis}", contender, workload(value)) for value in values]
    result = race(entries, max(3, options.chunks // 3), 1 if options.quick else 3)
    return Case(f"{contender.removeprefix('fastsam-')} by {axis}", result, axis, tuple(map(float, values)))


def ranks(options: Options) -> Iterator[Case]:
    """Two processes beside one, one thread each; and two that share nothing but the machine: what ranks could reach on
    it."""
    load = Workload("cnn", device=options.device)
    entries = [Entry(f"{n} rank{'s' * (n > 1)}", "fastsam-ranks", load, ranks=n) for n in (1, 2)]
    half = replace(load, cohort=load.cohort // 2)
    entries += [Entry("2 runs apart, half the clients each", "fastsam-apart", half, ranks=2)]
    yield Case("CNN, ranks", _race(options, entries, "cnn"))


PARTS: dict[str, Callable[[Options], Iterator[Case] | Iterator[costs.Costs]]] = {
    "speed": speed,
    "overhead": overhead,
    "growth": growth,
    "ranks": ranks,
}


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    peers = dict(pair.split("=", 1) for pair in arguments.peer)
    options = Options(arguments.device, peers, 3 if arguments.quick else arguments.chunks, arguments.quick)
    content: dict[str, Any] = {"kind": tables.FEDERATED, **facts(command_line("bench.federated"))}
    content |= {"device": options.device, "parts": {}}
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
            write(part, on_gpu.measure(options.device, arguments.seconds, partial(write, part)))
            entries = parts[part]["series"] + parts[part]["jobs"]
            problems += [e["problem"] for e in entries if e["problem"] not in ("", "no time left")]
        elif part == "share":
            write(part, share.measure(options.device, 2 if options.quick else 10))
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
    parser.add_argument("--parts", nargs="+", choices=names, help="default: gpu with --device cuda, else all others")
    parser.add_argument("--seconds", type=float, default=80, help="time for the part gpu")
    parser.add_argument("--chunks", type=int, default=12, help="turns that each contender takes")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--quick", action="store_true", help="a few turns, to see that all of it works")
    parser.add_argument("--again", type=Path, metavar="JSON", help="of an earlier run, whose other parts are kept")
    parser.add_argument("--out", type=Path, help="folder for federated.json, on a GPU federated-cuda.json")
    arguments = parser.parse_args(argv)
    if arguments.parts is None:
        arguments.parts = ["gpu"] if arguments.device == "cuda" else list(names[:-1])
    for pair in arguments.peer:
        name, _, python = pair.partition("=")
        if name not in PEERS or not Path(python).exists():
            parser.error(
                f"--peer takes NAME=PYTHON with a name of {', '.join(PEERS)} and an existing file, got {pair!r}"
            )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
