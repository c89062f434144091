"""Ops touch no memory beyond their operands, which end at pages that cannot be accessed, with NaN as padding.

The property tests of the ops (`op_cases.Memory`) have bands of NaN around every buffer and compare them afterwards,
which finds wrong writes. Only this test finds a read beyond an operand whose value is not used.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from fastsam import backends
from tests.helpers.op_cases import parameter
from tests.helpers.places import HELPERS

SCRIPT = HELPERS / "guard_pages.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is protected through Linux's mprotect")
CPU = [b for b in backends.table() if b.device == "cpu"]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "2"} | env
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize(
    "backend",  # backends of torch functions cannot leave their operands
    [parameter(b, *([] if b.name in ("native", "triton") else [pytest.mark.slow])) for b in CPU],
)
def test_no_op_leaves_its_operands(backend: backends.Backend) -> None:
    process = run(backend.name, "--dtypes", "float32")
    assert process.returncode == 0, f"{process.stdout}{process.stderr}"
    match = re.search(r"(\d+) calls within bounds", process.stdout)
    assert match and int(match[1]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2", "the best"])
def test_no_instruction_set_leaves_its_operands(isa: str) -> None:
    """Loops are compiled once per instruction set, so each one could have a vector access too many."""
    if not (native := CPU[0]).available or native.name != "native":
        pytest.skip(f"native on cpu: {native.reason}")
    process = run("native", **({} if isa == "the best" else {"FASTSAM_ISA": isa}))
    assert process.returncode == 0, f"{process.stdout}{process.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["read", "write"])
def test_one_element_too_far_is_noticed(mode: str) -> None:
    assert run("reference", "--beyond", mode).returncode == -signal.SIGSEGV


def test_paddings_are_noticed() -> None:
    """A sum over a field with its paddings is NaN here."""
    from bench.kernel_cases import OPS
    from tests.helpers.guard_pages import LENGTHS, finite, operands_of

    operands = operands_of(OPS["norm"], LENGTHS["ragged"], 1, torch.float32, flat=True, at_end=True)
    operands["sumsq"][0] = operands["grads"][0].square().sum()
    assert not finite(OPS["norm"], operands)
