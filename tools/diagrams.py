"""Draws the diagrams of the pages: `make pictures`.

Writes into docs/pictures: `sam_step.svg` (the geometry of a step), `local_update.svg` and `round.svg` (the chains of a
client's step and of a federated round), `executors.svg`, `memory_tree.svg` and `algorithms.svg` (decision trees).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

BLUE, GREY, LIGHT, ORANGE = ("#0b5fa5", "#5f6670", "#dfe9f3", "#c4581a")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, and readable by a test
    "svg.hashsalt": "fastsam",  # the same file from the same drawing and numbers
    "font.family": "sans-serif",
    "font.size": 9,
}


@dataclass(frozen=True)
class Node:
    """A box of a diagram. Its place is the centre; an answer is drawn in blue."""

    x: float
    y: float
    text: str
    answer: bool = False


Edge = tuple[str, str, str]  # from, to, label

EXECUTORS: Mapping[str, Node] = {
    "gpu": Node(4.6, 3, "Is there a GPU?"),
    "dense cpu": Node(2.7, 2, "Dense model without dropout,\nup to 2^16 parameters\n(2^20 as row programs)?"),
    "dense gpu": Node(6.6, 2, "Dense model without dropout,\nup to 2^20 parameters?"),
    "vmap cpu": Node(0.9, 1, "vmap", True),
    "cores": Node(3.4, 1, "Several cores?"),
    "vmap gpu": Node(5.5, 1, "vmap", True),
    "host": Node(7.6, 1, "Does a pass read values on the\nhost, or is there a client loop?"),
    "threads": Node(2.5, 0, "threads", True),
    "sequential": Node(4.2, 0, "sequential", True),
    "streams": Node(6.5, 0, "streams", True),
    "graph": Node(8.4, 0, "graph", True),
}
EXECUTOR_EDGES: Sequence[Edge] = (
    ("gpu", "dense cpu", "no"), ("gpu", "dense gpu", "yes"),
    ("dense cpu", "vmap cpu", "yes"), ("dense cpu", "cores", "no"), ("cores", "threads", "yes"),
    ("cores", "sequential", "no"), ("dense gpu", "vmap gpu", "yes"), ("dense gpu", "host", "no"),
    ("host", "streams", "yes"), ("host", "graph", "no"),
)  # fmt: skip

MEMORY: Mapping[str, Node] = {
    "half": Node(3.6, 3, "Half-precision weights?"),
    "writes": Node(1.6, 2, "Are weights written only by copy_,\nload_state_dict or p.data = ...?"),
    "large": Node(
        5.8, 2, "At least 65,536 elements per tensor on average,\nand no view of a weight kept during a step?"
    ),
    "half no": Node(0.5, 1, "no option:\n36 bytes moved", True),
    "half yes": Node(2.3, 1, "assume_no_alias:\n30 bytes moved", True),
    "small": Node(4.2, 1, "no option", True),
    "simple": Node(6.8, 1, "SAM or ASAM, one backward pass per half,\none rank, no GradScaler, no clipping by hand?"),
    "alias": Node(5.2, 0, "assume_no_alias:\nno copy between steps", True),
    "early": Node(8.2, 0, "assume_no_alias,\noptimizer_in_backward:\npeak memory of SGD", True),
}
MEMORY_EDGES: Sequence[Edge] = (
    ("half", "writes", "yes"), ("half", "large", "no"), ("writes", "half no", "no"), ("writes", "half yes", "yes"),
    ("large", "small", "no"), ("large", "simple", "yes"), ("simple", "alias", "no"), ("simple", "early", "yes"),
)  # fmt: skip

ALGORITHMS: Mapping[str, Node] = {
    "personal": Node(2.4, 3, "Shall each client have a model of its own?"),
    "own models": Node(0.7, 2, "FedRep, FedBN, Ditto,\npFedMe, APFL", True),
    "passes": Node(4.8, 2, "Two backward passes for a step?"),
    "one pass": Node(2.8, 1, "May clients keep a state\nbetween rounds?"),
    "two passes": Node(7.0, 1, "May clients keep a state\nbetween rounds?"),
    "cheap": Node(1.6, 0, "FedAvg, FedAvgM,\nFedCM", True),
    "memory": Node(3.9, 0, "FedLESAM-D, SCAFFOLD,\nFedDyn", True),
    "sam": Node(6.0, 0, "FedSAM,\nMoFedSAM", True),
    "sam memory": Node(8.0, 0, "FedSMOO, FedSpeed,\nFedGAMMA", True),
}
ALGORITHM_EDGES: Sequence[Edge] = (
    ("personal", "own models", "yes"), ("personal", "passes", "no"), ("passes", "one pass", "no"),
    ("passes", "two passes", "yes"), ("one pass", "cheap", "no"), ("one pass", "memory", "yes"),
    ("two passes", "sam", "no"), ("two passes", "sam memory", "yes"),
)  # fmt: skip

Chain = Sequence[tuple[str, str, bool]]  # title, names, whether an algorithm chooses it

ROOMS: Sequence[tuple[str, str]] = (  # each imports only what is to its right
    ("lab", "commands, configs,\nreports"),
    ("fed", "rounds, algorithms,\nexecutors"),
    ("optim", "FusedSAM,\nvariants"),
    ("step, batchnorm,\nops", "a step on rows"),
    ("arena,\nbackends", "memory, choice\nof kernels"),
    ("fastsam_kernels", "C++, CUDA, Triton,\nreference"),
)
STEP: Chain = (
    ("first gradient", "g1 at w", False),
    ("perturbation", "eps = rho d / |d|", True),
    ("second gradient", "g2 at w + eps", False),
    ("combination", "v = a g2 + b g1 + q", True),
    ("clipping", "of v, to clip_norm", False),
    ("decay", "u = v + (weight_decay + phi) w", True),
    ("momentum", "m = momentum m + u", False),
    ("update", "w = w - lr m", False),
)
ROUND: Chain = (
    ("sample the cohort", "sampler, available", False),
    ("constants of the step", "Algorithm.local_update", True),
    ("train the clients", "executor: batches,\ngradients, update", False),
    ("stages", "clip, noise, compression,\nrobust rule", False),
    ("states and uploads", "Algorithm.finish_client", True),
    ("exact sums", "over clients and processes", False),
    ("step of the server", "Algorithm.step_server", True),
    ("evaluate and record", "measures, callbacks,\ncheckpoint", False),
)


def draw_box(axes: Axes, node: Node) -> Text:
    """Draw a node and return its text."""
    style = {"boxstyle": "round,pad=0.5", "facecolor": BLUE if node.answer else LIGHT, "edgecolor": BLUE}
    color = "white" if node.answer else "black"
    return axes.text(node.x, node.y, node.text, ha="center", va="center", bbox=style, color=color)


def draw_tree(nodes: Mapping[str, Node], edges: Sequence[Edge], size: tuple[float, float]) -> Figure:
    """Return a decision tree: questions in light boxes, answers in blue ones."""
    figure, axes = canvas(size)
    for start, end, label in edges:
        a, b = nodes[start], nodes[end]
        axes.plot([a.x, b.x], [a.y, b.y], color=GREY, linewidth=1, zorder=0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(
            (a.x + 1.5 * b.x) / 2.5, (a.y + 1.5 * b.y) / 2.5, label, ha="center", va="center", color=GREY, bbox=box
        )
    for node in nodes.values():
        draw_box(axes, node)
    xs, ys = [node.x for node in nodes.values()], [node.y for node in nodes.values()]
    axes.set_xlim(min(xs) - 1, max(xs) + 1)
    axes.set_ylim(min(ys) - 0.4, max(ys) + 0.4)
    return figure


def draw_chain(chain: Chain, caption: str) -> Figure:
    """Return a chain of eight boxes: four to the right, four back to the left, and an arrow to the first."""
    figure, axes = canvas((9.6, 2.6))
    axes.set_xlim(-1.2, 9.0)
    axes.set_ylim(-0.5, 1.5)
    places = [(2.6 * (i if i < 4 else 7 - i), 1.0 if i < 4 else 0.0) for i in range(len(chain))]
    boxes = [
        draw_box(axes, Node(*place, f"{title}\n{names}", is_highlighted))
        for place, (title, names, is_highlighted) in zip(places, chain, strict=True)
    ]
    figure.canvas.draw()  # from here on the boxes have their sizes, at which the arrows end
    for i, start in enumerate(places):
        end = (i + 1) % len(places)
        patches = {"patchA": boxes[i].get_bbox_patch(), "patchB": boxes[end].get_bbox_patch()}
        arrow = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 1, "shrinkB": 1, **patches}
        axes.annotate("", places[end], start, arrowprops=arrow)
    axes.text(-0.1, 0.5, caption, ha="right", va="center", color=GREY)
    return figure


def draw_rooms() -> Figure:
    """Return the rooms of the package in a row, with an arrow from each to the next one, which it imports."""
    figure, axes = canvas((9.6, 1.1))
    axes.set_xlim(-0.55, len(ROOMS) - 0.45)
    axes.set_ylim(-0.5, 0.5)
    boxes = [
        draw_box(axes, Node(i, 0.0, f"{name}\n\n{content}", i == len(ROOMS) - 1))
        for i, (name, content) in enumerate(ROOMS)
    ]
    figure.canvas.draw()
    for i, (start, end) in enumerate(pairwise(boxes)):
        patches = {"patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch()}
        arrow = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 1, "shrinkB": 1, **patches}
        axes.annotate("", (i + 1, 0.0), (i, 0.0), arrowprops=arrow)
    return figure


def draw_sam_step() -> Figure:
    """Return a step of SAM on a quadratic loss, computed, with its arrows."""
    curvature, rho, lr = np.diag([1.0, 4.0]), 0.75, 0.2
    w = np.array([-2.3, 0.55])
    g1 = curvature @ w
    perturbed_point = w + rho * g1 / np.linalg.norm(g1)
    g2 = curvature @ perturbed_point
    figure, axes = canvas((7.2, 3.3))
    x, y = np.meshgrid(np.linspace(-5.0, 1.6, 150), np.linspace(-1.35, 1.7, 90))
    axes.contour(
        x, y, 0.5 * (x**2 + 4 * y**2), levels=[0.2, 0.8, 1.8, 3.2, 5.0, 7.2, 9.8], colors="#b8c2cc", linewidths=1
    )
    axes.add_patch(pyplot.Circle(tuple(w), rho, fill=False, color=GREY, linestyle="--", linewidth=1))
    for start, end, color in ((w, perturbed_point, ORANGE), (w, w - lr * g2, BLUE)):
        axes.annotate("", tuple(end), tuple(start), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.8})
    ghost = {"arrowstyle": "-|>", "color": BLUE, "linewidth": 1, "linestyle": ":"}
    axes.annotate("", tuple(perturbed_point - lr * g2), tuple(perturbed_point), arrowprops=ghost)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for point, name, x, y, align in (
        (w, "w", 0.12, 0.12, "left"),
        (perturbed_point, "perturbed weights,\nrho uphill from w", -0.15, 0.1, "right"),
        (w - lr * g2, "new w: from w, along the gradient\nat the perturbed weights", 0.0, -0.3, "center"),
        (np.zeros(2), "minimum", 0.0, 0.2, "center"),
    ):
        axes.plot(*point, marker="o", color="black", markersize=4)
        axes.text(point[0] + x, point[1] + y, name, ha=align, va="center", bbox=white)
    axes.set_xlim(-5.0, 1.6)
    axes.set_ylim(-1.35, 1.7)
    axes.set_aspect("equal")
    return figure


def canvas(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return an empty figure without axes."""
    figure, axes = pyplot.subplots(figsize=size)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


DIAGRAMS = {
    "sam_step.svg": draw_sam_step,
    "local_update.svg": lambda: draw_chain(STEP, "next batch"),
    "rooms.svg": draw_rooms,
    "round.svg": lambda: draw_chain(ROUND, "next round"),
    "executors.svg": lambda: draw_tree(EXECUTORS, EXECUTOR_EDGES, (9.2, 3.7)),
    "memory_tree.svg": lambda: draw_tree(MEMORY, MEMORY_EDGES, (9.6, 3.6)),
    "algorithms.svg": lambda: draw_tree(ALGORITHMS, ALGORITHM_EDGES, (9.2, 3.4)),
}


def main(folder: Path) -> None:
    """Write every diagram into `folder`, on white, so that dark pages show it too."""
    for name, draw in DIAGRAMS.items():
        with pyplot.rc_context(STYLE):
            figure = draw()
            figure.savefig(folder / name, metadata={"Date": None}, facecolor="white")
            pyplot.close(figure)
