"""The slow tests, which `make test` leaves out, can still be collected and set up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_slow_test_finds_its_fixtures() -> None:
    """A renamed fixture breaks its slow tests, and they run seldom. `--setup-plan` runs neither tests nor fixtures."""
    command = [sys.executable, "-m", "pytest", "-q", "--setup-plan", "-n0", "-m", "slow", str(Path(__file__).parent)]
    plan = subprocess.run(command, capture_output=True, text=True, timeout=300)
    errors = [line for line in plan.stdout.splitlines() if line.startswith(("E  ", "ERROR", "FAILED"))]
    assert plan.returncode == 0, "\n".join(errors) + plan.stderr
