"""The figures, looked at through matplotlib's own objects: lines, bands, legends, colours, scales."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from pytest import MonkeyPatch

from fastsam.lab.plots import ablations, classes, curves, surfaces
from fastsam.lab.plots import figure as figures
from fastsam.lab.plots.ablations import Point


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


def test_curves_draw_the_lines_the_band_and_the_target(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    # In "two" a seed has no evaluation in round 2.
    histories = {"one": [records([0.125, 0.25])], "two": [records([0.125, 0.25]), records([0.375, None])]}
    path = curves.curves({"": histories}, tmp_path / "curves.png", target=0.75, title="t")
    accuracy, error = record["figure"].axes
    assert path.read_bytes().startswith(b"\x89PNG")
    first_line, two, target = accuracy.lines
    assert first_line.get_xydata().tolist() == [[1, 12.5], [2, 25]]
    assert two.get_xydata().tolist() == [[1, 25]]
    assert set(target.get_ydata()) == {75.0}
    assert error.lines[0].get_xydata().tolist() == [[1, 87.5], [2, 75]]
    assert accuracy.get_position().y0 == error.get_position().y0, "a single panel has its views side by side"
    assert set(error.lines[2].get_ydata()) == {25.0} and error.get_yscale() == "log"
    assert len(accuracy.collections) == 1  # the band of "two"
    labels = [text.get_text() for text in record["figure"].legends[0].get_texts()]
    assert labels == ["one", "two (2 seeds)", "target 75 %"]
    axis_labels = (accuracy.get_xlabel(), accuracy.get_ylabel(), error.get_ylabel())
    assert axis_labels == ("round", "test accuracy (%)", "test error (%)")


def test_curves_of_a_run_without_accuracy_show_the_loss(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curves({"": {"one": [records([None, None])]}}, tmp_path / "curves.png", target=0.5)
    for axes in record["figure"].axes:
        assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 2], [2, 3]]]
        assert axes.get_ylabel() == "training loss of the active clients"


def test_a_perfect_run_can_be_drawn(tmp_path: Path) -> None:
    assert curves.curves({"": {"one": [records([1.0, 1.0]), records([0.5, 1.0])]}}, tmp_path / "curves.png").exists()


def test_classes_is_a_heat_map_of_the_counts(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    counts = np.arange(12).reshape(4, 3)
    assert classes.classes({"": counts}, tmp_path / "classes.png").stat().st_size > 1000
    axes = record["figure"].axes[0]
    assert np.array_equal(axes.images[0].get_array(), counts)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("class", "client")
    assert classes.classes({"": np.ones((3000, 200), dtype=int)}, tmp_path / "large.png").exists()


def test_many_labels_have_a_legend_beside_the_plot_and_differ(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curves({"": {f"m{i}": [records([0.1, 0.2])] for i in range(13)}}, tmp_path / "curves.png")
    figure = record["figure"]
    assert figure.axes[0].get_legend() is None and len(figure.legends[0].get_texts()) == 13
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 13


def test_the_legend_of_small_plots_covers_no_lines(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    history = [{"round": 1, "e_w": 0.5}, {"round": 2, "e_w": 3.0}]
    curves.measures({"": {name: [history] for name in "abc"}}, ["e_w", "e_w"], tmp_path / "measures.png")
    figure = record["figure"]
    assert not any(axes.get_legend() for axes in figure.axes) and len(figure.legends[0].get_texts()) == 3


def test_measures_are_small_plots_with_names(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    history = [{"round": 1, "sharpness": 0.5, "e_w": None}, {"round": 2, "sharpness": 0.25, "e_w": 3.0}]
    curves.measures({"": {"a": [history, history], "b": [[]]}}, ["sharpness", "e_w"], tmp_path / "measures.png")
    first, second = record["figure"].axes
    assert (first.get_title(), second.get_title()) == ("global sharpness, one step", "drift of the weights, E_w")
    assert [line.get_xydata().tolist() for line in first.lines] == [[[1, 0.5], [2, 0.25]]]
    assert [line.get_xydata().tolist() for line in second.lines] == [[[2, 3.0]]]


def test_an_ablation_has_a_scale_and_levels(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    lines = {
        "fedavg": [Point(None, [0.5, 0.7])],
        "fedsam": [Point(0.1, [0.5, 0.75]), Point(0.01, [0.25, 0.25])],
    }
    ablations.ablation({"": lines}, "rho", tmp_path / "a.png")
    axes = record["figure"].axes[0]
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "radius of the perturbation, ρ"
    level, line = axes.lines[0], axes.containers[0].lines[0]
    assert set(level.get_ydata()) == {60.0} and level.get_linestyle() == "--"
    assert line.get_xydata().tolist() == [[0.01, 25.0], [0.1, 62.5]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.01", "0.1"]


@pytest.mark.parametrize(("largest_value", "scale"), [(8.0, "log"), (7.5, "linear")])
def test_an_ablation_over_a_factor_of_8_is_logarithmic(
    largest_value: float, scale: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    record = catch_figure(monkeypatch)
    ablations.ablation({"": {"fedsam": [Point(1.0, [0.5]), Point(largest_value, [0.5])]}}, "rho", tmp_path / "a.png")
    assert record["figure"].axes[0].get_xscale() == scale


def test_ablation_over_what_is_no_number_joins_nothing(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    ablations.ablation({"": {"fedsmoo": [Point(True, [0.5]), Point(False, [0.25])]}}, "dyn", tmp_path / "a.png")
    axes = record["figure"].axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["true", "false"] and axes.get_xscale() == "linear"
    assert axes.lines[0].get_linestyle() == "None" and sorted(axes.lines[0].get_ydata()) == [25.0, 50.0]


def test_ratio_is_logarithmic(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    ablations.ratio({"": {"fedsam": [Point(1.0, [0.5]), Point(0.1, [0.25])]}}, tmp_path / "r.png")
    assert record["figure"].axes[0].lines[0].get_xydata().tolist() == [[-1.0, 25.0], [0.0, 50.0]]


def test_a_method_without_a_radius_is_a_level(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    ablations.ratio({"": {"fedavg": [Point(None, [0.25, 0.75])], "fedsam": [Point(1.0, [0.5])]}}, tmp_path / "r.png")
    level = record["figure"].axes[0].lines[0]
    assert set(level.get_ydata()) == {50.0} and level.get_linestyle() == "--"


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


def sweep() -> dict:
    """Return runs of two values of alpha; for the second value, seeds differ and a variant has no run."""
    low = {
        "fedavg": [records([0.1, 0.2])],
        "fedsam rho=0.1": [records([0.1, 0.3])],
        "fedsam rho=0.2": [records([0.2, 0.3])],
    }
    high = {"fedavg": [records([0.5, 0.6]), records([0.7, 0.8])], "fedsam rho=0.2": [records([0.6, 0.9])]}
    return {"alpha = 0.1": low, "alpha = 1": high}


def test_panels_colours_and_line_styles_of_a_sweep(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curves(sweep(), tmp_path / "curves.png")
    figure = record["figure"]
    panels = [axes for axes in figure.axes if axes.get_ylabel() == "test accuracy (%)" or axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["alpha = 0.1", "alpha = 1"] * 2
    low, high = panels[:2]
    styles = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in (*low.lines, *high.lines)}
    assert styles["fedavg (2 seeds)"] == styles["fedavg"]
    names = ("fedavg", "fedsam rho=0.1", "fedsam rho=0.2")
    (avg, plain), (run_1, dash), (two, dot) = (styles[name] for name in names)
    assert run_1 == two != avg and len({plain, dash, dot}) == 3
    assert low.get_ylim() == high.get_ylim(), "panels are compared with the eye"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "fedavg", "fedsam rho=0.1", "fedsam rho=0.2", "fedavg (2 seeds)"
    ]  # fmt: skip


def test_a_band_is_the_deviation_of_a_sample(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curves({"": {"a": [records([0.4, 0.4]), records([0.6, 0.6])]}}, tmp_path / "curves.png")
    edges = record["figure"].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == pytest.approx((50 - 10 * 2**0.5, 50 + 10 * 2**0.5))


def test_the_bars_of_an_ablation_are_the_deviation_of_a_sample(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    ablations.ablation({"": {"a": [Point(0.1, [0.4, 0.6])]}}, "rho", tmp_path / "a.png")
    (bar,) = record["figure"].axes[0].containers[0].lines[2][0].get_segments()
    assert bar[:, 1].tolist() == pytest.approx([50 - 10 * 2**0.5, 50 + 10 * 2**0.5])


@pytest.mark.parametrize("ends", [[1.0, 0.8], [0.0, 0.2]], ids=["top", "bottom"])
def test_bands_and_bars_are_percentages(ends: list[float], tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    curves.curves({"": {"a": [records([end, end]) for end in ends]}}, tmp_path / "curves.png")
    edges = record.pop("figure").axes[0].collections[0].get_paths()[0].vertices[:, 1]
    ablations.ablation({"": {"a": [Point(0.1, ends)]}}, "rho", tmp_path / "a.png")
    (bar,) = record["figure"].axes[0].containers[0].lines[2][0].get_segments()
    for heights in (edges, bar[:, 1]):
        assert min(heights) >= 0 and max(heights) <= 100 and min(abs(heights - 100 * round(ends[0]))) < 1e-9


@pytest.mark.slow
def test_every_figure_is_there_for_a_paper_too_and_the_same_twice(tmp_path: Path) -> None:
    history = {"": {"fedavg": [records([0.5, 0.6])], "fedsam": [records([0.6, 0.7])]}}
    for name in ("one", "two"):
        curves.measures(history, ["test_accuracy"], tmp_path / f"{name}.png")
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF") and "<svg" in (tmp_path / "one.svg").read_text()
    for suffix in (".png", ".svg", ".pdf"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_figures_have_the_width_and_fonts_of_a_paper(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    import matplotlib

    old_params, record = dict(matplotlib.rcParams), catch_figure(monkeypatch)
    curves.measures(sweep_of("consistency", 3), ["consistency", "sharpness"], tmp_path / "m.png")
    figure = record["figure"]
    assert figure.get_figwidth() == figures.PAGE and figure.axes[0].title.get_fontsize() == 8
    assert len([axes for axes in figure.axes if axes.get_title()]) == 6
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        box = axes.title.get_window_extent(renderer)
        assert not axes.get_title() or (box.x0 >= 0 and box.x1 <= figure.bbox.width)
    assert dict(matplotlib.rcParams) == old_params


def sweep_of(key: str, values: int) -> dict:
    history = [{"round": i, key: float(i), "sharpness": 1.0} for i in (1, 2)]
    return {f"alpha = {i}": {"fedavg": [history], "fedsam": [history]} for i in range(values)}


def test_classes_of_swept_data_share_a_scale(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    counts = {"alpha = 0.1": 9 * np.eye(20, 3, dtype=int), "alpha = 1": np.ones((20, 3), dtype=int)}
    classes.classes(counts, tmp_path / "c.png")
    first, second = (axes for axes in record["figure"].axes if axes.images)
    assert (first.get_title(), second.get_title()) == ("alpha = 0.1", "alpha = 1")
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 9)
    assert all(float(place).is_integer() for place in first.get_yticks())


def test_an_ablation_has_a_panel_for_what_else_was_swept(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    record = catch_figure(monkeypatch)
    lines = {"fedavg": [Point(None, [0.5])], "fedsam": [Point(0.1, [0.5]), Point(0.2, [0.6])]}
    ablations.ablation({"alpha = 0.1": lines, "alpha = 1": lines}, "rho", tmp_path / "a.png")
    assert [axes.get_title() for axes in record["figure"].axes] == ["alpha = 0.1", "alpha = 1"]
    assert len(record["figure"].legends[0].get_texts()) == 2
