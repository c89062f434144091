"""Every attack for a short time; `make attack` gives them longer."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastsam.fed.common.option import table
from fastsam.fed.loop.options import Settings
from tests.attack.nonsense import draw_option
from tests.attack.plan import ATTACKS
from tests.helpers.nonsense import NONSENSE
from tests.helpers.places import ROOT

SECONDS = 20
QUICK = ("kill-operation", "damaged-directory", "flipped-bit", "full-disk")


def test_words_for_a_run_are_choices_of_its_options() -> None:
    """A word that no option takes is always refused by the same check, so that its draws find nothing."""
    for name, row in table(Settings).items():
        draws = {word for seed in range(200) if isinstance(word := draw_option(random.Random(seed), name), str)}
        if row.choices:
            assert draws & {*row.choices} and draws <= {*row.choices, *(v for v in NONSENSE if isinstance(v, str))}
            for word in draws & {*row.choices}:
                options: dict[str, Any] = {name: word}
                Settings(**options)


def run_attacks(names: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return the records of attacks, which run in a separate process, because an attack forks."""
    command = [sys.executable, "-m", "tests.attack", "--only", names, *options, "--out", str(folder / "made.json")]
    process = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, f"{process.stdout}{process.stderr[-4000:]}"
    records: list[dict[str, Any]] = json.loads((folder / "made.json").read_text())["attacks"]
    assert all(record["trials"] > 0 or record["left_out"] for record in records)
    assert not any(record["failures"] for record in records)
    return records


def test_the_first_trials_find_nothing(tmp_path: Path) -> None:
    """The same trials in every run."""
    run_attacks(",".join(QUICK), tmp_path, "--trials", "2")


@pytest.mark.slow
@pytest.mark.parametrize("name", [attack.name for attack in ATTACKS])
def test_finds_nothing(name: str, tmp_path: Path) -> None:
    (record,) = run_attacks(name, tmp_path, "--minutes", str(SECONDS / 60))
    if record["left_out"]:
        pytest.skip(record["left_out"])
