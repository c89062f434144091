"""Machine code of the CUDA and the Triton kernels for GPUs that need not be there.

`python -m tests.helpers.sass --record` writes what it finds to tests/helpers/instructions.json, to which
tests/cuda/test_sass.py compares; `python -m tests.helpers.sass triton` prints the Triton kernels' as JSON (a process
either compiles Triton's kernels or interprets them).
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fastsam_kernels import build, toolchain
from tests.helpers.places import ROOT

ARCHS = ("80", "90", "100")
RECORDED = Path(__file__).with_name("instructions.json")
# The float32 kernels of models of few segments: the sources without the other types compile in a fraction of the time.
ONLY_FLOAT = ("kernel_args.h", "switch (problem.weight) {", "switch (Type::f32) {")
ONLY_SMALL = (
    "cuda/common.cuh",
    ": in_parts<large>(problem, lists, chunk, most, reversed, f);",
    ": static_cast<int>(large);",
)
SOURCES = ("norm", "perturb", "accumulate", "update")
# op: source, template types as mangled, elements of a thread in a sweep (width times turns)
CUDA = {
    "norm": ("norm_kernelIfLb0E", 4 * 4),
    "perturb": ("perturb_kernelIffLb1E", 4 * 2),
    "restore": ("restore_kernelIff", 4 * 4),
    "accumulate": ("accumulate_kernelIf", 4),
    "update_sgd": ("update_kernelINS_3sgd4RuleEffLb0E", 4 * 2),
    "update_adam": ("update_kernelINS_4adam4RuleEffLb0E", 4 * 1),
}
TRITON_ELEMENTS = 4096 // 128  # elements of a thread in a full chunk
TRITON_ACCUMULATED = 512 // 128  # elements of a thread in accumulate_


@dataclass
class Code:
    """One kernel for one architecture."""

    op: str
    arch: str
    elements: int  # elements of a thread in one loop iteration
    registers: int = 0
    local: int = 0  # bytes of stack and local memory
    wide_loads: int = 0
    wide_stores: int = 0
    once: int = 0  # loads and stores that the second-level cache evicts first
    spills: int = 0  # instructions that access local memory
    instructions: int = 0
    per_element: float = field(init=False)

    def __post_init__(self) -> None:
        self.per_element = round(self.instructions / self.elements, 2)


def cuobjdump() -> str | None:
    """Return the disassembler: on PATH if it is as new as nvcc, else the one in Triton's package."""
    spec = find_spec("triton")
    carried = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return shutil.which("cuobjdump") or (str(carried) if carried and carried.is_file() else None)


def disassembled(cubin: Path) -> Iterator[tuple[str, list[str], dict[str, int]]]:
    """Per kernel: its mangled name, its instructions without predicates, and REG, STACK, LOCAL."""
    usage: dict[str, dict[str, int]] = {}
    code: dict[str, list[str]] = {}
    for option in ("-res-usage", "-sass"):
        text = subprocess.run([str(cuobjdump()), option, str(cubin)], capture_output=True, text=True, check=True).stdout
        name = ""
        for line in text.splitlines():
            if found := re.match(r"\s*Function\s*:?\s*([\w$]+)", line):
                name = found[1]
            elif "REG:" in line:
                usage[name] = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}
            elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)", line):
                code.setdefault(name, []).append(found[1])
    for name, instructions in code.items():
        yield name, instructions, usage[name]


def code_of(op: str, arch: str, elements: int, instructions: list[str], usage: dict[str, int]) -> Code:
    def count(*names: str) -> int:
        return sum(word.startswith(names) for word in instructions)

    trailing = next((i for i, word in enumerate(reversed(instructions)) if not word.startswith(("NOP", "BRA"))), 0)
    return Code(
        op, arch, elements, usage["REG"], usage["STACK"] + usage["LOCAL"],
        count("LDG.E.128", "LDG.E.EF.128", "LDG.E.ENL2.128"), count("STG.E.128", "STG.E.EF.128", "STG.E.ENL2.128"),
        count("LDG.E.EF.128", "STG.E.EF.128"), count("LDL", "STL"), len(instructions) - trailing,
    )  # fmt: skip


# --- CUDA ---


def _compile(source: Path, own: Sequence[str], arch: str, cubin: Path) -> None:
    """One object of a source for one architecture, unless it was compiled before."""
    if cubin.exists():
        return
    nvcc, cxx = toolchain.find_nvcc(), toolchain.find_cxx()
    assert nvcc is not None
    flags = [flag for flag in build.NVCC_FLAGS if not flag.startswith(("-MD", "-M"))]
    part = cubin.with_suffix(".part")
    argv = [
        nvcc, f"-ccbin={cxx[0]}", *flags, *own, f"-arch=sm_{arch}", "-cubin", str(source),
    ]  # fmt: skip
    subprocess.run([*argv, "-o", str(part)], check=True, capture_output=True, text=True)
    os.replace(part, cubin)


def cuda_code(cache: Path) -> list[Code]:
    """Return the float32 CUDA kernels for all architectures. With `cache` only changed sources are compiled."""
    with toolchain.lock_folder(cache), tempfile.TemporaryDirectory() as folder:
        csrc = Path(folder) / "csrc"
        shutil.copytree(build.csrc(), csrc)
        for name, old, new in (ONLY_FLOAT, ONLY_SMALL):
            text = (csrc / name).read_text()
            assert text.count(old) == 1, f"{name} must hold {old!r} once"
            (csrc / name).write_text(text.replace(old, new))
        headers = [p for p in sorted(csrc.rglob("*")) if p.suffix in (".h", ".cuh") and "cpu" not in p.parts]
        found = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = []
            for source in (csrc / "cuda" / f"{name}.cu" for name in SOURCES):
                texts = b"".join(p.read_bytes() for p in [*headers, source])
                digest = hashlib.sha256(texts + repr(build.NVCC_FLAGS).encode()).hexdigest()[:16]
                for output, own in build.variants_of(source, csrc):
                    for arch in ARCHS:
                        cubin = cache / f"{output}-{arch}-{digest}.cubin"
                        jobs.append((arch, cubin, pool.submit(_compile, source, own, arch, cubin)))
            for arch, cubin, job in jobs:
                job.result()
                found += [(arch, *kernel) for kernel in disassembled(cubin)]
    return [
        code_of(op, arch, elements, instructions, usage)
        for op, (mangled, elements) in CUDA.items()
        for arch, name, instructions, usage in found
        if mangled in name
    ]


# --- Triton ---


def triton_code() -> list[Code]:
    """The float32 Triton kernels on aligned tensors, scattered where they may be, for all architectures."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fastsam_kernels.triton_common import WARPS
    from tests.helpers.ptx import Variant, variants

    wanted = {"norm": "norm_kernel", "perturb": "perturb_kernel", "restore": "restore_kernel",
              "update_sgd": "sgd_kernel", "update_adam": "adam_kernel", "accumulate": "accumulate_kernel"}  # fmt: skip
    chosen: dict[str, Variant] = {}
    for variant in variants():
        for op, kernel in wanted.items():
            name = f"{kernel} fp32 {'flat' if op == 'accumulate' else 'scattered'}"
            if variant.name == name or (variant.name.startswith(f"{name} no-") and variant.aligned):
                chosen.setdefault(op, variant)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for op, variant in chosen.items():
            for arch in ARCHS:
                options = {"num_warps": WARPS, "enable_fp_fusion": False}
                compiled = triton.compile(variant.source(), target=GPUTarget("cuda", int(arch), 32), options=options)
                path = Path(folder) / f"{op}-{arch}.cubin"
                path.write_bytes(compiled.asm["cubin"])
                (_, instructions, usage), *_ = disassembled(path)
                elements = TRITON_ACCUMULATED if op == "accumulate" else TRITON_ELEMENTS
                found.append(code_of(op, arch, elements, instructions, usage))
    return found


def triton_code_elsewhere() -> list[Code]:
    """`triton_code` from a process that compiles."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.sass", "triton"], cwd=ROOT, env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the Triton kernels do not compile: {done.stderr}")
    return [_restored(kernel) for kernel in json.loads(done.stdout)]


def _restored(values: dict) -> Code:
    values.pop("per_element")
    return Code(**values)


def record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        both = {"cuda": cuda_code(Path(folder)), "triton": triton_code_elsewhere()}
    table = {k: {op: {c.arch: c.per_element for c in codes if c.op == op} for op in CUDA} for k, codes in both.items()}
    RECORDED.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["triton"]:
        json.dump([asdict(code) for code in triton_code()], sys.stdout)
    elif sys.argv[1:] == ["--record"]:
        record()
    else:
        sys.exit("expected `triton` or `--record`")
