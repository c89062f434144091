"""The pictures of README and of the site's first page show the numbers of the result files."""

from __future__ import annotations

import re

import pytest

from tools import pictures

DRAWN = {"speed.svg": ("step_bars", "round_bars"), "step.svg": ("step_bars",), "rounds.svg": ("round_bars",)}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_shows_the_measured_numbers(name: str) -> None:
    shown = re.findall(r">(\d+\.\d\d)</text>", (pictures.FOLDER / name).read_text())
    bars = [getattr(pictures, made)() for made in DRAWN[name]]
    expected = [f"{value:.2f}" for panel in bars for values in panel.values() for value in values.values()]
    assert shown == expected, "the picture is older than bench/results: `make pictures` draws it again"


def test_each_contender_of_the_picture_was_measured() -> None:
    assert all(set(values) == set(pictures.STEP_NAMES.values()) for values in pictures.step_bars().values())
    assert all(set(values) == set(pictures.ROUND_NAMES.values()) for values in pictures.round_bars().values())


def test_the_same_numbers_give_the_same_file(tmp_path) -> None:
    for folder in ("one", "two"):
        pictures.main(tmp_path / folder)
    for name in DRAWN:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
