"""The kernels of bench/variants, compiled by nvcc for every architecture that is shipped, and what their machine code
says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.variants import library
from fastsam_kernels import build, toolchain
from fastsam_kernels.columns import WIDTH
from tests.helpers.emulated_steps import table_of
from tests.helpers.sass import cuobjdump, disassembled

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not())),
    pytest.mark.skipif(toolchain.find_nvcc() is None, reason="nvcc is not installed"),
]
REGISTERS = {"one_read": 64, "dependent_norm": 40, "dependent_perturb": 56}  # a block of one_read has 1,024 threads
# Packs of 128 bits that a thread loads and stores in a sweep: gradients and weights.
WIDE = {"one_read": (4 + 2, 2), "dependent_norm": (4, 0), "dependent_perturb": (4, 2)}


@dataclass
class Kernel:
    name: str
    arch: str
    usage: dict[str, int]
    instructions: list[str]

    def at(self, *names: str) -> list[int]:
        """Where the instructions are that begin with one of `names`."""
        return [i for i, word in enumerate(self.instructions) if word.startswith(names)]


@pytest.fixture(scope="module")
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By architecture. Where pytest has a cache they are kept in it, so that only what changed is compiled."""
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("variants")) if cache else tmp_path_factory.mktemp("variants")
    return {arch: library.build(arch, folder / arch) for arch in toolchain.CUDA_ARCHS}


@pytest.fixture(scope="module")
def kernels(libraries: dict[str, Path]) -> list[Kernel]:
    if cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (Triton's package has it)")
    return [
        Kernel(op, arch, usage, instructions)
        for arch, path in libraries.items()
        for mangled, instructions, usage in disassembled(path)
        for op in REGISTERS
        if f"{op}_kernel" in mangled
    ]


def test_every_kernel_is_there(kernels: list[Kernel]) -> None:
    """With two sizes of the table."""
    found = sorted((k.name, k.arch) for k in kernels)
    expected = [(op, arch) for op in REGISTERS for arch in toolchain.CUDA_ARCHS] * 2
    assert found == sorted(expected)


def test_no_local_memory_and_few_registers(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0, kernel
        assert not kernel.at("LDL", "STL"), kernel
        assert kernel.usage["REG"] <= REGISTERS[kernel.name], (kernel.name, kernel.arch, kernel.usage)


def test_accesses_of_128_bits(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        loads, stores = WIDE[kernel.name]
        assert len(kernel.at("LDG.E.128", "LDG.E.EF.128", "LDG.E.ENL2.128")) >= loads, kernel
        assert len(kernel.at("STG.E.128", "STG.E.ENL2.128")) >= stores, kernel
        assert not kernel.at("LD.", "ST."), f"generic accesses: {kernel}"


def test_one_read_keeps_loads_under_way(kernels: list[Kernel]) -> None:
    """A sweep's four packs of gradients before the first is put into shared memory, and the first weights before the
    block waits."""
    for kernel in (k for k in kernels if k.name == "one_read"):
        loads, kept, read = kernel.at("LDG.E.128"), kernel.at("STS.128"), kernel.at("LDS.128")
        assert len(loads) == 6 and len(kept) == 4 and len(read) >= 2, kernel
        assert loads[3] < kept[0] < kept[3] < loads[4] < loads[5] < kernel.at("BAR.SYNC")[0] < read[0], kernel


def test_the_dependent_launch_waits_before_it_reads(kernels: list[Kernel]) -> None:
    """And the norm lets it come before it reads; neither where the architecture does not know it."""
    for kernel in (k for k in kernels if k.name.startswith("dependent")):
        said = kernel.at("ACQBULK" if kernel.name == "dependent_perturb" else "PREEXIT")
        if kernel.arch == "80":
            assert not said, kernel
        else:
            assert len(said) == 1 and said[0] < kernel.at("LDG")[0], kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: bench.variants runs the kernels themselves")
def test_the_library_answers_without_a_gpu(libraries: dict[str, Path]) -> None:
    """It can be loaded and called; its first question to the driver is what fails."""
    table, hyper = table_of([5]), torch.zeros(1, 1, WIDTH, dtype=torch.float64)
    field, sumsq = torch.zeros(1, 16), torch.zeros(1, dtype=torch.float64)
    for variant in (library.OneRead, library.Dependent):
        with pytest.raises(RuntimeError, match="CUDA error"):
            variant(libraries["90"]).norm_perturb_([field], field, [field], table, hyper, sumsq)
