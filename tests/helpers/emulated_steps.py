"""A whole SAM step of emulated CUDA kernels against the reference, and small inputs that meet what otherwise only large
models meet."""

import itertools
from types import ModuleType

import torch
from torch import Tensor

from fastsam_kernels import reference
from tests.helpers.emulated import Emulation
from tests.helpers.op_cases import Case, Memory, close, same_bits

# With these the inputs of the tests, which are small, meet what otherwise only large models meet: a chunk of several
# sweeps, a call of several launches, and calls that find no free tickets.
SMALL = {
    "chunks.h": [("elements > enough * chunk", "elements > chunk / 2")],
    "cuda/common.cuh": [
        ("small = capacity(Lists, 4096), large = capacity(Lists, kArgumentLimit);", "small = 1, large = 2;")
    ],
    "cuda/tickets.cu": [("kTickets = 1 << 16", "kTickets = 4")],
}


def assert_sound(emulation: Emulation) -> None:
    assert emulation.count("misaligned") == 0, "a pack was accessed where it is not aligned"
    assert emulation.count("out_of_bounds") == 0, "a table or a pack was indexed beyond its end"


def table_of(lengths: list[int]) -> Tensor:
    offsets = itertools.accumulate(((length + 15) // 16 * 16 for length in lengths), initial=0)
    rows = [[offset, length, i % 2, i] for i, (offset, length) in enumerate(zip(offsets, lengths, strict=False))]
    return torch.tensor(rows, dtype=torch.int64)


def case_of(lengths: list[int], rows: int, shift: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    is_scattered = {"params": True, "grads": True, "weights": False, "g1": True}
    return Case(rows, table_of(lengths), 2, dtype, dtype.itemsize < 4, is_scattered, shift, 0, seed=1)


def sam_step(kernels: ModuleType, case: Case) -> None:
    """norm, perturb, restore, update with momentum, against the reference in float64; guard bands around everything."""
    hparams, memory = case.hparams(CLIP=0.0, RHO=0.5), Memory(case, "cpu")
    values = {name: case.values(name) for name in ("params", "grads", "g2", "momentum")}
    params, grads = (
        memory.operand("params", values["params"], is_written=True),
        memory.operand("grads", values["grads"]),
    )
    g2 = memory.operand("grads", values["g2"])
    backup = memory.field("backup", values["params"].to(case.backup_dtype), is_written=True)
    momentum = memory.field("momentum", values["momentum"].to(case.compute), is_written=True)
    sumsq = torch.full((case.rows,), torch.nan, dtype=torch.float64)
    memory.snapshot()

    w = values["params"].double()
    params64, sumsq64, momentum64 = w.clone(), sumsq.clone(), values["momentum"].double()
    reference.norm_(sumsq64, [values["grads"].double()], [w], case.table, hparams)
    reference.perturb_([params64], w, [values["grads"].double()], case.table, hparams, sumsq64, False)
    mask = case.mask()

    kernels.norm_(sumsq, grads, [values["params"]], case.table, hparams)
    close(sumsq, sumsq64, case.compute)
    kernels.perturb_(params, backup, grads, case.table, hparams, sumsq, True)
    close(memory.read(params)[mask], params64[mask])
    kernels.restore_(params, backup, case.table)
    assert same_bits(memory.read(params)[mask], values["params"][mask])
    reference.update_([params64], w, [values["g2"].double()], case.table, hparams, "sgd", [momentum64])
    kernels.update_(params, backup, g2, case.table, hparams, "sgd", [momentum])
    close(memory.read(params)[mask], params64[mask])
    close(memory.read(momentum)[mask], momentum64[mask])
    memory.check()
