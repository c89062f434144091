"""Compiler of the Triton kernels for a GPU that need not exist, which prints counts over their PTX as JSON.

It runs in a separate process, because a process either compiles Triton's kernels or interprets them.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastsam_kernels import rules, triton_dual, triton_norm, triton_perturb, triton_reductions, triton_update
from fastsam_kernels.constants import compute_dtype
from fastsam_kernels.rule import MAX_STATE
from fastsam_kernels.triton_chunks import Operand
from fastsam_kernels.triton_common import WARPS
from fastsam_kernels.triton_tables import DTYPES

FIELDS = ("backup", "state0", "state1", "state2", "q", "shift", "mu", "s", "eps")
OPERANDS = ("grads", "weights", "g1", "x", "y")
TUPLES = {  # other arguments
    "plan": ("*i64", "*i64"),
    "hparams": ("*fp64", "i32", "i32"),
    "sums": ("*fp64", "i32", "i32", "*fp64", "*i32"),
    "sumsq": ("*fp64", "i32"),
    "sumsq_v": ("*fp64", "i32"),
    "counters": ("*fp32", "i32", "i32", "*i32"),
}
SLOT_STRIDE = 2  # in `counters`: 1
NUMBERS = ("n_chunks", "segments", "rows")  # any
OTHERS = dict.fromkeys((*NUMBERS, "n", "row_stride"), "i32") | dict.fromkeys(("high", "low", "seed"), "*i64")
OTHERS |= dict.fromkeys(("scale", "largest"), "*fp64") | dict.fromkeys(("grad_scale", "found_inf", "base"), "*fp32")
SHORT = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}
WIDE = r"global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64)"


@dataclass(frozen=True)
class Variant:
    """A kernel with the operands that one call gives it."""

    kernel: Any
    dtype: torch.dtype
    aligned: bool = True
    flat: bool = False  # list operands are fields
    master: bool = False
    absent: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    rule: str = ""  # rule of an update, with all fields of its state

    @property
    def name(self) -> str:
        parts = [
            f"{self.rule}_kernel" if self.rule else self.kernel.__name__.strip("_"),
            SHORT[self.dtype],
            "flat" if self.flat else "scattered",
        ]
        parts += ["master"] * self.master + ["unaligned"] * (not self.aligned) + [f"no-{name}" for name in self.absent]
        return " ".join(parts)

    def type_of(self, name: str) -> str | tuple[Any, ...]:
        if name not in (*FIELDS, *OPERANDS):
            return TUPLES.get(name) or OTHERS[name]
        if self.kernel is triton_reductions._accumulate_kernel:
            return f"*{SHORT[self.dtype]}"
        if name in OPERANDS and not self.flat:
            return Operand("*i64", "i32", "constexpr")
        return Operand(f"*{DTYPES[self.element(name)].value}", "i32", "constexpr")

    def element(self, name: str) -> torch.dtype:
        """Return the dtype of an operand's elements."""
        if name in OPERANDS or (name == "backup" and not self.master):
            return self.dtype
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def source(self) -> ASTSource:
        """Return Triton's source of a call with such operands."""
        constants = {"COMPUTE": DTYPES[compute_dtype(self.dtype)].value, "ALIGNED": self.aligned} | dict(self.options)
        constants |= dict.fromkeys(self.absent)
        if self.rule:
            rule = rules.find(self.rule)
            numbers, element = triton_update.form_of(self.rule)
            constants |= {"NUMBERS": numbers, "ELEMENT": element, "STATE_MASK": (1 << len(rule.state)) - 1}
            constants |= dict.fromkeys(f"state{i}" for i in range(len(rule.state), MAX_STATE))
            constants |= {} if rule.counter else {"counters": None}
        signature: dict[str, str | tuple[Any, ...]] = {}
        constexprs: dict[tuple[int, ...], Any] = {}
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for i, name in enumerate(self.kernel.arg_names):
            if name in constants:
                signature[name], constexprs[(i,)] = "constexpr", constants[name]
                continue
            signature[name] = parts = self.type_of(name)
            for j, part in enumerate((parts,) if isinstance(parts, str) else parts):
                place = (i,) if isinstance(parts, str) else (i, j)
                if part == "constexpr":
                    constexprs[place] = DTYPES[self.element(name)].value
                elif self.aligned and name not in NUMBERS and (name, j) != ("counters", SLOT_STRIDE):
                    attrs[place] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature=signature, constexprs=constexprs, attrs=attrs)


def variants() -> list[Variant]:
    """Return the variants that are tested: every kernel, with the storage types of kernels that move the weights."""
    result = []
    save, update = (("SAVE", True),), (("INIT_STATE", False), ("WRITE_MASTER", False))
    plain = ("g1", "q", "shift", "sumsq_v", "grad_scale", "found_inf")
    f32, total = torch.float32, (("ACCUMULATE", True),)
    for is_aligned in (True, False):
        result += [
            Variant(triton_reductions._accumulate_kernel, f32, is_aligned, flat=True),
            Variant(triton_norm._norm_kernel, f32, is_aligned, absent=("weights",), options=total),
            Variant(triton_norm._norm_kernel, f32, is_aligned, options=total),
            Variant(triton_perturb._perturb_kernel, f32, is_aligned, absent=("seed",), options=save),
            Variant(triton_perturb._restore_kernel, f32, is_aligned),
            Variant(triton_dual._dual_norm_kernel, f32, is_aligned, options=total),
            Variant(triton_dual._dual_perturb_kernel, f32, is_aligned),
            Variant(triton_reductions._inner_kernel, f32, is_aligned, options=total),
            Variant(triton_update._update_norm_kernel, f32, is_aligned, options=total),
        ]
        call = partial(Variant, triton_update._update_kernel, f32, is_aligned, absent=plain, options=update)
        result += [call(rule=r) for r in rules.RULES]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        master = dtype in (torch.float16, torch.bfloat16)
        result += [
            Variant(triton_perturb._perturb_kernel, dtype, flat=True, master=master, absent=("seed",), options=save),
            *[Variant(triton_perturb._perturb_kernel, dtype, flat=True, master=True, options=save)] * master,
            Variant(
                triton_update._update_kernel, dtype, flat=True, master=master, absent=plain, options=update, rule="sgd"
            ),
        ]
    result += [
        Variant(triton_reductions._accumulate_kernel, f32, flat=True, absent=("base", "largest")),
        Variant(triton_update._update_kernel, f32, options=update, rule="sgd"),
    ]
    return result


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers, bytes of stack and local memory per thread, and the instructions of the assembled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", text, re.M)  # padded with NOP at the end
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)} | {
        "instructions": len(instructions)
    }


def count_instructions(variant: Variant, arch: int) -> dict[str, Any]:
    target = GPUTarget("cuda", arch, 32)
    compiled_kernel = triton.compile(
        variant.source(), target=target, options={"num_warps": WARPS, "enable_fp_fusion": False}
    )
    text = compiled_kernel.asm["ptx"]
    counts = {
        "wide_loads": len(re.findall(rf"\bld\.{WIDE}", text)),
        "wide_stores": len(re.findall(rf"\bst\.{WIDE}", text)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", text)),
        "tickets": len(re.findall(r"\batom\.global\.gpu\.acq_rel\.add\.[su]32", text)),
        "fused": len(re.findall(r"\bfma\.", text)),
        "inexact": len(re.findall(r"\b(?:div|sqrt|rcp|rsqrt)\.(?:full|approx)", text)),
        "local": len(re.findall(r"\b(?:ld|st)\.local", text)),
        "bf16_by_hardware": len(re.findall(r"\bcvt\.rn\.bf16", text)),
    }
    return counts | resources(compiled_kernel.asm["cubin"])


if __name__ == "__main__":
    arch = int(sys.argv[1])
    json.dump({variant.name: count_instructions(variant, arch) for variant in variants()}, sys.stdout)
