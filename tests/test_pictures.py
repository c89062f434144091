"""The pictures of README and of the pages show the numbers of the result files, and the code's names."""

from __future__ import annotations

import re

import pytest

from fastsam.fed.executors.base import registry
from tests.helpers.pages import PAGES, links
from tools import diagrams, pictures

BARS = {
    "speed.svg": ("step_bars", "whole_bars", "round_bars"),
    "step.svg": ("step_bars",),
    "rounds.svg": ("round_bars",),
}
ALL = [*BARS, "variants.svg", "surfaces.svg", *diagrams.DIAGRAMS]


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
    picture = (pictures.FOLDER / "variants.svg").read_text()
    for points in pictures.variant_points().values():
        assert len(points) > 8 and all(f">{name}" in picture for name in points)


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
    assert names == {*ALL, "logo.svg"}


def test_the_same_numbers_give_the_same_file(tmp_path) -> None:
    for folder in ("one", "two"):
        pictures.main(tmp_path / folder)
    for name in ALL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
