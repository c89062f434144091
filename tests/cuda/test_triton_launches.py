"""Triton's real path without a GPU: specialisation, cubin for sm_90 and the launcher, under a CUDA library without a
device.

Only the launch itself is counted instead of run. The interpreter, which other tests use, has none of this.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastsam_kernels import toolchain
from tests.helpers import stub_driver
from tests.helpers.places import ROOT

triton_launch = pytest.importorskip(
    "fastsam_kernels.triton_launch", reason="Triton is not installed, so there are no Triton kernels to launch"
)
pytestmark = pytest.mark.gpu_code

INSTALLED = importlib.metadata.version("triton")
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # one of each version in `triton_launch.VERSIONS`
CHUNKS = 4  # of [33, 0, 4097, 5] in chunks of 4096
# Launches of each kernel by `every_op`. In half precision a perturbation is rounded at random instead of a sum of rows.
LAUNCHES = {
    "_norm_kernel": 2, "_perturb_kernel": 2, "_update_norm_kernel": 1, "_update_kernel": 5, "_dual_norm_kernel": 1,
    "_dual_perturb_kernel": 1, "_inner_kernel": 1, "_restore_kernel": 1,
}  # fmt: skip
EXTRA_LAUNCHES = {
    "float32 1": {},
    "float32 2": {"_accumulate_kernel": 2},
    "bfloat16 1": {"_perturb_kernel": 1},
    "bfloat16 2": {"_perturb_kernel": 1},
}


def parameter(release: str) -> Any:
    """Return the parameter of a test with this release of Triton; slow if the release has to be downloaded."""
    installed = INSTALLED if INSTALLED.rpartition(".")[0] == release.rpartition(".")[0] else ""
    return installed or pytest.param(release, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=map(parameter, RELEASES))
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return all that `tests.helpers.triton_launches` prints with a release of Triton."""
    if toolchain.find_cxx() is None:
        pytest.skip("Triton's launcher needs a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    env = stub_driver.environment(folder)
    if request.param != INSTALLED:
        env["PYTHONPATH"] = str(install(request.param, folder / "triton"))
    stub_driver.build(folder, env)
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_launches", str(folder)],
        env=env, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    assert request.param.startswith(result["version"])
    return result


def install(release: str, folder: Path) -> Path:
    """Download a release of Triton into a folder and return the folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"triton=={release}"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"pip cannot install triton {release}: {process.stderr.strip().splitlines()[-1]}")
    return folder


def test_every_version_has_a_release() -> None:
    assert tuple(release.rpartition(".")[0] for release in RELEASES) == triton_launch.VERSIONS


@pytest.mark.parametrize("case", EXTRA_LAUNCHES)
def test_every_op_is_compiled_loaded_and_launched(records: dict[str, Any], case: str) -> None:
    """A program per chunk and row, four warps each, as machine code for sm_90."""
    launches, rows = records["ops"][case][::2], int(case.split()[1])
    assert Counter(name for name, *_ in launches) == Counter(LAUNCHES) + Counter(EXTRA_LAUNCHES[case])
    for name, blocks, threads, _, arch, *_ in launches:
        assert (threads, arch) == ("128", "90"), name
        if name != "_accumulate_kernel":
            assert int(blocks) == CHUNKS * rows, name


def test_launches_are_those_of_triton(records: dict[str, Any]) -> None:
    """The same machine code on the same stream with the same arguments, whether or not Triton's binder is used."""
    for case, lines in records["ops"].items():
        assert lines[::2] == lines[1::2], case
        assert all(len(line) > 9 and line[6] == "0x57" for line in lines), case


def test_other_alignments_get_other_machine_code(records: dict[str, Any]) -> None:
    aligned, _, unaligned, _ = records["ops"]["unaligned"]
    assert aligned[0] == unaligned[0] == "_norm_kernel"
    assert aligned[5] != unaligned[5]


def test_prepared_steps_launch_what_the_ops_do(records: dict[str, Any]) -> None:
    """Three launches of the same machine code, also for gradients without alignment, on the same stream.

    The arguments differ where the prepared step has memory for itself: the norm's sums and ticket, and the addresses of
    gradients. The machine code of the norm may differ, because the alignment of its ticket may differ.
    """
    steps = records["steps"]
    assert len(steps["prepared"]) == len(steps["ops"]) == 9
    functions = []
    for actual, expected in zip(steps["prepared"], steps["ops"], strict=True):
        assert len(actual) == len(expected)
        functions.append(actual[5])
        if actual[0] == "_norm_kernel":
            expected[5] = actual[5]
        assert {a for a, b in zip(actual, expected, strict=True) if a != b} <= set(steps["private"])
    aligned, unaligned, again = functions[:3], functions[3:6], functions[6:]
    assert aligned == again
    assert not set(aligned) & set(unaligned)


def test_triton_launches_where_its_function_cannot_be_avoided(records: dict[str, Any]) -> None:
    """Another version, and a hook that has to see the launches."""
    assert records["own"] == {"version": True, "hook": True}
