"""The optimizer part of a step of every variant, beside SAM's, its own bytes and pytorch-optimizer's classes:
`make bench ARGS="--variants"`.

A step is what a training loop makes of it: as many passes as the variant takes, whose gradients are prepared. Where not
every step perturbs, a figure is of a whole interval. Calls are counted by torch's profiler: kernels of ours, and calls
of torch that read or write tensors.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import timing
from bench.contenders import SGD_OPTIONS, OptimizerStepper, parameters
from bench.problem import FLOOR_BYTES, RHO, Gradients, Size, initial_weights
from bench.timing import Clock, Rounds, Summary, measure
from fastsam import SAM, FusedSAM, variants
from tests.helpers.generated_page import GeneratedPage

KIND = "fastsam.bench.family/1"
STEPS = 10  # of a sample, at least: two intervals of SAM, every=5, one of the others
COLUMNS = (
    "variant",
    "time, SAM = 1",
    "quartiles",
    "bytes",
    "of the floor",
    "kernels",
    "calls of torch",
    "pytorch-optimizer's, ours = 1",
)
VIEWS = (
    "as_strided",
    "view",
    "detach",
    "slice",
    "select",
    "reshape",
    "alias",
    "unbind",
    "split",
    "empty",
    "result_type",
    "item",
    "_local",
)


@dataclass(frozen=True)
class Entry:
    """A variant. floor: bytes per parameter and step, as docs/variants.md derives them. peer: a class of
    pytorch-optimizer, and its options."""

    sam: SAM
    floor: float
    peer: str | None = None
    options: Mapping[str, Any] | None = None


ENTRIES: dict[str, Entry] = {
    "SAM": Entry(SAM(RHO), FLOOR_BYTES, "SAM"),
    "ASAM": Entry(SAM(RHO, adaptive=True), FLOOR_BYTES + 4, "SAM", {"adaptive": True}),
    "SAM, every=5": Entry(SAM(RHO, every=5), (FLOOR_BYTES + 4 * 20) / 5),
    "LESAM": Entry(SAM(RHO, radius=variants.LESAM(0.01)), FLOOR_BYTES),
    "GSAM": Entry(variants.GSAM(RHO), 60),
    "WSAM": Entry(variants.WSAM(RHO), 64, "WSAM"),
    "WSAM, coupled": Entry(variants.WSAM(RHO, decouple=False), 52, "WSAM", {"decouple": False}),
    "LookSAM": Entry(variants.LookSAM(RHO, k=10), (96 + 9 * 32) / 10, "LookSAM", {"k": 10}),
    "FriendlySAM": Entry(variants.FriendlySAM(RHO), 92, "FriendlySAM"),
    "VaSSO": Entry(variants.VaSSO(RHO), 80),
    "SAMON": Entry(variants.SAMON(RHO), 36),
    "MSAM": Entry(variants.MSAM(RHO), 36),
    "LastGradient": Entry(variants.LastGradient(RHO), 44),
}


class Ours(OptimizerStepper):
    """A step as a training loop makes it. SAMON perturbs the tensors of one dimension here."""

    def __init__(self, weights: Sequence[Tensor], entry: Entry) -> None:
        self.parameters = parameters(weights)
        still: dict[str, Any] = {"rho": 0.0} if isinstance(entry.sam, variants.SAMON) else {}
        flat = [p for p in self.parameters if p.dim() == 1]
        groups = [{"params": flat}, {"params": [p for p in self.parameters if p.dim() != 1], **still}]
        self.optimizer = FusedSAM([g for g in groups if g["params"]], torch.optim.SGD, sam=entry.sam, **SGD_OPTIONS)

    def step(self, backward: Callable[[], None]) -> None:
        optimizer = self.optimizer
        if optimizer.two_passes:
            backward()
            optimizer.first_step()
        backward()
        optimizer.step()


class Theirs(OptimizerStepper):
    """A class of pytorch-optimizer, with torch's multi-tensor functions."""

    def __init__(self, weights: Sequence[Tensor], entry: Entry) -> None:
        import pytorch_optimizer

        def make(params: list[nn.Parameter]) -> Any:
            own = {"rho": RHO, "foreach": True, **SGD_OPTIONS, **(entry.options or {})}
            if entry.peer == "WSAM":
                own["model"] = nn.ParameterList(params)
            return getattr(pytorch_optimizer, str(entry.peer))(params=params, base_optimizer=torch.optim.SGD, **own)

        super().__init__(weights, make)

    def step(self, backward: Callable[[], None]) -> None:
        backward()
        self.first()
        backward()
        self.second()


class Drive(timing.Drive):
    """A step of any number of passes."""

    stepper: Any

    def step(self) -> None:
        self.stepper.step(self._backward)


def run(size: Size, threads: int, rounds: int, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Every variant, and its peer where pytorch-optimizer is installed, on one list of tensors."""
    weights, gradients, clock = initial_weights(size.shapes), Gradients(size.shapes), Clock()
    drives = {name: Drive(Ours(weights, entry), gradients, clock) for name, entry in ENTRIES.items()}
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        drives |= {_peer(name): Drive(Theirs(weights, e), gradients, clock) for name, e in ENTRIES.items() if e.peer}
    steps = max(size.steps // STEPS * STEPS, STEPS)
    taken = measure(drives, steps, rounds, tick)
    rows = [_row(name, entry, size, taken) | calls(drives[name]) for name, entry in ENTRIES.items()]
    return {
        "size": size.name, "title": size.title, "tensors": len(size.shapes), "parameters": size.parameters,
        "threads": threads, "rounds": rounds,
        "steps_per_sample": steps, "busy_others": round(taken.others, 3), "variants": rows,
    }  # fmt: skip


def _peer(name: str) -> str:
    return f"{name}, pytorch-optimizer"


def _row(name: str, entry: Entry, size: Size, taken: Rounds) -> dict[str, Any]:
    own = taken.seconds[name]
    floors = [entry.floor * size.parameters / bandwidth for bandwidth in taken.copy]
    row = {
        "name": name, "floor_bytes": entry.floor, "seconds": asdict(Summary.of(own)),
        "to_sam": asdict(Summary.of_ratios(own, taken.seconds["SAM"])),
        "floor_fraction": asdict(Summary.of_ratios(floors, own)),
    }  # fmt: skip
    theirs = taken.seconds.get(_peer(name))
    return row | ({} if theirs is None else {"peer": entry.peer, "peer_to_own": asdict(Summary.of_ratios(theirs, own))})


def calls(drive: Drive) -> dict[str, float]:
    """Kernels of ours, and torch's calls, of a step: the mean over an interval."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            drive.step()
    names = [
        event.name
        for event in profiler.events()
        if event.cpu_parent is None or not _ours_or_torchs(event.cpu_parent.name)
    ]
    own = sum(name.startswith("fastsam::") for name in names)
    other = sum(name.startswith("aten::") and not any(view in name for view in VIEWS) for name in names)
    return {"kernels": own / STEPS, "torch_calls": other / STEPS}


def _ours_or_torchs(name: str) -> bool:
    return name.startswith(("fastsam::", "aten::"))


def rich_table(result: dict[str, Any]) -> Any:
    """One size with one number of threads, for the terminal."""
    from rich.table import Table  # here, because a machine that only has a GPU need not have it

    shown = Table(title=heading(result), title_justify="left")
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in ("variant", "quartiles") else "right")
    for row in result["variants"]:
        shown.add_row(*cells(row))
    return shown


# --- the page ---


def table(record: dict[str, Any]) -> str:
    """Markdown."""
    facts, parts = record["environment"], []
    for result in record["results"]:
        parts += [f"{heading(result)}:", "", *_rows(result), ""]
    command, versions = facts["command"], facts["versions"]
    made = f"Made by `{command}` on {facts['date'][:10]}, commit `{facts['commit'][:12]}`; {facts['machine']['cpu']}"
    return "\n".join([*parts, f"{made}, torch {versions['torch']}, pytorch-optimizer {versions['pytorch-optimizer']}."])


def heading(result: dict[str, Any]) -> str:
    threads = "one thread" if result["threads"] == 1 else f"{result['threads']} threads"
    return f"{result['title']}, {result['tensors']} tensors, {result['parameters']:,} parameters, {threads}"


def _rows(result: dict[str, Any]) -> list[str]:
    rows = [list(COLUMNS), ["---" if name in ("variant", "quartiles") else "---:" for name in COLUMNS]]
    rows += [[f"`{name}`", *rest] for name, *rest in map(cells, result["variants"]) if name in ENTRIES]
    return [f"| {' | '.join(row)} |" for row in rows]


def cells(row: dict[str, Any]) -> list[str]:
    own, peer = row["to_sam"], row.get("peer_to_own")
    return [
        row["name"], f"{own['median']:.2f}", f"{own['q1']:.2f}–{own['q3']:.2f}", f"{row['floor_bytes']:.0f}",
        f"{row['floor_fraction']['median']:.2f}", f"{row['kernels']:.1f}", f"{row['torch_calls']:.1f}",
        "" if peer is None else f"{peer['median']:.1f}",
    ]  # fmt: skip


PAGE = GeneratedPage("variants", "family", KIND, '`make bench ARGS="--variants"`', table)

if __name__ == "__main__":
    sys.exit(PAGE.main())
