"""Every attack for a short time; `make attack` gives them longer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.plan import ATTACKS
from tests.helpers.places import ROOT

SECONDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("name", [attack.name for attack in ATTACKS])
def test_finds_nothing(name: str, tmp_path: Path) -> None:
    """Run one trial of each attack in a separate process, because an attack forks."""
    command = [
        sys.executable, "-m", "tests.attack", "--only", name, "--minutes", str(SECONDS / 60), "--out",
        str(tmp_path / "made.json"),
    ]  # fmt: skip
    process = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, f"{process.stdout}{process.stderr[-4000:]}"
    (record,) = json.loads((tmp_path / "made.json").read_text())["attacks"]
    if record["left_out"]:
        pytest.skip(record["left_out"])
    assert record["trials"] > 0 and not record["failures"]
