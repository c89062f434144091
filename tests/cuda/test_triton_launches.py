"""Triton's real path without a GPU: specialisation, cubin for sm_90 and the launcher, under a CUDA library without a
device.

Only the launch itself is counted instead of run. The interpreter, which other tests use, has none of this.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from fastsam_kernels import toolchain
from tests.helpers.places import ROOT

pytest.importorskip("triton", reason="Triton is not installed, so there are no Triton kernels to launch")
pytestmark = pytest.mark.gpu_code

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


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    if toolchain.find_cxx() is None:
        pytest.skip("Triton's launcher needs a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    paths = {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder), "TRITON_CACHE_DIR": str(folder)}
    env = os.environ | {"TRITON_INTERPRET": "0", **paths}
    build = "import sys; from tests.helpers.triton_launches import build_libcuda; build_libcuda(sys.argv[1])"
    for command in (["-c", build], ["-m", "tests.helpers.triton_launches"]):
        process = subprocess.run(
            [sys.executable, *command, str(folder)], env=env, cwd=ROOT, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
    records: dict[str, list[list[str]]] = json.loads(process.stdout)
    return records


@pytest.mark.parametrize("case", EXTRA_LAUNCHES)
def test_every_op_is_compiled_loaded_and_launched(launches: dict[str, list[list[str]]], case: str) -> None:
    """A program per chunk and row, four warps each, as machine code for sm_90."""
    rows = int(case.split()[1])
    assert Counter(name for name, *_ in launches[case]) == Counter(LAUNCHES) + Counter(EXTRA_LAUNCHES[case])
    for name, blocks, threads, _, arch in launches[case]:
        assert (threads, arch) == ("128", "90"), name
        if name != "_accumulate_kernel":
            assert int(blocks) == CHUNKS * rows, name
