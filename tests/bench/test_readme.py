"""Every speed in README comes from a file: bench/readme.py writes the paragraph from bench/results."""

import re
from pathlib import Path

import pytest

from bench import readme, report
from bench import record as records
from tests.helpers.pages import text_of, without_fences

pytestmark = [pytest.mark.of_each_kind, pytest.mark.pages]

UNIT = (
    r"(?:ms|µs|s|seconds|minutes|GB/s|TB/s|MiB|GiB|times|x|rounds|processors|% of|of the (?:time|memory|floor|speed))\b"
)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
# A number with a unit, such as "107 to 932 ms", or a ratio, such as "0.66". Versions follow the name of a package.
SPEED = re.compile(rf"(?<![\w.])({NUMBER})(?=(?: (?:to|and|or) {NUMBER})* ?{UNIT})|(?<![\w.])(\d+\.\d+)(?![\w.]|\.\d)")
VERSION = re.compile(r"\b(?:Python|[Tt]orch|PyTorch|fastsam) \d+(?:\.\d+)*")


def speeds(prose: str) -> list[str]:
    """Return the numbers of a text that say how fast something is."""
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+", "", prose)
    return [first or second for first, second in SPEED.findall(VERSION.sub("", " ".join(prose.split())))]


@pytest.mark.parametrize(
    ("prose", "numbers"),
    [
        ("takes 107 and 932 ms, or 3.3 times", ["107", "932", "3.3"]),
        ("0.16 to 0.66 of the time, 2.7\nms", ["0.16", "0.66", "2.7"]),
        ("41 algorithms, 4 bytes per parameter, Python 3.10, torch 2.10, `x 0.5 ms`, [a](b-0.1.md), bfloat16", []),
    ],
)
def test_speeds_are_found(prose: str, numbers: list[str]) -> None:
    assert speeds(prose) == numbers


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_speed_is_in_the_paragraph_from_the_files(page: str) -> None:
    hand_written = re.sub(r"<!-- bench:.*?<!-- /bench -->", "", without_fences(page), flags=re.DOTALL)
    assert not speeds(hand_written), f"{page}: a figure belongs into bench/readme.py, which takes it from a file"


def test_each_number_of_the_paragraph_is_in_a_file() -> None:
    """The numbers are looked up here without bench/readme.py, in the rows that the sentences speak of."""
    (place,) = (match for match in re.findall(r"<!-- bench:readme -->(.*?)<!-- /bench -->", text_of("README.md"), re.S))
    steps, rounds = (records.read(records.RESULTS / f"{name}-cuda.json") for name in ("kernels", "federated"))
    values = [
        row["replayed"][key]["median"] if key == "fraction" else row["replayed"]["to"]["foreach"]["median"]
        for case in steps["cases"] if case["part"] == "steps"
        for row in case["rows"] if row["name"] == "fastsam_native"
        for key in (["fraction", "to"] if case["parameters"] >= 30e6 else ["to"])
    ]  # fmt: skip
    values += [
        1e3 * row["seconds"] for case in rounds["cases"] for row in case["rows"]
        if case["title"].endswith("fedavg, by clients") and row["at"] == 100 and "seconds" in row
    ]  # fmt: skip
    numbers = speeds(place)
    assert len(numbers) == 8
    for number in numbers:
        digits = len(number.partition(".")[2])
        assert number in {f"{value:.{digits}f}" for value in values}, number


def test_other_results_give_another_paragraph(tmp_path: Path) -> None:
    for name in ("kernels-cuda", "federated-cuda"):
        text = (records.RESULTS / f"{name}.json").read_text()
        (tmp_path / f"{name}.json").write_text(text.replace("NVIDIA H200", "NVIDIA X"))
    text, old_text = readme.text(tmp_path), readme.text(records.RESULTS)
    assert text != old_text and text.startswith("On an NVIDIA X the optimizer part")
    assert report.fill("<!-- bench:readme -->\nold\n<!-- /bench -->", {"bench:readme": text}).split("\n")[1] in text
