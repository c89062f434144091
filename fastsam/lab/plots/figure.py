"""Common parts of all figures: their creation without global state, files, sizes, colours and line styles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.4, 7.0  # inches: a figure in one column of a two-column paper, and over both
# Okabe and Ito's colours, which the colour-blind tell apart, without their yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 3)))
_STYLE: Any = {  # matplotlib's types list its settings one by one
    "font.size": 8, "figure.titlesize": 9, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7,
    "axes.linewidth": 0.6, "lines.linewidth": 1.2, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "svg.hashsalt": "fastsam", "pdf.fonttype": 42,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """Give letters and lines the sizes that they have on a paper's page. Used as a decorator of functions that draw."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        yield


def new(width: float, height: float) -> Figure:
    """Return a new figure, sizes in inches. It does not use pyplot, so it needs no global state and no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def shape(count: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of `count` panels, three in a row."""
    columns = min(3, count)
    return -(-count // columns), columns


def panels(figure: Figure, count: int, **options: Any) -> list[Any]:
    """Return the axes of `count` panels, three in a row."""
    all_axes = list(figure.subplots(*shape(count), squeeze=False, **options).flatten())
    for axes in all_axes[count:]:
        axes.set_axis_off()
    return all_axes[:count]


def close(figure: Figure, path: str | Path, title: str) -> Path:
    """Write the title above the figure, and save it."""
    if title:
        figure.suptitle(wrap(title, figure.get_figwidth()))
    return save(figure, Path(path))


def save(figure: Figure, path: Path) -> Path:
    """Save the figure as PNG, and as SVG and PDF with the same stem. Return the PNG's path."""
    figure.savefig(path, dpi=200)
    figure.set_layout_engine("none")  # as it is: the other files need not find the places again
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
    return path


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour for each algorithm and a line style for each variant.

    The algorithm is the first word of a label, the variant is the rest ("rho=0.05"). After seven algorithms, colours
    repeat with other line styles.
    """
    words = {label: label.partition(" ")[::2] for label in labels}
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in words.values()))
    variants = list(dict.fromkeys(variant for _, variant in words.values()))
    styles_by_label = {}
    for label, (algorithm, variant) in words.items():
        i = algorithms.index(algorithm)
        dash = i // len(_COLOURS) + variants.index(variant)
        styles_by_label[label] = {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[dash % len(_DASHES)]}
    return styles_by_label


def wrap(text: str, inches: float) -> str:
    """Return a title broken into lines of at most `inches`."""
    return textwrap.fill(text, max(8, int(inches / 0.075)))


def finish(axes: Any) -> None:
    """Draw a light grid, and remove the frame above and to the right."""
    axes.grid(True, color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, panels: Iterable[Any]) -> None:
    """Draw the legend of all `panels` below the figure, every label once. A single label has no legend."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if len(entries) < 2:
        return
    letters = max(map(len, entries))
    columns = max(1, min(len(entries), int(figure.get_figwidth() / (0.065 * letters + 0.65))))
    options: Any = {"loc": "outside lower center", "ncols": columns, "frameon": False, "handlelength": 4}
    figure.legend(list(entries.values()), list(entries), **options)


def logarithmic(axes: Any, axis_name: str = "y") -> None:
    """Make an axis logarithmic, with plain numbers at every decade; also at 2 and 5 if there are few decades."""
    from matplotlib.ticker import LogLocator, NullLocator

    (axes.set_yscale if axis_name == "y" else axes.set_xscale)("log")
    low, high = (axes.get_ylim if axis_name == "y" else axes.get_xlim)()
    axis = axes.yaxis if axis_name == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
