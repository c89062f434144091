"""Local epochs by row programs, on the CPU and by emulated CUDA kernels (see `emulated.py`), and their comparison."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam.fed.executors.rowprograms.row_pass import RowPass
from fastsam_kernels import native
from fastsam_kernels.hparams import HParam
from fastsam_kernels.rowprograms import program
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.op_cases import same_bits
from tests.helpers.stacked_passes import make_passes

ROWS, SAMPLES, STEPS = 3, 40, 2
# Hyper-parameters that all matter; with these values the gradients are clipped.
NUMBERS = {
    "RHO": 0.05, "PERTURB_EPS": 1e-12, "ETA": 0.01, "LR": 0.1, "DECAY": 0.01, "PROX_MU": 0.02,
    "G2_COEF": 0.9, "G1_COEF": 0.1, "CLIP": 0.5,
}  # fmt: skip


def why_not() -> str | None:
    """Return the reason why emulated row programs cannot be compared with the CPU's bits, or None."""
    info = Path("/proc/cpuinfo")
    has_fma = info.exists() and " fma " in info.read_text()
    return (
        emulated.why_not() or native.why_not("cpu") or (None if has_fma else "products round twice on this processor")
    )


@contextmanager
def emulated_programs(namespace: str = emulated.NAMESPACE) -> Iterator[None]:
    """Use the emulated CUDA kernels for row programs."""
    ops = getattr(torch.ops, namespace)
    emulated_ops = ops.rowwise.default, ops.rowwise_steps_.default, ops.row_program.default
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_ops", lambda: emulated_ops)
        yield


def classifier(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def make_row_pass(widths: Sequence[int], batch: int, activation: type[nn.Module] = nn.ReLU) -> tuple[Any, ...]:
    """Return a compared row program, its rows, and samples. One label is ignored."""
    passes, rows = make_passes(classifier(widths, activation), rows=ROWS)
    x, y = torch.randn(SAMPLES, widths[0]), torch.randint(widths[-1], (SAMPLES,))
    y[3] = -100
    indices = torch.arange(ROWS * batch).view(ROWS, batch) % 3 + 4
    for _ in range(2):
        passes.run(rows, x[indices], y[indices])
    row_pass = passes.replays.row_pass(batch, x, y)
    assert isinstance(row_pass, RowPass)
    return row_pass, rows, x, y


def uneven_epoch(steps: Sequence[int], is_joint: bool) -> list[Tensor]:
    """Return all tensors that epochs of `steps` local steps write, in one call or row by row."""
    row_pass, rows, x, y = make_row_pass((12, 9, 4), 5)
    rows.hparams[..., HParam.LR] = 0.1
    indices = torch.randint(SAMPLES, (ROWS, 5 * max(steps)), generator=torch.Generator().manual_seed(1))
    losses = torch.zeros(ROWS, dtype=torch.float64)
    for part in [slice(0, ROWS)] if is_joint else [slice(i, i + 1) for i in range(ROWS)]:
        count = max(steps[part])
        row_pass.program.steps_(
            [leaf[part] for leaf in rows.leaves], row_pass.constants, x, y, indices[part, : 5 * count].contiguous(), 5,
            rows.z[part], None,
            rows.layout.table, rows.hparams[part], losses[part], steps=torch.tensor(steps) if is_joint else None,
        )  # fmt: skip
    return [rows.z.detach().clone(), losses]


def epoch(widths: Sequence[int], batch: int, activation: type[nn.Module] = nn.ReLU, sam: bool = True) -> list[Tensor]:
    """Return all tensors that two local steps write.

    With `sam` the steps have an adaptive perturbation, both gradients, momentum, q, a shift and clipping. Otherwise
    they are plain SGD.
    """
    row_pass, rows, x, y = make_row_pass(widths, batch, activation)
    draw = torch.Generator().manual_seed(1)
    hparams = torch.zeros_like(rows.hparams)
    for name, value in NUMBERS.items():
        hparams[..., getattr(HParam, name)] = value
    hparams[..., HParam.ADAPTIVE] = float(sam)
    hparams[..., HParam.CLIP] *= float(sam)
    hparams[..., 13] = 0.9  # SGD's momentum
    indices = torch.randint(SAMPLES, (ROWS, STEPS * batch), generator=draw)
    fields = [0.1 * torch.randn(rows.z.shape, generator=draw) for _ in range(3)]
    w, losses, sums = rows.z.clone(), *torch.zeros(2, ROWS, dtype=torch.float64).unbind()
    clip_norms = torch.zeros(ROWS, dtype=torch.float64)
    options: dict[str, Any] = {
        "momentum": fields[0], "q": fields[1], "shift": fields[2], "sumsq": sums, "sumsq_v": clip_norms,
        "adaptive": True, "keeps_first": True,
    }  # fmt: skip
    row_pass.program.steps_(
        rows.leaves, row_pass.constants, x, y, indices, batch, rows.z, w if sam else None, rows.layout.table, hparams,
        losses,
        **(options if sam else {}),
    )  # fmt: skip
    return [rows.z.detach().clone(), w, fields[0], losses, sums, clip_norms]


def same_epochs(emulation: Emulation, namespace: str, widths: Sequence[int], batch: int, **options: Any) -> None:
    """Compare with the bits of the CPU in three orders of the threads, because the effect of a missing barrier depends
    on the order."""
    expected = epoch(widths, batch, **options)
    assert all(t.isfinite().all() for t in expected)
    for order in (0, 1, 7):
        emulation.order(order, order)
        with emulated_programs(namespace):
            results = epoch(widths, batch, **options)
        assert all(map(same_bits, results, expected)), f"threads in order {order}: other bits than the CPU's"


def same_uneven_epochs(emulation: Emulation, namespace: str) -> None:
    """Rows that take other numbers of steps in one call have the bits of the CPU's rows by themselves."""
    expected = uneven_epoch((3, 1, 4), is_joint=False)
    emulation.order(1, 1)
    with emulated_programs(namespace):
        assert all(map(same_bits, uneven_epoch((3, 1, 4), is_joint=True), expected)), "other bits side by side"


def fixed_epochs(emulation: Emulation, namespace: str = emulated.NAMESPACE) -> None:
    """Compare a few epochs that meet every branch.

    Branches are products of tiles and of elements, a transposed matrix, and pieces of more and fewer than 64.
    """
    same_epochs(emulation, namespace, (64, 32, 10), 16)
    same_epochs(emulation, namespace, (7, 5, 3), 5)
    same_uneven_epochs(emulation, namespace)
    same_epochs(emulation, namespace, (64, 10), 7, sam=False)
    assert emulation.count("misaligned") == 0 and emulation.count("out_of_bounds") == 0
