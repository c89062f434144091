"""The Triton kernels compiled for every architecture, without a GPU: 128-bit accesses, no spills, exact arithmetic."""

import json
import os
import subprocess
import sys

import pytest

from fastsam_kernels import toolchain
from fastsam_kernels.rules import RULES
from tests.helpers.places import HELPERS

pytest.importorskip("triton", reason="Triton is not installed, so there are no Triton kernels to compile")
pytestmark = pytest.mark.gpu_code

ACCESS = 8  # 128-bit accesses per thread of an operand of 4096 float32: 4096*4 bytes / (128 threads * 16 bytes)
PLAIN = "no-g1 no-q no-shift no-sumsq_v no-grad_scale no-found_inf"
STATE = {"fp32": 1, "fp64": 2, "fp16": 1, "bf16": 1}  # momentum, second moments, master copies, in units of float32
WEIGHT = {"fp32": 1, "fp64": 2, "fp16": 0.5, "bf16": 0.5}
# Instructions of float32 kernels on each architecture of `CUDA_ARCHS`, as Triton 3.7 makes them.
INSTRUCTIONS = {
    "norm_kernel fp32 scattered no-weights": (691, 694, 737, 671),
    "perturb_kernel fp32 scattered no-seed": (680, 741, 753, 748),
    "restore_kernel fp32 scattered": (179, 192, 198, 197), "accumulate_kernel fp32 flat": (308, 314, 334, 334),
    f"sgd_kernel fp32 scattered {PLAIN}": (921, 919, 938, 934),
    f"adam_kernel fp32 scattered {PLAIN}": (3623, 3478, 3508, 3546),
}  # fmt: skip
# Most registers of a thread: 64 of them leave room for 1,024 threads per multiprocessor.
REGISTERS = dict.fromkeys(("norm_kernel", "restore_kernel", "accumulate_kernel", "perturb_kernel"), 64)
REGISTERS["rmsprop_kernel"] = 160  # five operands are in flight where other kernels have four
REGISTERS_ON_75 = REGISTERS | {"perturb_kernel": 72}
# Bytes that a thread stores and loads again: two registers, and six.
SPILLED = {("lion_kernel", "100"): 8, ("adam_kernel", "75"): 24}


@pytest.fixture(scope="module", params=toolchain.CUDA_ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ptx_counts(arch: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Return counts over the PTX and the machine code, and the resources that it needs, per kernel and variant."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(HELPERS / "ptx.py"), arch]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


# Operands read and written by each kernel, in float32 scattered form.
@pytest.mark.parametrize(
    ("kernel", "reads", "writes"),
    [
        ("norm_kernel fp32 scattered no-weights", 1, 0),
        ("norm_kernel fp32 scattered", 2, 0),
        ("perturb_kernel fp32 scattered no-seed", 2, 2),  # z and the gradient; z and the backup
        ("restore_kernel fp32 scattered", 1, 1),
        ("update_norm_kernel fp32 scattered", 4, 0),
        ("sgd_kernel fp32 scattered", 6, 2),
        ("dual_norm_kernel fp32 scattered", 3, 0),
        ("dual_perturb_kernel fp32 scattered", 4, 3),
        ("inner_kernel fp32 scattered", 2, 0),
        *(
            (f"{name}_kernel fp32 scattered {PLAIN}", 2 + len(rule.state), 1 + len(rule.state))
            for name, rule in RULES.items()
        ),
    ],
)
def test_every_access_of_a_whole_chunk_has_128_bits(ptx_counts: dict, kernel: str, reads: int, writes: int) -> None:
    assert ptx_counts[kernel]["wide_loads"] == reads * ACCESS
    assert ptx_counts[kernel]["wide_stores"] == writes * ACCESS
    unaligned_kernel = kernel.replace("scattered", "scattered unaligned")
    if unaligned_kernel in ptx_counts:
        assert ptx_counts[unaligned_kernel]["wide_loads"] == ptx_counts[unaligned_kernel]["wide_stores"] == 0


def test_every_access_of_the_limbs_has_128_bits(ptx_counts: dict) -> None:
    """Four elements per thread: of a row and the base, and of two limbs of 64 bits that are read and written once for
    all rows."""
    counts = ptx_counts["accumulate_kernel fp32 flat"]
    assert (counts["wide_loads"], counts["wide_stores"]) == (1 + 1 + 2 + 2, 2 + 2)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_every_storage_type_has_128_bits(ptx_counts: dict, arch: str, dtype: str) -> None:
    master = "" if dtype in ("fp32", "fp64") else " master"
    weight, state = WEIGHT[dtype] * ACCESS, STATE[dtype] * ACCESS
    perturb = ptx_counts[f"perturb_kernel {dtype} flat{master} no-seed"]
    sgd = ptx_counts[f"sgd_kernel {dtype} flat{master} {PLAIN}"]
    assert perturb["wide_loads"] == 2 * weight + (state if master else 0)
    assert perturb["wide_stores"] == weight + state
    assert sgd["wide_loads"] == weight + 2 * state
    assert sgd["wide_stores"] == weight + state
    if master:
        seeded_counts = ptx_counts[f"perturb_kernel {dtype} flat{master}"]
        assert (seeded_counts["wide_loads"], seeded_counts["wide_stores"]) == (
            perturb["wide_loads"],
            perturb["wide_stores"],
        )
    if dtype == "bf16" and arch != "75":
        assert perturb["bf16_by_hardware"] > 0


def test_nothing_spilled_fused_or_approximated(ptx_counts: dict, arch: str) -> None:
    for kernel, counts in ptx_counts.items():
        name = kernel.split()[0]
        assert counts["local"] == counts["LOCAL"] == 0, f"{kernel} spills registers: {counts}"
        assert counts["STACK"] <= SPILLED.get((name, arch), 0), f"{kernel} spills registers: {counts}"
        limit = (REGISTERS_ON_75 if arch == "75" else REGISTERS).get(name, 128)
        assert counts["REG"] <= limit, f"{kernel} needs {counts['REG']} registers: too few blocks fit a multiprocessor"
        assert counts["fused"] == 0, f"{kernel} fuses multiply and add, so its bits depend on what the compiler saw"
        assert counts["inexact"] == 0, f"{kernel} divides or takes roots approximately"


def test_no_atomics_but_the_ticket_of_a_row(ptx_counts: dict) -> None:
    """The ticket is an integer with acquire and release, so that the last program sees all partial sums.

    Other atomics would add in any order.
    """
    for kernel, counts in ptx_counts.items():
        num_tickets = kernel.split()[0] in (
            "norm_kernel", "dual_norm_kernel", "update_norm_kernel", "inner_kernel",
            *(f"{name}_kernel" for name, rule in RULES.items() if rule.counter),
        )  # fmt: skip
        assert counts["tickets"] == counts["atomics"] == num_tickets, kernel


def test_code_does_not_grow(ptx_counts: dict, arch: str) -> None:
    """The length of the machine code stays within 15 per cent of the recorded length."""
    for kernel, recorded_counts in INSTRUCTIONS.items():
        ratio = ptx_counts[kernel]["instructions"] / recorded_counts[toolchain.CUDA_ARCHS.index(arch)]
        assert 1 / 1.15 <= ratio <= 1.15, f"{kernel} has {ptx_counts[kernel]['instructions']} instructions"
