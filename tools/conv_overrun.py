"""Which of torch's convolutions write past their memory: forward and backward, in both memory formats, for each
instruction set of oneDNN.

    python tools/conv_overrun.py            convolutions of every kind that a run on the CPU may meet
    python tools/conv_overrun.py --quick    a few of each kind

Each is tried twice. Under `canary.c`, an allocator that sees every write behind a block, results are compared with
float64 besides. Under glibc's own check (`MALLOC_CHECK_=3`, `MALLOC_PERTURB_`) a process dies where the heap is
damaged, and the next one goes on after it; what the rule keeps away from is left out there. The exit status is 1 if the
rule of `fastsam.fed` lets such a convolution through.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fastsam.fed.step.memory_format import overrun_risk

SETS = {"SSE41": "sse4_1", "AVX": "avx", "AVX2": "avx2", "AVX512_CORE": "avx512bw", "AVX512_CORE_BF16": "avx512_bf16"}
DEBUG_LIBRARY = "libc_malloc_debug.so.0"  # of glibc 2.34 and newer; before, MALLOC_CHECK_ needs no library
MALLOC_CHECK = {"MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165", "LD_PRELOAD": DEBUG_LIBRARY}
LAST = torch.channels_last


class Case(NamedTuple):
    """One convolution and its input `[batch, channels, size, size]`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: int
    padding: int
    channels: int
    out: int
    groups: int
    transposed: bool
    batch: int
    size: int
    last: bool

    def kept_away(self) -> bool:
        """Whether no run trains it so."""
        return self.last and bool(overrun_risk(self.module(), torch.device("cpu")))

    def module(self) -> nn.Module:
        made = nn.ConvTranspose2d if self.transposed else nn.Conv2d
        options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        return made(self.channels, self.out, self.kernel, **options)


def cases(quick: bool) -> Iterator[Case]:
    """Those of the scan, in a fixed order."""
    strides = [(1, 1), (2, 2)]
    shapes = [((1, 1), s) for s in ((1, 2), (2, 1), (3, 3))]
    shapes += [((k, k), s) for k in ((1, 3) if quick else (1, 3, 5, 7)) for s in strides]
    shapes += [] if quick else [(k, s) for k in ((1, 3), (3, 1)) for s in strides]
    channels = (1, 3, 4, 7, 8, 9) if quick else range(1, 21)
    inputs = [(16, 8, True)] if quick else [(2, 9, True), (16, 8, True), (16, 8, False)]
    for (kernel, stride), c, (batch, size, last) in itertools.product(shapes, channels, inputs):
        dilations = (1,) if quick or kernel == (1, 1) else (1, 2)
        for dilation, padding in itertools.product(dilations, {0, max(kernel) // 2}):
            if size + 2 * padding < dilation * (max(kernel) - 1) + 1:
                continue
            common = kernel, stride, dilation, padding
            for out in (8,) if quick else (1, 8, 12):
                yield Case(*common, c, out, 1, False, batch, size, last)
                yield Case(*common, out, c, 1, True, batch, size, last)
                if c % 2 == 0 and out % 2 == 0:
                    yield Case(*common, c, out, 2, False, batch, size, last)
            if c > 1:
                yield Case(*common, c, c, c, False, batch, size, last)
                yield Case(*common, c, 2 * c, c, False, batch, size, last)


def passes(case: Case, exact: bool) -> list[torch.Tensor]:
    """Output and gradients of a convolution whose cotangent is its output. exact: in float64, the usual order: without
    oneDNN."""
    torch.manual_seed(0)
    model, x = case.module(), torch.randn(case.batch, case.channels, case.size, case.size)
    if exact:
        model, x = model.double(), x.double()
    elif case.last:
        model, x = model.to(memory_format=LAST), x.to(memory_format=LAST)
    x.requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], y.detach())]


class Canary:
    """The counts of the preloaded allocator."""

    def __init__(self, library: str) -> None:
        loaded = ctypes.CDLL(library)
        self._count, self._size, self._by = (
            ctypes.c_size_t.in_dll(loaded, f"overrun{n}") for n in ("s", "_size", "_by")
        )

    def seen(self) -> str:
        """What was written past the end since the last call; empty for nothing."""
        count, self._count.value = self._count.value, 0
        return f"writes {self._by.value} bytes past a block of {self._size.value}" if count else ""


def child(quick: bool, start: int, canary: str | None) -> None:
    """Tries the cases from `start` on. Prints `at INDEX` before each one, and `INDEX; what` for what is found."""
    counts = Canary(canary) if canary else None
    for index, case in enumerate(cases(quick)):
        if index < start or (not counts and case.kept_away()):
            continue
        print("at", index, flush=True)
        got = passes(case, exact=False)
        wrong = counts and any(
            not torch.allclose(a.double(), b, rtol=1e-3, atol=1e-5 + 1e-3 * float(b.abs().max()))
            for a, b in zip(got, passes(case, exact=True), strict=True)
        )
        del got
        if found := [*filter(None, [counts and counts.seen(), wrong and "wrong numbers"])]:
            print(index, *found, sep="; ", flush=True)


def scan(quick: bool, isa: str, threads: int, canary: str | None) -> Iterator[tuple[int, str]]:
    """Index and what was found, from as many processes as it takes."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "OMP_NUM_THREADS": str(threads)}
    environment |= {"LD_PRELOAD": canary} if canary else MALLOC_CHECK
    start = 0
    while True:
        command = [sys.executable, __file__, "--child", str(start), *(["--quick"] if quick else [])]
        command += ["--canary", canary] if canary else []
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
            assert p.stdout and p.stderr
            for line in p.stdout:
                if line.startswith("at "):
                    start = int(line[3:]) + 1
                else:
                    index, what = line.rstrip().split("; ", 1)
                    yield int(index), what
            errors = p.stderr.read()
        if p.returncode == 0:
            return
        if p.returncode > 0:
            raise RuntimeError(errors)
        yield start - 1, f"ends the process with signal {-p.returncode}: {errors.strip()[-200:]}"


def instruction_sets() -> list[str]:
    """Those of oneDNN that this processor has, by what the kernel says; on other processors the default alone."""
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        return [name for name, flag in SETS.items() if flag in flags] or ["DEFAULT"]
    return ["DEFAULT"]


def compiled_canary(folder: Path) -> str:
    """`canary.c` as a library in `folder`. Raises CalledProcessError where there is no compiler."""
    library = folder / "canary.so"
    source = Path(__file__).with_name("canary.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few hundred convolutions")
    parser.add_argument("--isa", nargs="+", default=instruction_sets(), help="values of ONEDNN_MAX_CPU_ISA")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--canary", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.quick, arguments.child, arguments.canary)
        return 0
    listed = list(cases(arguments.quick))
    allowed = 0
    with tempfile.TemporaryDirectory() as folder:
        for isa, threads, canary in itertools.product(
            arguments.isa, arguments.threads, (compiled_canary(Path(folder)), None)
        ):
            found = dict(scan(arguments.quick, isa, threads, canary))
            through = {i: w for i, w in found.items() if not listed[i].kept_away()}
            allowed += len(through)
            how = "canary" if canary else "MALLOC_CHECK_=3"
            print(
                f"{isa}, {threads} threads, {how}: {len(listed)} convolutions, {len(found)} found, {len(through)} let "
                f"through"
            )
            for index, what in found.items():
                print(f"  {'LET THROUGH ' if index in through else ''}{listed[index]}: {what}")
    return 1 if allowed else 0


if __name__ == "__main__":
    sys.exit(main())
