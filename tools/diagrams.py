"""Draws the diagrams of the pages: `make pictures`.

Writes into docs/pictures: `local_update.svg` and `round.svg` (the chains of a client's step and of a federated round),
`rooms.svg`, and the decision trees `executors.svg`, `memory_tree.svg` and `algorithms.svg`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

BLUE, GREY, LIGHT = ("#0b5fa5", "#5f6670", "#dfe9f3")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, and readable by a test
    "svg.hashsalt": "fastsam",  # the same file from the same drawing and numbers
    "font.family": "sans-serif",
    "font.size": 9,
}


class Question(NamedTuple):
    """An inner node of a decision tree. The first branch is drawn on the left; a branch that is a text is an answer."""

    text: str
    first: tuple[str, Question | str]  # "yes" or "no", and the branch
    second: tuple[str, Question | str]


EXECUTORS = Question(
    "Is there a GPU?",
    ("no", Question(
        "Dense model without dropout,\nup to 2^16 parameters\n(2^20 as row programs)?",
        ("yes", "vmap"), ("no", Question("Several cores?", ("yes", "threads"), ("no", "sequential"))),
    )),
    ("yes", Question(
        "Dense model without dropout,\nup to 2^20 parameters?",
        ("yes", "vmap"),
        ("no", Question("Does a pass read values on the\nhost, or is there a client loop?",
                        ("yes", "streams"), ("no", "graph"))),
    )),
)  # fmt: skip
MEMORY = Question(
    "Half-precision weights?",
    ("yes", Question(
        "Are weights written only by copy_,\nload_state_dict or p.data = ...?",
        ("no", "no option:\n36 bytes moved"), ("yes", "assume_no_alias:\n30 bytes moved"),
    )),
    ("no", Question(
        "At least 65,536 elements per tensor on average,\nand no view of a weight kept during a step?",
        ("no", "no option"),
        ("yes", Question(
            "SAM or ASAM, one backward pass per half,\none rank, no GradScaler, no clipping by hand?",
            ("no", "assume_no_alias:\nno copy between steps"),
            ("yes", "assume_no_alias,\noptimizer_in_backward:\npeak memory of SGD"),
        )),
    )),
)  # fmt: skip
STATE = "May clients keep a state\nbetween rounds?"
ALGORITHMS = Question(
    "Shall each client have a model of its own?",
    ("yes", "FedRep, FedBN, Ditto,\npFedMe, APFL"),
    ("no", Question(
        "Two backward passes for a step?",
        ("no", Question(STATE, ("no", "FedAvg, FedAvgM,\nFedCM"), ("yes", "FedLESAM-D, SCAFFOLD,\nFedDyn"))),
        ("yes", Question(STATE, ("no", "FedSAM,\nMoFedSAM"), ("yes", "FedSMOO, FedSpeed,\nFedGAMMA"))),
    )),
)  # fmt: skip

Chain = Sequence[tuple[str, str, bool]]  # title, names, and True for a blue box

ROOMS: Chain = (  # each imports only what is to its right
    ("lab", "\ncommands, configs,\nreports", False),
    ("fed", "\nrounds, algorithms,\nexecutors", False),
    ("optim", "\nFusedSAM,\nvariants", False),
    ("step, batchnorm,\nops", "\na step on rows", False),
    ("arena,\nbackends", "\nmemory, choice\nof kernels", False),
    ("fastsam_kernels", "\nC++, CUDA, Triton,\nreference", True),
)
# Blue: chosen by an algorithm.
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


def draw_box(axes: Axes, place: tuple[float, float], text: str, is_blue: bool) -> Text:
    """Draw a text in a light or a blue box and return it."""
    style = {"boxstyle": "round,pad=0.5", "facecolor": BLUE if is_blue else LIGHT, "edgecolor": BLUE}
    return axes.text(*place, text, ha="center", va="center", bbox=style, color="white" if is_blue else "black")


def draw_tree(tree: Question, size: tuple[float, float]) -> Figure:
    """Return a decision tree: questions in light boxes, and answers in blue ones, each in a column."""
    figure, axes = canvas(size)
    columns, lowest = itertools.count(), 0

    def draw(node: Question | str, depth: int) -> tuple[float, float]:
        nonlocal lowest
        lowest = min(lowest, -depth)
        if isinstance(node, str):
            place = (float(next(columns)), -float(depth))
        else:
            branches = [(label, *draw(branch, depth + 1)) for label, branch in (node.first, node.second)]
            place = (sum(x for _, x, _ in branches) / 2, -float(depth))
            for label, x, y in branches:
                axes.plot([place[0], x], [place[1], y], color=GREY, linewidth=1, zorder=0)
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                middle = (0.4 * place[0] + 0.6 * x, 0.4 * place[1] + 0.6 * y)
                axes.text(*middle, label, ha="center", va="center", color=GREY, bbox=box)
        draw_box(axes, place, node if isinstance(node, str) else node.text, isinstance(node, str))
        return place

    draw(tree, 0)
    axes.set_xlim(-0.6, next(columns) - 0.4)
    axes.set_ylim(lowest - 0.4, 0.4)
    return figure


def draw_chain(chain: Chain, columns: int, size: tuple[float, float], caption: str = "") -> Figure:
    """Return boxes in a row with arrows to the right. A second row leads back to the first box."""
    figure, axes = canvas(size)
    has_two_rows = len(chain) > columns
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(-0.5, 0.5 + has_two_rows)
    places = [
        (float(i), float(has_two_rows)) if i < columns else (2.0 * columns - 1 - i, 0.0) for i in range(len(chain))
    ]
    boxes = [
        draw_box(axes, place, f"{title}\n{names}", is_blue)
        for place, (title, names, is_blue) in zip(places, chain, strict=True)
    ]
    figure.canvas.draw()  # from here on the boxes have their sizes, at which the arrows end
    for start in range(len(chain) if has_two_rows else len(chain) - 1):
        end = (start + 1) % len(chain)
        patches = {"patchA": boxes[start].get_bbox_patch(), "patchB": boxes[end].get_bbox_patch()}
        arrow = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 1, "shrinkB": 1, **patches}
        axes.annotate("", places[end], places[start], arrowprops=arrow)
    axes.text(-0.04, 0.5, caption, ha="right", va="center", color=GREY)
    return figure


def canvas(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return an empty figure without axes."""
    figure, axes = pyplot.subplots(figsize=size)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


DIAGRAMS = {
    "local_update.svg": lambda: draw_chain(STEP, 4, (9.6, 2.6), "next batch"),
    "rooms.svg": lambda: draw_chain(ROOMS, len(ROOMS), (9.6, 1.1)),
    "round.svg": lambda: draw_chain(ROUND, 4, (9.6, 2.6), "next round"),
    "executors.svg": lambda: draw_tree(EXECUTORS, (9.2, 3.7)),
    "memory_tree.svg": lambda: draw_tree(MEMORY, (9.6, 3.6)),
    "algorithms.svg": lambda: draw_tree(ALGORITHMS, (9.2, 3.4)),
}


def main(folder: Path) -> None:
    """Write every diagram into `folder`, on white, so that dark pages show it too."""
    for name, draw in DIAGRAMS.items():
        with pyplot.rc_context(STYLE):
            figure = draw()
            figure.savefig(folder / name, metadata={"Date": None}, facecolor="white")
            pyplot.close(figure)
