"""The folder of a Hugging Face `kernels` package (`tools/hub_kernel.py`), and the package loaded from disk by that
library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.places import ROOT
from tools import hub_kernel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHON = os.environ.get("FASTSAM_HUB")  # of an environment that has `kernels`; make test-hub-kernel sets it

# The ops of the package beside those of `native`, bit for bit; run where this repository's folder `kernels` is not
# found in the library's place.
USE = """
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata

from fastsam_kernels import native
from fastsam_kernels.columns import WIDTH, Column

module = get_local_kernel(Path(sys.argv[1]))
(variant,) = Path(sys.argv[1], "build").iterdir()
made = Metadata.read_from_file(variant / "metadata.json")
assert made.id == module.__name__ and hasattr(torch.ops, made.id), made
assert native.why_not("cpu") is None

torch.manual_seed(0)
n, hyper = 1000, torch.zeros(1, 1, WIDTH, dtype=torch.float64)
hyper[..., Column.RHO] = 0.05
table = torch.tensor([[0, n, 0, 0]])
grad, start = torch.randn(1, n), torch.randn(1, n)
ends = []
for ops in (native, module):
    z, origin, sumsq = start.clone(), torch.zeros(1, n), torch.zeros(1, 1, dtype=torch.float64)
    version = z._version
    ops.norm_(sumsq, [grad], [z], table, hyper, False)
    ops.perturb_([z], origin, [grad], table, hyper, sumsq, True)
    assert z._version > version, "autograd is told"
    ends.append([z, origin, sumsq])
assert all(torch.equal(a, b) for a, b in zip(*ends)) and not torch.equal(ends[0][0], start)
torch.compile(lambda: module.restore_([start], start.clone(), table), fullgraph=True, backend="eager")()
print("same bits")
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "fastsam"
    hub_kernel.lay_out(out)
    return out


def test_the_build_file_lists_every_source_and_nothing_else(layout: Path) -> None:
    made = tomllib.loads((layout / "build.toml").read_text())
    listed = {name for part in (made["torch"], *made["kernel"].values()) for name in part["src"]}
    there = {
        path.relative_to(layout).as_posix()
        for path in layout.rglob("*.*")
        if path.suffix in (".cpp", ".h", ".cu", ".cuh")
    }
    assert listed == there and "csrc/cpu/update_adam.cpp" in there and "csrc/cuda/update_adam.cu" in there
    assert made["general"]["edition"] == 5 and {part["backend"] for part in made["kernel"].values()} == {"cpu", "cuda"}
    # torch's library is seen through its stable ABI, of the version that the wheels are compiled for.
    major, minor = made["torch"]["stable-abi"]["cpu"].split(".")
    assert f"=0x{int(major):02x}{int(minor):02x}000000000000" in hub_kernel.build.TORCH_FLAGS[0]


def test_no_op_is_registered_under_the_name_of_another_version(layout: Path) -> None:
    registered = [
        line
        for path in layout.rglob("*.cpp")
        for line in path.read_text().splitlines()
        if "STABLE_TORCH_LIBRARY" in line
    ]
    assert len(registered) == 8 and all("TORCH_EXTENSION_NAME" in line for line in registered)
    init = (layout / "torch-ext" / "fastsam" / "__init__.py").read_text()
    assert "torch.ops.fastsam" not in init and "fastsam::" not in init


def test_another_version_has_another_namespace(layout: Path, tmp_path: Path) -> None:
    other = shutil.copytree(layout, tmp_path / "other")
    assert hub_kernel._digest(other) == hub_kernel._digest(layout)
    (other / "csrc" / "math.h").write_text("// another\n" + (other / "csrc" / "math.h").read_text())
    assert hub_kernel._digest(other) != hub_kernel._digest(layout)


def test_a_folder_with_files_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(SystemExit, match="has files in it"):
        hub_kernel.main([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_target_makes_its_own_folder_anew_and_no_other() -> None:
    def commands(*settings: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "OUT"}
        command = ["make", "-n", "hub-kernel", "TORCH_INDEX=", *settings]
        return subprocess.check_output(command, cwd=ROOT, env=environment, text=True)

    assert "rm -rf build/hub-kernel\n" in commands()
    assert "rm -rf build/hub-kernel" not in commands("OUT=theirs")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="no environment that has kernels: make test-hub-kernel")
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++"), reason="the library is compiled by g++, on Linux"
)
def test_the_package_loads_from_disk_and_has_the_bits_of_native(tmp_path: Path) -> None:
    out = tmp_path / "fastsam"
    assert hub_kernel.main([str(out), "--build"]) == 0
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([PYTHON, "-c", USE, out], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("same bits\n"), done.stdout + done.stderr
