"""The count of the lines of a round (tools/round_lines.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.places import ROOT


def test_an_installed_package_is_counted_without_its_kernels(tmp_path: Path) -> None:
    """`fastsam` and `fastsam_kernels` are in one folder, as pip installs them."""
    for name, folder in (("fastsam", "fastsam"), ("fastsam_kernels", "kernels")):
        (tmp_path / name).symlink_to(ROOT / folder)
    command = [sys.executable, str(ROOT / "tools" / "round_lines.py"), "--list"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    files = re.findall(r"^--- (\S+) \((\d+)\)$", output, re.M)
    assert "fed/loop/loop.py" in dict(files) and all((ROOT / "fastsam" / file).is_file() for file, _ in files)
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.M)
    names, lines, *_, counts = zip(*rows)
    assert names == ("FedAvg", "FedSAM", "a user's subclass of FedAvg, its values checked")
    assert int(lines[0]) == sum(int(number) for _, number in files) < int(lines[2]) and int(counts[0]) == len(files)
