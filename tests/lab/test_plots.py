"""The figures, looked at through matplotlib's own objects: lines, bands, legends, colours, scales."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from pytest import MonkeyPatch

from fastsam.lab.plots import curves, surfaces
from fastsam.lab.plots import figure as figures
from fastsam.lab.plots.sweeps import Point, sweep_curve


def catch_figure(monkeypatch: MonkeyPatch) -> dict:
    """Return a dict whose "figure" is the next figure that is saved. Only its PNG is written, in low resolution."""
    record: dict = {}

    def save(figure: Figure, path: Path) -> Path:
        record.setdefault("figure", figure).savefig(path, dpi=50)
        return path

    monkeypatch.setattr(figures, "save", save)
    return record


def records(accuracies: list[float | None]) -> list[dict]:
    return [{"round": i + 1, "test_accuracy": a, "train_loss": 2.0 + i} for i, a in enumerate(accuracies)]


def test_a_curve_has_lines_a_band_and_the_target(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    # In "two" a seed has no evaluation in round 2.
    histories = {"one": [records([0.125, 0.25])], "two": [records([0.125, 0.25]), records([0.375, None])]}
    path = curves.curve(histories, tmp_path / "curves.png", "t", target=0.75)
    (accuracy,) = record["figure"].axes
    assert path.read_bytes().startswith(b"\x89PNG")
    first_line, two, target = accuracy.lines
    assert first_line.get_xydata().tolist() == [[1, 12.5], [2, 25]]
    assert two.get_xydata().tolist() == [[1, 25]]
    assert set(target.get_ydata()) == {75.0}
    assert len(accuracy.collections) == 1  # the band of "two"
    labels = [text.get_text() for text in record["figure"].legends[0].get_texts()]
    assert labels == ["one", "two (2 seeds)", "target 75 %"]
    assert (accuracy.get_xlabel(), accuracy.get_ylabel()) == ("round", "test accuracy (%)")


def test_a_curve_of_the_loss_is_not_in_percent(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curve({"one": [records([None, None])]}, tmp_path / "curves.png", key=curves.LOSS)
    (axes,) = record["figure"].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 2], [2, 3]]]
    assert axes.get_ylabel().replace("\n", " ") == "training loss of the active clients"


def test_many_labels_have_a_legend_beside_the_plot_and_differ(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curve({f"m{i}": [records([0.1, 0.2])] for i in range(13)}, tmp_path / "curves.png")
    figure = record["figure"]
    assert figure.axes[0].get_legend() is None and len(figure.legends[0].get_texts()) == 13
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 13


def test_a_measure_has_its_name_and_its_rounds(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    history = [{"round": 1, "spectral_complexity": None}, {"round": 2, "spectral_complexity": 3.0}]
    lines = {"a": [history, history], "b": [[]]}
    curves.curve(lines, tmp_path / "curve.png", key="spectral_complexity")
    (axes,) = record["figure"].axes
    assert (axes.get_ylabel(), axes.get_yscale()) == ("spectral complexity Q", "log")
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[2, 3.0]]]


def test_a_sweep_has_a_scale_and_levels(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    lines = {
        "fedavg": [Point(None, [0.5, 0.7])],
        "fedsam": [Point(0.1, [0.5, 0.75]), Point(0.01, [0.25, 0.25])],
    }
    sweep_curve(lines, "rho", tmp_path / "a.png")
    axes = record["figure"].axes[0]
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "radius of the perturbation, ρ"
    level, line = axes.lines[0], axes.containers[0].lines[0]
    assert set(level.get_ydata()) == {60.0} and level.get_linestyle() == "--"
    assert line.get_xydata().tolist() == [[0.01, 25.0], [0.1, 62.5]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.01", "0.1"]


@pytest.mark.parametrize(("largest_value", "scale"), [(8.0, "log"), (7.5, "linear")])
def test_a_sweep_over_a_factor_of_8_is_logarithmic(
    largest_value: float, scale: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    record = catch_figure(monkeypatch)
    sweep_curve({"fedsam": [Point(1.0, [0.5]), Point(largest_value, [0.5])]}, "rho", tmp_path / "a.png")
    assert record["figure"].axes[0].get_xscale() == scale


def test_a_sweep_over_what_is_no_number_joins_nothing(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    sweep_curve({"fedsmoo": [Point(True, [0.5]), Point(False, [0.25])]}, "dyn", tmp_path / "a.png")
    axes = record["figure"].axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["true", "false"] and axes.get_xscale() == "linear"
    assert axes.lines[0].get_linestyle() == "None" and sorted(axes.lines[0].get_ydata()) == [25.0, 50.0]


def test_surfaces_share_their_levels(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    axis = np.linspace(-1, 1, 9)
    bowl = axis[:, None] ** 2 + axis[None] ** 2 + 0.1
    assert surfaces.surfaces(
        {"sharp": 10 * bowl, "flat": bowl, "level": 0 * bowl + 1}, 1.0, tmp_path / "s.png"
    ).exists()
    panels = [axes for axes in record["figure"].axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["sharp", "flat", "level"]
    ranges = {axes.collections[0].get_clim() for axes in panels}
    assert len(ranges) == 1 and ranges.pop() == pytest.approx((0.1, 21.0))


@pytest.mark.parametrize(("low", "high"), [(2.02, 2.47), (1.8, 3.4), (0.02, 700.0)])
def test_the_losses_beside_a_surface_are_plain_numbers(
    tmp_path: Path, monkeypatch: MonkeyPatch, low: float, high: float
) -> None:
    record = catch_figure(monkeypatch)
    surfaces.surfaces({"a": np.linspace(low, high, 25).reshape(5, 5)}, 1.0, tmp_path / "s.png")
    axis = next(axes for axes in record["figure"].axes if axes.get_ylabel() == "training loss").yaxis
    values = [value for value in axis.get_majorticklocs() if low <= value <= high]
    assert len(values) >= 3 and [axis.get_major_formatter()(value) for value in values] == [f"{v:g}" for v in values]
    assert low > 1 or not {0.1, 1.0, 10.0, 100.0} - set(values)


@pytest.mark.slow
def test_surfaces_of_models_that_overflow_can_be_drawn(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    grid = np.array([[np.inf, 1e30, np.nan], [1.0, 0.5, 2.0], [3.0, 4.0, 1e9]])
    surfaces.surfaces({"wild": grid, "never": np.full((3, 3), np.nan)}, 1.0, tmp_path / "s.png")
    assert record["figure"].axes[0].collections[0].get_clim() == pytest.approx((0.5, 5e3))
    assert surfaces.surfaces({"never": np.full((3, 3), np.nan)}, 1.0, tmp_path / "n.png").exists()


def test_colours_and_line_styles_of_a_sweep(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    names = ("FedAvg", "FedSAM rho=0.1", "FedSAM rho=0.2")
    curves.curve({name: [records([0.1, 0.2])] for name in names}, tmp_path / "curves.png")
    styles = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in record["figure"].axes[0].lines}
    (avg, plain), (run_1, dash), (two, dot) = (styles[name] for name in names)
    assert run_1 == two != avg and len({plain, dash, dot}) == 3


def test_a_band_is_the_deviation_of_a_sample(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curve({"a": [records([0.4, 0.4]), records([0.6, 0.6])]}, tmp_path / "curves.png")
    edges = record["figure"].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == pytest.approx((50 - 10 * 2**0.5, 50 + 10 * 2**0.5))


def test_the_bars_of_a_sweep_are_the_deviation_of_a_sample(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    sweep_curve({"a": [Point(0.1, [0.4, 0.6])]}, "rho", tmp_path / "a.png")
    (bar,) = record["figure"].axes[0].containers[0].lines[2][0].get_segments()
    assert bar[:, 1].tolist() == pytest.approx([50 - 10 * 2**0.5, 50 + 10 * 2**0.5])


@pytest.mark.parametrize("ends", [[1.0, 0.8], [0.0, 0.2]], ids=["top", "bottom"])
def test_bands_and_bars_are_percentages(ends: list[float], tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curve({"a": [records([end, end]) for end in ends]}, tmp_path / "curves.png")
    edges = record.pop("figure").axes[0].collections[0].get_paths()[0].vertices[:, 1]
    sweep_curve({"a": [Point(0.1, ends)]}, "rho", tmp_path / "a.png")
    (bar,) = record["figure"].axes[0].containers[0].lines[2][0].get_segments()
    for heights in (edges, bar[:, 1]):
        assert min(heights) >= 0 and max(heights) <= 100 and min(abs(heights - 100 * round(ends[0]))) < 1e-9


@pytest.mark.slow
def test_every_figure_is_there_for_a_paper_too_and_the_same_twice(tmp_path: Path) -> None:
    history = {"fedavg": [records([0.5, 0.6])], "fedsam": [records([0.6, 0.7])]}
    for name in ("one", "two"):
        curves.curve(history, tmp_path / f"{name}.png")
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF") and "<svg" in (tmp_path / "one.svg").read_text()
    for suffix in (".png", ".svg", ".pdf"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_figures_have_the_width_and_fonts_of_a_paper(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    import matplotlib

    old_params, record = dict(matplotlib.rcParams), catch_figure(monkeypatch)
    history = [{"round": i, "consistency": float(i)} for i in (1, 2)]
    curves.curve({"fedavg": [history], "fedsam": [history]}, tmp_path / "m.png", "FedAvg on digits", "consistency")
    figure = record["figure"]
    assert figure.get_figwidth() == figures.COLUMN and figure.axes[0].yaxis.label.get_fontsize() == 8
    box = figure.axes[0].yaxis.label.get_window_extent(figure.canvas.get_renderer())
    assert box.y0 >= 0 and box.y1 <= figure.bbox.height
    assert dict(matplotlib.rcParams) == old_params
