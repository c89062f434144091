"""The pictures of README and of the pages show the numbers of the result files, and the code's names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fastsam.fed.executors.base import registry
from tests.helpers.pages import PAGES, links, text_of
from tools import diagrams, pictures, recording

BARS = {
    "speed.svg": ("step_bars", "whole_bars", "round_bars"),
    "step.svg": ("step_bars",),
    "rounds.svg": ("round_bars",),
}
PANELS = ["variants-wrong.svg", "variants-right.svg", "surfaces-sgd.svg", "surfaces-sam.svg"]
OTHERS = [recording.FILE.name, "tutorial_federated.svg"]  # of tools/recording.py and tools/notebooks.py
ALL = [*BARS, *PANELS, *diagrams.DIAGRAMS]
PHONE = 390 - 2 * 16  # pixels of a phone's page without its margins


@pytest.mark.parametrize("name", BARS)
def test_a_picture_shows_the_measured_numbers(name: str) -> None:
    shown_numbers = re.findall(r">(\d+\.\d\d)</text>", (pictures.FOLDER / name).read_text())
    bars = [getattr(pictures, results)() for results in BARS[name]]
    expected = [f"{value:.2f}" for panel in bars for values in panel.values() for value in values.values()]
    assert shown_numbers == expected, "the picture is older than bench/results: `make pictures` draws it again"


def test_each_contender_of_the_picture_was_measured() -> None:
    assert all(set(values) == set(pictures.STEP_NAMES.values()) for values in pictures.step_bars().values())
    full_size = set(pictures.STEP_NAMES.values()) - {"torch.compile", "foreach by hand"}
    assert (
        all(set(values) == full_size for values in pictures.whole_bars().values()) and len(pictures.whole_bars()) == 3
    )
    assert all(set(values) == set(pictures.ROUND_NAMES.values()) for values in pictures.round_bars().values())


def test_the_picture_of_variants_has_the_measured_ones() -> None:
    for title, points in pictures.variant_points().items():
        picture = (pictures.FOLDER / f"variants-{title.split()[0].lower()}.svg").read_text()
        assert len(points) > 8 and all(f">{name}" in picture for name in points)


@pytest.mark.parametrize("name", [*PANELS, "tutorial_federated.svg", "logo.svg"])
def test_a_panel_has_a_fixed_width_that_a_phone_shows(name: str) -> None:
    width, unit = re.search(r'<svg[^>]*? width="([\d.]+)(pt)?"', (pictures.FOLDER / name).read_text(), re.S).groups()  # type: ignore[union-attr]
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
    answers = {node.text for node in diagrams.EXECUTORS.values() if node.answer}
    assert {name for text in answers for name in registry if name in text} == set(registry)
    for nodes, edges in ((diagrams.EXECUTORS, diagrams.EXECUTOR_EDGES), (diagrams.MEMORY, diagrams.MEMORY_EDGES)):
        targets = {end for _, end, _ in edges}
        assert len(set(nodes) - targets) == 1, "one question is the first"
        for name, node in nodes.items():
            assert sorted(label for start, _, label in edges if start == name) == ([] if node.answer else ["no", "yes"])


def test_every_picture_is_on_a_page() -> None:
    names = {target.rpartition("/")[2] for page in PAGES for target in links(page) if target.endswith(".svg")}
    assert names == {*ALL, *OTHERS, "logo.svg"}


def test_the_same_numbers_give_the_same_file(tmp_path) -> None:
    for folder in ("one", "two"):
        pictures.main(tmp_path / folder)
    for name in ALL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
