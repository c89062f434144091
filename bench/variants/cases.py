"""What is measured, and what was predicted of it before any GPU had run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.kernel_cases import KernelCase, KernelSize, Op, Operands
from bench.problem import SIZES
from bench.variants import report
from bench.variants.library import Dependent, OneRead, Variant

LAUNCH = 2e-6  # s that a kernel of a replayed graph takes besides its bytes: start, ramp, end
PULL = 70e9  # bytes/s through one multiprocessor: 64 KB under way, 0.9 us each
CACHED = 2.5  # times as fast as memory is the second-level cache
SHARED, THREADS, MOST_BLOCKS = 227 << 10, 2048, 32  # of a multiprocessor: bytes of shared memory, threads, blocks


def _norm_perturb(kernels: Any, o: Operands) -> None:
    if isinstance(kernels, Variant):
        kernels.norm_perturb_(o["z"], o["origin"], o["grads"], o["table"], o["hyper"], o["sumsq"])
        return
    kernels.norm_(o["sumsq"], o["grads"], [], o["table"], o["hyper"])
    kernels.perturb_(o["z"], o["origin"], o["grads"], o["table"], o["hyper"], o["sumsq"], False)


NORM_PERTURB = Op("norm_perturb", "norm_perturb_", ("origin", "grads"), ("z",), _norm_perturb)


@dataclass(frozen=True)
class Device:
    """What a prediction is made of."""

    bandwidth: float  # bytes/s of a large copy, read plus written
    cache_bytes: int
    multiprocessors: int


@dataclass(frozen=True)
class VariantCase:
    """A variant beside what the library does today."""

    variant: type[Variant]
    kernels: KernelCase
    predict: Callable[[KernelSize, Device], float]  # the variant's time over today's

    @property
    def group(self) -> str:
        """What is decided on together."""
        return self.variant.NAME.replace("_", " ")

    @property
    def name(self) -> str:
        return f"{self.group}, {self.kernels.size.title}"


def one_read_ratio(size: KernelSize, device: Device) -> float:
    """12 bytes of 16 and one launch of two, unless the few multiprocessors that have a row are the bound."""
    n, row = size.parameters, size.parameters // size.rows
    threads = min(1024, 256 * -(-row // 4096 + len(size.shapes)))
    resident = max(min(SHARED // (4 * row), THREADS // threads, MOST_BLOCKS), 1)
    waves = -(-size.rows // (device.multiprocessors * resident))
    per_multiprocessor = min(resident, -(-size.rows // device.multiprocessors)) * 12 * row
    variant = LAUNCH + max(12 * n / device.bandwidth, waves * per_multiprocessor / PULL)
    return variant / _today(size, device)


def dependent_ratio(size: KernelSize, device: Device) -> float:
    """The same bytes, and of the two launches half of one: blocks are placed early, but what they wait for is the
    norm's end."""
    today = _today(size, device)
    return (today - LAUNCH / 2) / today


def _today(size: KernelSize, device: Device) -> float:
    """Seconds: two launches, 12 bytes from memory, and the gradients' second read, the first `reused` of them from the
    cache.

    The perturbation reads them from their end, where the norm stopped. Beside each of them it writes a weight into the
    cache, and reads one that is the first to leave it: half of the cache is gradients that are still wanted.
    """
    n = size.parameters
    reused = min(4 * n, device.cache_bytes / 2)
    return 2 * LAUNCH + (16 * n - reused) / device.bandwidth + reused / (device.bandwidth * CACHED)


def _size(rows: int, title: str, shapes: tuple[tuple[int, ...], ...]) -> KernelSize:
    return KernelSize(f"rows{rows}-{title}", f"{rows} row{'s' * (rows > 1)} of {title}", shapes, rows=rows)


CNN = SIZES["small_cnn"].shapes
MLP = ((32, 64), (32,), (10, 32), (10,))  # 2,410
WIDE_MLP = ((128, 64), (128,), (10, 128), (10,))  # 9,610
ROWS = [_size(n, "50 k", CNN) for n in (report.DECISIVE_ROWS, 400, 32, 8, 1)]  # what decides comes first
SMALL_ROWS = [_size(100, "2.4 k", MLP), _size(100, "10 k", WIDE_MLP)]
MODELS = [
    _size(1, title, shapes)
    for title, shapes in (("50 k", CNN), ("2.4 k", MLP), ("ResNet-18", SIZES["resnet18"].shapes))
]
CASES = (
    *(VariantCase(OneRead, KernelCase(NORM_PERTURB, size, "scattered"), one_read_ratio) for size in ROWS + SMALL_ROWS),
    *(VariantCase(Dependent, KernelCase(NORM_PERTURB, size, "scattered"), dependent_ratio) for size in MODELS),
)
