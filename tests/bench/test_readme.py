"""Every speed in README comes from a file: bench/readme.py writes the paragraph from bench/results."""

import json
import re
from pathlib import Path

import pytest

from bench import readme, report
from bench import record as records
from tests.helpers.pages import text_of, without_fences
from tests.helpers.places import ROOT

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
    rounds = records.read(records.RESULTS / "federated-cuda.json")
    values = [
        1e3 * row["seconds"] for case in rounds["cases"] for row in case["rows"]
        if case["title"].endswith("fedavg, by clients") and row["at"] == 100 and "seconds" in row
    ]  # fmt: skip
    numbers = [number.replace(",", "") for number in speeds(place)]
    assert len(numbers) == 4
    for number in numbers:
        digits = len(number.partition(".")[2])
        assert number in {f"{value:.{digits}f}" for value in values}, number


def test_other_results_give_another_paragraph(tmp_path: Path) -> None:
    text = (records.RESULTS / "federated-cuda.json").read_text()
    (tmp_path / "federated-cuda.json").write_text(text.replace("NVIDIA H200", "NVIDIA X"))
    text, old_text = readme.text(tmp_path), readme.text(records.RESULTS)
    assert text != old_text and text.startswith("A round of 100 small clients on an NVIDIA X takes")
    assert report.fill("<!-- bench:readme -->\nold\n<!-- /bench -->", {"bench:readme": text}).split("\n")[1] in text


def test_what_fastsam_works_with_has_a_page_a_tried_version_and_a_test() -> None:
    """The last run of tests/integrations had these versions, which docs/compatibility.md shows."""
    tried = json.loads((records.RESULTS / "compatibility.json").read_text())["versions"]
    rows = re.findall(
        r"^\| .* \| \[.*?\]\((\S+?)(?:#\S*)?\) \| (\S+) (\S+) \| \[test\]\((\S+)\) \|$", text_of("README.md"), re.M
    )
    assert len(rows) == 12
    for page, package, version, test in rows:
        assert (ROOT / page).is_file() and tried[package].partition("+")[0] == version
        assert "def test_" in (ROOT / test).read_text()
