"""Errors put into a copy of the CUDA kernels, one at a time, must turn the emulated steps red (see `emulated.py`).

`tests/ops/test_index.py` has the errors of the index.
"""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fastsam_kernels import reference
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.emulated_steps import assert_sound, case_of, sam_step
from tests.helpers.op_cases import Case, Memory, close

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not())),
]

ERRORS = {
    "none": {},
    "tail": {"cuda/elementwise.cuh": [("if (i < tile.count) {", "if (i <= tile.count) {")]},
    "whole vectors": {"cuda/elementwise.cuh": [("tile.count - tile.count % width", "tile.count + tile.count % width")]},
    "row": {"cuda/common.cuh": [("tile.row * table.row_stride", "table.row_stride")]},
    "alignment": {"cuda/common.cuh": [("% (Width * sizeof(T)) == 0", "% (Width * sizeof(T)) < 16")]},
    "barrier": {"cuda/elementwise.cuh": [("    __syncthreads();\n", "")]},
    "rule of a tile": {"cuda/elementwise.cuh": [("functors[tile.warp]", "functors[0]")]},
    "barrier of a warp": {"cuda/elementwise.cuh": [("= scalar;\n      __syncwarp();\n", "= scalar;\n")]},
    "warp": {"cuda/reduce.cuh": [("distance = kWarp / 2;", "distance = kWarp / 4;")]},
    "ticket": {"cuda/reduce.cuh": [("atomicInc(ticket, blocks - 1)", "atomicInc(ticket, blocks)")]},
    "partial sums": {"cuda/reduce.cuh": [("i < sums.chunks;", "i < sums.chunks - 1;")]},
    "dual's norm": {
        "cuda/dual.cu": [
            ("at<const W>(p.table, 0, tile), at<const C>(p.mu,", "at<const W>(p.table, 0, tile), at<const C>(p.s,")
        ]
    },
    "dual's step": {"cuda/dual.cu": [("mu.write(x.mu, i);", "mu.write(x.mu, i + N);")]},
    "tail of sums": {"cuda/reduce.cuh": [("if (i < count) {", "if (i + 1 < count) {")]},
    "partial inner products": {
        "cuda/reduce.cuh": [
            ("row[N * (sums.chunks_before + tile.chunk) + k]", "row[sums.chunks_before + tile.chunk + k]")
        ]
    },
    "inner products": {"cuda/inner.cu": [("sum.x[1] += b * b;", "sum.x[1] += a * b;")]},
    "acquired sums": {
        "cuda/reduce.cuh": [
            ("last = atomicInc(ticket, blocks - 1) == blocks - 1;", "last = atomicInc(ticket, blocks - 1) == 0;")
        ]
    },
    "last row of a sum": {
        "cuda/accumulate.cu": [("if (first + u >= args.rows) break;", "if (first + u + 1 >= args.rows) break;")]
    },
    "end of a sum": {
        "cuda/accumulate.cu": [
            ("remaining < each ? static_cast<int>(remaining)", "remaining < each ? static_cast<int>(remaining) - 1")
        ]
    },
    "largest of a sum": {"cuda/accumulate.cu": [("i < warps;", "i < warps - kWarps;")]},
}
CHEAP = ("none", "dual's step", "last row of a sum")  # the others: `make test-slow`
SCRIPT = """
import sys
import torch
from tests.cuda import test_cuda_seeded
from tests.helpers.emulated import Emulation
from pathlib import Path
torch.set_num_threads(1)
test_cuda_seeded.fixed_steps(Emulation(Path(sys.argv[1])))
"""


def fixed_steps(emulation: Emulation) -> None:
    """Take steps whose layouts reach every branch of the indexing; the last has a small segment for each warp."""
    for shift, rows, order in ((0, 1, 0), (0, 2, 1), (1, 2, 1)):
        emulation.order(1 - order, order)
        for lengths in ([33, 0, 4096, 5, 4097], [8193, 1], [2047], [33, 128, 0, 5, 1000] * 5):
            case = case_of(lengths, rows, shift)
            sam_step(emulation.backend.load(), case)
            sums_per_row(emulation.backend.load(), case)
            dual_step(emulation.backend.load(), case)
            check_row_sums(emulation.backend.load(), case)
    assert_sound(emulation)


def sums_per_row(kernels: ModuleType, case: Case) -> None:
    """Compare all ops that add up, twice each into the same memory.

    The second call finds the tickets of the first call.
    """
    hparams, memory = case.hparams(ADAPTIVE=0.0), Memory(case, "cpu")
    values = {name: case.values(name) for name in ("grads", "weights", "mu", "s", "params")}
    grads, weights, params = (memory.operand(name, values[name]) for name in ("grads", "weights", "params"))
    fields = [memory.field(name, values[name]) for name in ("mu", "s")]
    g, w, *fields64, params64 = ([values[name].double()] for name in ("grads", "weights", "mu", "s", "params"))
    sumsq64, pairs64 = torch.zeros(3, case.rows, dtype=torch.float64), torch.zeros(case.rows, 2, dtype=torch.float64)
    reference.norm_(sumsq64[0], g, [], case.table, hparams)
    reference.dual_norm_(sumsq64[1], g, *(field[0] for field in fields64), case.table, hparams)
    reference.update_norm_(sumsq64[2], params64, None, g, case.table, hparams)
    reference.inner_(pairs64, g, w, case.table)
    sumsq, pairs = torch.empty_like(sumsq64), torch.empty_like(pairs64)
    for _ in range(2):
        sumsq.fill_(torch.nan), pairs.fill_(torch.nan)
        kernels.norm_(sumsq[0], grads, [], case.table, hparams)
        kernels.dual_norm_(sumsq[1], grads, *fields, case.table, hparams)
        kernels.update_norm_(sumsq[2], params, None, grads, case.table, hparams)
        kernels.inner_(pairs, grads, weights, case.table)
        close(sumsq, sumsq64, case.compute)
        close(pairs, pairs64, torch.float64)


def dual_step(kernels: ModuleType, case: Case) -> None:
    """dual_perturb_ with all it writes."""
    hparams, sumsq, memory = case.hparams(), case.sums(), Memory(case, "cpu")
    values = {name: case.values(name) for name in ("params", "backup", "mu", "grads", "s", "eps")}
    params = memory.operand("params", values["params"], is_written=True)
    grads = memory.operand("grads", values["grads"])
    mu, eps = (memory.field(name, values[name], is_written=True) for name in ("mu", "eps"))
    backup, s = (memory.field(name, values[name]) for name in ("backup", "s"))
    memory.snapshot()
    params64, backup64, mu64, grads64, s64, eps64 = (x.double() for x in values.values())
    reference.dual_perturb_([params64], backup64, mu64, [grads64], s64, case.table, hparams, sumsq, eps64)
    kernels.dual_perturb_(params, backup, mu, grads, s, case.table, hparams, sumsq, eps)
    memory.check()
    mask = case.mask()
    for result, expected in ((params, params64), (mu, mu64), (eps, eps64)):
        close(memory.read(result)[mask], expected[mask])


def check_row_sums(kernels: ModuleType, case: Case) -> None:
    """accumulate_ of one row more than are loaded at once, twice into the same memory."""
    rows = torch.randn(6, case.stride, generator=case.generator("x"))
    rows[:, -1] = torch.arange(1, 7)  # the largest are at the end
    assert all(map(torch.equal, sum_rows(kernels, rows), sum_rows(reference, rows)))


def sum_rows(kernels: ModuleType, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    high, low = torch.zeros(2, rows.shape[1], dtype=torch.int64).unbind()
    largest = torch.empty(5, dtype=torch.float64)
    for _ in range(2):
        largest.fill_(torch.nan)
        kernels.accumulate_(high, low, rows[:5] * 8, 0.3, base=rows[5], largest_=largest)
        assert largest.isfinite().all()
    return high, low, largest


@pytest.mark.parametrize("error", [pytest.param(e, marks=() if e in CHEAP else pytest.mark.slow) for e in ERRORS])
def test_a_seeded_error_is_found(folder: Path, error: str) -> None:
    """An index off by one, a missing barrier, a wrong sum: put into a copy of the sources, each must turn the steps
    red."""
    emulated.compile_library(folder / "as-it-is")
    changes = ERRORS[error]
    if any(not name.endswith(".cu") for name in changes):
        changes = emulated.ONLY_FLOAT | changes
    library = emulated.compile_library(folder / re.sub(r"\W", "-", error), changes, ready=folder / "as-it-is")
    emulated.assert_found(error, SCRIPT, library)
