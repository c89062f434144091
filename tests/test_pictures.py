"""The pictures of README and of the pages show the numbers of the result files, and the code's names."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fastsam.fed.algorithms import registry as algorithms
from fastsam.fed.executors.base import registry
from tests.helpers.pages import PAGES, links, text_of
from tests.helpers.places import ROOT
from tools import diagrams, pictures, recording, speeds

pytestmark = pytest.mark.pages

Bars = Callable[[], speeds.Bars]
ONE, TWO = partial(speeds.round_bars, 1), partial(speeds.round_bars, 2)
BARS: dict[str, Bars] = {
    "step.svg": speeds.step_bars,
    "whole-step.svg": speeds.whole_bars,
    "rounds-unequal.svg": partial(ONE, speeds.UNEQUAL),
    "rounds-two-cores.svg": lambda: TWO(speeds.first_sizes(2)),
    "rounds-digits.svg": partial(ONE, speeds.DIGITS),
    "rounds-equal.svg": partial(ONE, speeds.EQUAL),
    "gpu-step.svg": partial(speeds.gpu_step_bars, "eager"),
    "gpu-captured.svg": partial(speeds.gpu_step_bars, "replayed"),
    "gpu-rounds.svg": speeds.gpu_round_bars,
    "accuracy.svg": speeds.accuracy_bars,
}
PANELS = [*BARS, "surfaces-sgd.svg", "surfaces-sam.svg"]
CLOSED = ["variants-wrong.svg", "variants-right.svg"]  # drawn from closed results
# Drawn by tools/recording.py and by tools/notebooks.py. The last two were drawn once.
OTHERS = [*CLOSED, recording.FILE.name, "tutorial_federated.svg", "sam_step.svg", "logo.svg"]
ALL = [*PANELS, *diagrams.DIAGRAMS]
PHONE = 390 - 2 * 16  # pixels of a phone's page without its margins


@pytest.mark.parametrize("name", BARS)
def test_a_picture_shows_the_measured_numbers(name: str) -> None:
    shown_numbers = re.findall(r">(\d+\.\d\d)</text>", (pictures.FOLDER / name).read_text())
    expected = [f"{value:.2f}" for values in BARS[name]().values() for value in values.values()]
    assert expected and shown_numbers == expected, (
        "the picture is older than bench/results: `make pictures` draws it again"
    )


def test_each_contender_of_the_picture_was_measured() -> None:
    assert all(set(values) == set(speeds.STEP_NAMES.values()) for values in speeds.step_bars().values())
    full_size = set(speeds.STEP_NAMES.values()) - {"torch.compile", "foreach by hand"}
    assert all(set(values) == full_size for values in speeds.whole_bars().values()) and len(speeds.whole_bars()) == 3
    gpu_names = set(speeds.GPU_STEP_NAMES.values())
    assert all(set(values) == gpu_names for values in speeds.gpu_step_bars("eager").values())
    one = {"MLP": "vmap", "CNN": "sequential"}
    races = [(1, speeds.UNEQUAL, one), (2, speeds.first_sizes(2), dict.fromkeys(one, "auto"))]
    for num_cores, sizes, ours in [*races, (1, speeds.DIGITS, {"MLP": "vmap"}), (1, speeds.EQUAL, one)]:
        bars = speeds.round_bars(num_cores, sizes)
        assert set(bars) == set(ours)
        for model, executor in ours.items():
            values = bars[model]
            names = [name.removesuffix(speeds.ONE_CORE) for name in values]
            fastsam = [f"{speeds.COMPILED}, {executor}", f"{speeds.PLAIN}, {executor}"]
            assert names == [name for name in (*fastsam, *speeds.ROUND_NAMES.values()) if name in names]
            # A row that failed is not drawn, and BlazeFL needs Python 3.13, which is not everywhere.
            assert {fastsam[0], speeds.LOOP, "Flower", "FedJAX", "FedLab", "pfl"} <= {*names}
            num_of_one_core = sum(name.endswith(speeds.ONE_CORE) for name in values)
            assert num_of_one_core == (4 if num_cores == 2 else 0)  # FedJAX, FedLab, pfl and the loop
    assert list(speeds.gpu_round_bars()["MLP, 100 equal clients"]) == [
        "JAX by hand", "fastsam compiled, vmap", speeds.LOOP,
    ]  # fmt: skip


def test_a_chart_of_rounds_takes_only_rows_of_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, cores: int, speed: float) -> dict[str, object]:
        return {"name": name, "cores": cores, "speed": {"median": speed}}

    rows = [row("fastsam, auto", 2, 4.0), row("pfl, one core", 1, 0.5), row("pfl", 1, 0.6), row("flower", 3, 9.0)]
    rows += [{"name": "blazefl", "cores": 2, "problem": "it used 2.50 processors"}, row("bare loop, one core", 1, 1.0)]
    cases = [{"part": "speed-2", "title": "CNN, unequal clients, fedavg", "rows": rows}]
    others = [row("fastsam, vmap", 2, 7.0), row("pfl", 1, 0.7)]
    cases += [{"part": "speed-1", "title": f"CNN, {sizes}, fedavg", "rows": others} for sizes in ("a", "b")]
    (tmp_path / "federated.json").write_text(json.dumps({"cases": cases}))
    monkeypatch.setattr(speeds, "RESULTS", tmp_path)
    two = {"fastsam compiled, auto": 4.0, "pfl, one core": 0.5, f"{speeds.LOOP}, one core": 1.0}
    assert speeds.round_bars(2, speeds.UNEQUAL) == {"CNN": two} and speeds.round_bars(2, "b") == {}
    assert speeds.round_bars(1, "b") == {"CNN": {"pfl": 0.7}} and speeds.first_sizes(2) == speeds.UNEQUAL


def test_the_faster_executor_is_named() -> None:
    times = {"fastsam, vmap": 2.0, "fastsam, sequential": 3.0, "fastsam plain, vmap": 1.0}
    expected = {"fastsam compiled, sequential": 3.0, "fastsam plain, vmap": 1.0}
    assert speeds._our_speeds(times, speeds.EXECUTORS[1]) == expected


@pytest.mark.parametrize("name", [*PANELS, *CLOSED, "tutorial_federated.svg", "logo.svg"])
def test_a_panel_has_a_fixed_width_that_a_phone_shows(name: str) -> None:
    size = re.search(r'<svg[^>]*? width="([\d.]+)(pt)?"', (pictures.FOLDER / name).read_text(), re.S)
    assert size is not None
    width, unit = size.groups()
    assert float(width) * (4 / 3 if unit else 1) <= PHONE


def test_the_screen_of_a_recording_has_the_last_state_of_a_line_that_moves() -> None:
    output = b"one\r\n\x1b[?25l1/2 \x1b[32m3/60\x1b[0m\r\x1b[2K1/2 \x1b[32m60/60\x1b[0m\r\n\x1b[?25h\r\nend\r\n"
    assert recording.screen(output) == ["one", "1/2 \x1b[32m60/60\x1b[0m", "", "end", ""]


def test_a_recording_is_of_a_terminal_of_80_columns(tmp_path: Path) -> None:
    program = "import shutil, sys; print(sys.stdout.isatty(), shutil.get_terminal_size().columns)"
    assert recording.record(f'python -c "{program}"', tmp_path) == b"True 80\r\n"
    with pytest.raises(subprocess.CalledProcessError):
        recording.record("python -c 'raise SystemExit(3)'", tmp_path)


def test_the_recording_shows_the_command_of_readme_and_its_algorithms() -> None:
    picture = recording.FILE.read_text().replace("&#160;", " ")
    assert recording.COMMAND in text_of("README.md")
    *names, seeds = recording.COMMAND.split()[-3].split(","), recording.COMMAND.split()[-1].split(",")
    assert all(f"{name}-seed{seed}" in picture for name in names[0] for seed in seeds)
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", ""), "a code host shows no foreign fonts"


def test_the_trees_end_at_what_there_is() -> None:
    def answers(tree: diagrams.Tree) -> list[str]:
        if isinstance(tree, str):
            return [tree]
        assert {*tree[1]} == {"no", "yes"}
        return [text for branch in tree[1].values() for text in answers(branch)]

    assert {*answers(diagrams.EXECUTORS)} == set(registry) and len(answers(diagrams.MEMORY)) == 5
    names = [name for text in answers(diagrams.ALGORITHMS) for name in re.split(r",\s*", text)]
    assert len(names) > 10 and {name.lower() for name in names} <= set(algorithms)


def test_every_picture_is_on_a_page() -> None:
    names = {target.rpartition("/")[2] for page in PAGES for target in links(page) if target.endswith(".svg")}
    assert names == {*ALL, *OTHERS}
    names = {target.rpartition("/")[2] for page in PAGES for target in links(page) if target.endswith(".png")}
    assert names == {path.name for path in (ROOT / "bench" / "results").glob("*.png")}


def test_the_same_numbers_give_the_same_file(tmp_path) -> None:
    for folder in ("one", "two"):
        pictures.main(tmp_path / folder)
    for name in ALL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
