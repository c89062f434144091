"""The CUDA library for every architecture that is shipped, checked by its machine code.

No GPU is needed: nvcc compiles without one, and `cuobjdump` (which Triton's package carries) reads registers, memory
and instructions.
"""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastsam_kernels import build, toolchain
from fastsam_kernels.rules import RULES

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not())),
    pytest.mark.skipif(toolchain.find_nvcc() is None, reason="nvcc is not installed"),
]
ARCHS = toolchain.CUDA_ARCHS
# Registers a thread may use: 64 of them leave room for 1,024 threads per multiprocessor, 40 for 1,536, 32 for all
# 2,048.
BOUNDS = {"perturb": 72} | dict.fromkeys(
    (
        *("stochastic", "dual_norm", "dual_perturb", "inner", "norm", "update_norm", "restore", "accumulate"),
        *(f"update_{rule}" for rule in RULES),
    ),
    64,
)
BOUNDS["update_rmsprop"] = 80  # three fields
# With g1, q and shift and several fields, two blocks keep enough of the six or more streams under way.
WIDE, GENERAL = frozenset(f"update_{rule}" for rule in RULES if rule not in ("sgd", "lion")), 128
# A register or two too many, in kernels that no default takes: four rules in double precision (sm_80, sm_90), the
# general form (sm_100) of RMSprop, and of bSAM, which has no use for it. Four rules spill one on sm_75.
SPILLED = {(f"update_{rule}", "ddLb0E"): 8 for rule in ("sgd", "adam", "lion", "rmsprop")}
SPILLED |= {("update_sgd", "ddLb1E"): 8}
SPILLED |= {("update_rmsprop", "ffLb1E"): 8}
BEFORE_HOPPER = 80  # registers of an update on sm_75 and sm_80: three blocks of four, enough for slower memory
SPILLED_ON_75 = {f"update_{rule}": 8 for rule in ("sgd", "adam", "adagrad", "rmsprop")}
BYTES = {
    "norm": (4, 0),
    "restore": (4, 4),
    "perturb": (8, 8),
    "dual_norm": (12, 0),
    "dual_perturb": (16, 12),
    "inner": (8, 0),
    "accumulate": (4 * 4 + 4 + 16, 16),  # four rows, the base, the limbs; the limbs
} | {f"update_{name}": (8 + 4 * len(rule.state), 4 + 4 * len(rule.state)) for name, rule in RULES.items()}


def cuobjdump() -> str | None:
    spec = importlib.util.find_spec("triton")
    packaged_tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return str(packaged_tool) if packaged_tool and packaged_tool.is_file() else shutil.which("cuobjdump")


needs_cuobjdump = pytest.mark.skipif(cuobjdump() is None, reason="cuobjdump is not installed (Triton's package has it)")


@dataclass
class Kernel:
    """One kernel of one architecture."""

    op: str
    types: str  # template types as mangled: f d 4bf16 3f16
    segments: int  # capacity of its table; 0: it has none
    arch: str
    usage: dict[str, int] = field(default_factory=dict)
    instructions: list[str] = field(default_factory=list, repr=False)

    def count(self, *names: str) -> int:
        """Return the number of instructions that begin with one of `names`."""
        words = (re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in self.instructions)
        return sum(word.startswith(names) for word in words)


def parse(name: str, arch: str) -> Kernel | None:
    table = r"NS0?_\d+\w+?ParamsI(?:NS_)?15SegmentMetadataILi\d+ELi(\d+)E"
    if match := re.search(rf"\dupdate_kernelINS_\d+([a-z]+)4RuleE(\w+?){table}", name):
        return Kernel(f"update_{match[1]}", match[2], int(match[3]), arch)
    match = re.search(rf"\d({'|'.join(BOUNDS)})_kernelI(.+?){table}", name)
    if match is None and (plain := re.search(r"\d(accumulate)_kernelI([fd])E", name)):
        return Kernel(plain[1], plain[2], 0, arch)
    return Kernel(match[1], match[2], int(match[3]), arch) if match else None


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return libfastsam_cuda.so. If pytest has a cache, it keeps the objects and only changed sources are compiled."""
    cache = getattr(request.config, "cache", None)
    work = Path(cache.mkdir("cuda-build")) if cache else tmp_path_factory.mktemp("objects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTSAM_CUDA", "1")
        patch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        return build.build(tmp_path_factory.mktemp("cuda"), work_dir=work).paths["cuda"]


@pytest.fixture(scope="module")
def kernels(library: Path) -> list[Kernel]:
    """Return all kernels of all architectures with their resources and instructions."""
    table: dict[tuple[str, str], Kernel] = {}
    for option in ("-res-usage", "-sass"):
        arch = name = ""
        argv = [str(cuobjdump()), option, str(library)]
        for line in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines():
            if match := re.match(r"arch = sm_(\w+)", line):
                arch = match[1]
            elif match := re.match(r"\s*Function\s*:?\s*([\w$]+)", line):
                name = match[1]
                if (kernel := parse(name, arch)) is not None:
                    table.setdefault((arch, name), kernel)
            elif (arch, name) not in table:
                continue
            elif "REG:" in line:
                table[arch, name].usage = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", line)}
            elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                table[arch, name].instructions.append(match[1])
    return list(table.values())


def select(kernels: list[Kernel], op: str, types: str) -> list[Kernel]:
    selection = [k for k in kernels if k.op == op and re.fullmatch(types, k.types)]
    assert {k.arch for k in selection} == set(ARCHS), f"{op} of {types}: {selection}"
    return selection


def test_the_library_has_code_for_every_architecture(library: Path) -> None:
    data = library.read_bytes()
    assert data[:4] == b"\x7fELF" and len(data) < 16 << 20
    if tool := cuobjdump():
        output = subprocess.run(
            [tool, "-lelf", "-lptx", str(library)], capture_output=True, text=True, check=True
        ).stdout
        assert set(re.findall(r"\.sm_(\d+)\.cubin", output)) == set(ARCHS)
        assert set(re.findall(r"\.sm_(\d+)\.ptx", output)) == {ARCHS[-1]}, "PTX for what is newer than all of these"


@needs_cuobjdump
def test_every_kernel_is_there(kernels: list[Kernel]) -> None:
    types = 6  # float, double, two half-precision types, and these with a float master copy
    per_arch = {
        "norm": 2 * 4,
        "dual_norm": 4,
        "dual_perturb": types,
        "inner": 4,
        "update_norm": types,
        "perturb": 2 * types,
        "restore": types,
        "stochastic": 4,  # the half-precision ones
    } | {f"update_{rule}": 2 * types for rule in RULES}
    expected = {(op, arch): 2 * n for op, n in per_arch.items() for arch in ARCHS}  # two sizes of the table
    expected |= {("accumulate", arch): 2 for arch in ARCHS}  # float and double, without a table
    assert Counter((k.op, k.arch) for k in kernels) == expected


@needs_cuobjdump
def test_no_local_memory_and_few_registers(kernels: list[Kernel]) -> None:
    """A spilled register or an indexed array would be traffic to memory in kernels whose time is that traffic."""
    for kernel in kernels:
        spill_bytes = SPILLED.get((kernel.op, kernel.types), 0)
        if kernel.arch == "75":
            spill_bytes = SPILLED_ON_75.get(kernel.op, 0)
        assert kernel.usage["STACK"] <= spill_bytes and kernel.usage["LOCAL"] == 0, kernel
        assert spill_bytes or kernel.count("LDL", "STL") == 0, kernel
        bound = GENERAL if "Lb1E" in kernel.types and kernel.op in WIDE else BOUNDS[kernel.op]
        bound += 24 if "d" in kernel.types else 0
        bound = max(bound, BEFORE_HOPPER) if kernel.arch in ("75", "80") and kernel.op[7:] in RULES else bound
        assert kernel.usage["REG"] <= bound, (kernel.op, kernel.types, kernel.arch, kernel.usage)
    for kernel in select(kernels, "norm", "fLb0E"):
        bound = 64 if kernel.arch == "75" else 40  # sm_75 has 1,024 threads at most
        assert kernel.usage["REG"] <= bound, "the norm of gradients alone fills a multiprocessor with threads"


@needs_cuobjdump
@pytest.mark.parametrize(
    ("op", "types", "turns"),
    [
        ("norm", "fLb0E", 4),
        ("perturb", "ffLb1E", 2),
        ("restore", "ff", 4),
        ("dual_norm", "f", 2),
        ("dual_perturb", "ff", 1),
        ("inner", "f", 2),
        ("accumulate", "f", 1),
        *((f"update_{name}", "ffLb0E", 2 if len(rule.state) == 1 else 1) for name, rule in RULES.items()),
    ],
)
def test_accesses_of_128_bits(kernels: list[Kernel], op: str, types: str, turns: int) -> None:
    """Wide loads and stores equal the number of operands times the unrolling, all of them to global memory."""
    loads, stores = (num_bytes // 4 * turns for num_bytes in BYTES[op])
    for kernel in select(kernels, op, types):
        assert kernel.count("LDG.E.128", "LDG.E.EF.128") >= loads, kernel
        assert kernel.count("STG.E.128", "STG.E.EF.128") >= stores, kernel
        assert kernel.count("LD.", "ST.") == 0, f"generic accesses: {kernel}"


@needs_cuobjdump
def test_loads_come_before_the_barrier(kernels: list[Kernel]) -> None:
    """The first pack of every operand is on its way before the block waits for its scalars."""
    for kernel in select(kernels, "perturb", "ffLb1E"):
        wide_loads = [i for i, text in enumerate(kernel.instructions) if "LDG.E.128" in text]
        barriers = [i for i, text in enumerate(kernel.instructions) if "BAR.SYNC" in text and i > wide_loads[0]]
        assert sum(i < barriers[0] for i in wide_loads) == len(wide_loads) == 4


# Instructions of the float kernels on each architecture, as nvcc 13.0 makes them: searching the table, making the rule,
# wide and narrow accesses, tail.
INSTRUCTIONS = {
    ("norm", "fLb0E"): (568, 584, 504, 464), ("perturb", "ffLb1E"): (592, 608, 640, 608),
    ("restore", "ff"): (264, 272, 272, 256), ("accumulate", "f"): (1176, 1168, 1168, 1328),
    ("update_sgd", "ffLb0E"): (984, 1008, 1040, 1008), ("update_adam", "ffLb0E"): (1592, 1568, 1688, 1672),
}  # fmt: skip


@needs_cuobjdump
def test_code_does_not_grow(kernels: list[Kernel]) -> None:
    """The length of the code stays within 15 per cent of the recorded length."""
    for (op, types), recorded_counts in INSTRUCTIONS.items():
        for kernel in select(kernels, op, types):
            ratio = len(kernel.instructions) / recorded_counts[ARCHS.index(kernel.arch)]
            assert 1 / 1.15 <= ratio <= 1.15, (kernel, len(kernel.instructions))


@needs_cuobjdump
def test_the_backup_passes_the_cache(kernels: list[Kernel]) -> None:
    """Only the accesses to the backup bypass the cache, so that operands that are needed soon stay in it."""
    unroll_factors = {"perturb": 2, "restore": 4}
    for op, types in INSTRUCTIONS:
        for kernel in select(kernels, op, types):
            assert kernel.count("LDG.E.EF.128", "STG.E.EF.128") == unroll_factors.get(op, 0), kernel


@needs_cuobjdump
def test_no_contraction(kernels: list[Kernel]) -> None:
    """A multiplication and an addition stay two roundings, as on the CPU: restore has none, and perturb none outside
    the division."""
    for kernel in select(kernels, "norm", "fLb0E"):
        assert kernel.count("FFMA", "DFMA") == 0
