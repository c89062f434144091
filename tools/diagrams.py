"""The diagrams of the pages, which tools/pictures.py writes: chains of boxes and decision trees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

BLUE, GREY, LIGHT = ("#0b5fa5", "#5f6670", "#dfe9f3")
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1}
# A decision tree: a question with a branch for "yes" and for "no", the first one on the left. A text is an answer.
Tree: TypeAlias = "str | tuple[str, dict[str, Tree]]"

EXECUTORS: Tree = ("Is there a GPU?", {
    "no": ("Dense model, samples in memory,\nup to 2^16 parameters\n(2^20 as row programs)?", {
        "yes": "vmap", "no": ("Several cores?", {"yes": "threads", "no": "sequential"}),
    }),
    "yes": ("Dense model, samples in memory,\nup to 2^20 parameters?", {
        "yes": "vmap",
        "no": ("Does a pass read values on the\nhost, or is there a client loop?", {"yes": "streams", "no": "graph"}),
    }),
})  # fmt: skip
MEMORY: Tree = ("Half-precision weights?", {
    "yes": ("Are weights written only by copy_,\nload_state_dict or p.data = ...?", {
        "no": "no option:\n36 bytes moved", "yes": "assume_no_alias:\n30 bytes moved",
    }),
    "no": ("At least 65,536 elements per tensor on average,\nand no view of a weight kept during a step?", {
        "no": "no option",
        "yes": ("SAM or ASAM, one backward pass per half,\none rank, no GradScaler, no clipping by hand?", {
            "no": "assume_no_alias:\nno copy between steps",
            "yes": "assume_no_alias,\noptimizer_in_backward:\npeak memory of SGD",
        }),
    }),
})  # fmt: skip
STATE = "May clients keep a state\nbetween rounds?"
ALGORITHMS: Tree = ("Shall each client have a model of its own?", {
    "yes": "FedRep, FedBN, Ditto,\npFedMe, APFL",
    "no": ("Two backward passes for a step?", {
        "no": (STATE, {"no": "FedAvg, FedAvgM,\nFedCM", "yes": "FedLESAM-D, SCAFFOLD,\nFedDyn"}),
        "yes": (STATE, {"no": "FedSAM,\nMoFedSAM", "yes": "FedSMOO, FedSpeed,\nFedGAMMA"}),
    }),
})  # fmt: skip

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
    ("step of the clients", "Algorithm.local_step", True),
    ("train the clients", "executor: batches,\ngradients, update", False),
    ("stages", "clip, noise, compression,\nrobust rule", False),
    ("states and uploads", "Algorithm.finish", True),
    ("exact sums", "over clients and processes", False),
    ("step of the server", "Algorithm.step_server", True),
    ("evaluate and record", "measures, callbacks,\ncheckpoint", False),
)


def draw_box(axes: Axes, place: tuple[float, float], text: str, is_blue: bool) -> Text:
    """Draw a text in a light or a blue box and return it."""
    style = {"boxstyle": "round,pad=0.5", "facecolor": BLUE if is_blue else LIGHT, "edgecolor": BLUE}
    return axes.text(*place, text, ha="center", va="center", bbox=style, color="white" if is_blue else "black")


def draw_tree(tree: Tree, size: tuple[float, float]) -> Figure:
    """Return a decision tree: questions in light boxes, and answers in blue ones, each in a column."""
    figure, axes = canvas(size)
    columns, heights = itertools.count(), []

    def draw(node: Tree, height: float) -> tuple[float, float]:
        text, branches = (node, {}) if isinstance(node, str) else node
        ends = {label: draw(branch, height - 1) for label, branch in branches.items()}
        place = (sum(x for x, _ in ends.values()) / 2 if ends else float(next(columns)), height)
        for label, (x, y) in ends.items():
            axes.plot([place[0], x], [height, y], color=GREY, linewidth=1, zorder=0)
            middle = (0.4 * place[0] + 0.6 * x, 0.4 * height + 0.6 * y)
            axes.text(*middle, label, ha="center", va="center", color=GREY, bbox=LABEL_BOX)
        draw_box(axes, place, text, is_blue=not ends)
        heights.append(height)
        return place

    draw(tree, 0.0)
    axes.set(xlim=(-0.6, next(columns) - 0.4), ylim=(min(heights) - 0.4, 0.4))
    return figure


def draw_chain(chain: Chain, columns: int, size: tuple[float, float], caption: str = "") -> Figure:
    """Return boxes in a row with arrows to the right. A second row leads back to the first box."""
    figure, axes = canvas(size)
    has_two_rows = len(chain) > columns
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(-0.5, 0.5 + has_two_rows))
    places = [(i, float(has_two_rows)) if i < columns else (2 * columns - 1 - i, 0.0) for i in range(len(chain))]
    boxes = [draw_box(axes, places[i], f"{title}\n{names}", is_blue) for i, (title, names, is_blue) in enumerate(chain)]
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
