"""Machine code of the float32 kernels for sm_80, sm_90 and sm_100, checked without a GPU.

It has 128-bit accesses, no local memory, bounded registers, and the recorded number of instructions per element
(`python -m tests.helpers.sass --record` after an intended change).
"""

import json
from pathlib import Path

import pytest

from bench.kernel_cases import OPS
from fastsam_kernels import toolchain
from tests.helpers.sass import ARCHS, CUDA, RECORDED, Code, cuda_code, cuobjdump, triton_code_elsewhere

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(cuobjdump() is None, reason="cuobjdump is not installed (Triton's package has it)"),
]
TOLERANCE = 1.15
# Threads that a multiprocessor holds: 2,048 with 32 registers each, 1,536 with 40, 1,024 with 64, 896 with 72.
REGISTERS = {
    "cuda": {"norm": 40, "perturb": 72, "restore": 64, "accumulate": 64, "update_sgd": 72, "update_adam": 64},
    "triton": {"norm": 64, "perturb": 128, "restore": 64, "accumulate": 64, "update_sgd": 128, "update_adam": 128},
}
KINDS = ("cuda", "triton")
Table = dict[tuple[str, str, str], Code]


@pytest.fixture(scope="module")
def codes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return instruction counts by kind, op and architecture.

    If pytest has a cache, the CUDA kernels stay in it until their sources change.
    """
    found: Table = {}
    if toolchain.find_nvcc() is not None:
        kept = getattr(request.config, "cache", None)
        cache = Path(kept.mkdir("sass")) if kept else tmp_path_factory.mktemp("sass")
        found |= {("cuda", code.op, code.arch): code for code in cuda_code(cache)}
    pytest.importorskip("triton")
    return found | {("triton", code.op, code.arch): code for code in triton_code_elsewhere()}


def of(codes: Table, kind: str, op: str) -> list[Code]:
    if kind == "cuda" and toolchain.find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    return [codes[kind, op, arch] for arch in ARCHS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", CUDA)
def test_accesses_of_128_bits(codes: Table, kind: str, op: str) -> None:
    """Wide loads and stores per element equal the number of operands, so no access is narrower."""
    registry = OPS[op.replace("_sgd", "")]
    for code in of(codes, kind, op):
        packs = code.elements // 4
        assert code.wide_loads >= len(registry.reads) * packs, code
        assert code.wide_stores >= len(registry.writes) * packs, code


def test_the_backup_passes_the_cache(codes: Table) -> None:
    """Exactly the accesses to the backup bypass the cache, so that operands that are needed soon stay in it."""
    for op in CUDA:
        for code in of(codes, "cuda", op):
            assert code.once == (code.elements // 4 if op in ("perturb", "restore") else 0), code


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", CUDA)
def test_registers_and_no_local_memory(codes: Table, kind: str, op: str) -> None:
    for code in of(codes, kind, op):
        assert code.local == code.spills == 0, code
        assert code.registers <= REGISTERS[kind][op], code


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", CUDA)
def test_instructions_per_element(codes: Table, kind: str, op: str) -> None:
    """The code of a kernel over the elements that a thread has in a sweep, against what was recorded."""
    recorded = json.loads(RECORDED.read_text())[kind][op]
    for code in of(codes, kind, op):
        assert code.per_element <= TOLERANCE * recorded[code.arch], code
        assert code.per_element * TOLERANCE >= recorded[code.arch], f"fewer than recorded: record anew. {code}"
