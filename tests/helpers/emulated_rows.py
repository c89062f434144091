"""Local epochs by row programs, on the CPU and by emulated CUDA kernels (see `emulated.py`), and their comparison."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam.fed.executors.rowprograms import RowPass
from fastsam_kernels import native
from fastsam_kernels.hparams import HParam
from fastsam_kernels.rowprograms import program
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.op_cases import same_bits
from tests.helpers.stacked_passes import make_passes, row_pass_of

ROWS, SAMPLES, STEPS = 3, 40, 2
FIRST_RULE = 13  # first hyperparameter of a rule
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


def classifier(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, words: int = 0) -> nn.Module:
    """Return an MLP. With `words` it reads the mean of their entries in a table, whose word 1 is padding."""
    torch.manual_seed(0)
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*([Words(words, widths[0], padding_idx=1)] if words else []), *layers[:-1])


class Words(nn.Embedding):
    """The mean of the entries of a sample's words."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def make_row_pass(
    widths: Sequence[int], batch: int, activation: type[nn.Module] = nn.ReLU, words: int = 0
) -> tuple[Any, ...]:
    """Return a compared row program, its rows, and samples, with `words` of seven words. One label is ignored."""
    passes, rows = make_passes(classifier(widths, activation, words), rows=ROWS)
    x = torch.randint(words, (SAMPLES, 7)) if words else torch.randn(SAMPLES, widths[0])
    y = torch.randint(widths[-1], (SAMPLES,))
    y[3] = -100
    return recorded_pass(passes, rows, x, y, batch), rows, x, y


def uneven_epoch(samples: Sequence[int], is_joint: bool, epochs: int = 2) -> list[Tensor]:
    """Return all tensors that rows with other numbers of samples write, in one call or row by row.

    They are the weights, the losses, and what each row is away from its start, with its squared norm. Batches have 5
    samples; the last of an epoch has the rest.
    """
    passes, rows = make_passes(classifier((12, 9, 4)), rows=ROWS)
    x, y = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(3)), torch.arange(SAMPLES) % 4
    sizes = sorted({min(5, n) for n in samples if n} | {n % 5 for n in samples if n % 5})
    row_passes = [recorded_pass(passes, rows, x, y, size) for size in sizes]
    rows.hparams[..., HParam.LR], rows.hparams[..., HParam.G2_COEF] = 0.1, 1.0
    losses, failures = torch.zeros(ROWS, dtype=torch.float64), torch.full((ROWS, 3), -1)
    start, deltas = rows.z.clone(), torch.zeros_like(rows.z)
    squares = torch.zeros(ROWS, dtype=torch.float64)
    indices = torch.randint(SAMPLES, (epochs * sum(samples),), generator=torch.Generator().manual_seed(1))
    begins = [epochs * sum(samples[:i]) for i in range(ROWS)]
    work = torch.tensor([(i, begins[i], n, epochs * -(-n // 5)) for i, n in enumerate(samples)]).flip(0)
    for part in [slice(0, ROWS)] if is_joint else [slice(i, i + 1) for i in range(ROWS)]:
        program.steps_(
            [row_pass.program for row_pass in row_passes], 5, rows.leaves,
            [t for row_pass in row_passes for t in row_pass.constants], x, y, indices, work[part], rows.z, None,
            rows.layout.table, rows.hparams, losses, failures[part], results=(start, deltas[part], squares[part]),
        )  # fmt: skip
    return [rows.z.detach().clone(), losses, deltas, squares, failures]


def recorded_pass(passes: Any, rows: Any, x: Tensor, y: Tensor, batch: int) -> RowPass:
    """Return the compared row program of a size of batch."""
    indices = torch.arange(ROWS * batch).view(ROWS, batch) % 3 + 4
    for _ in range(2):
        passes.run(rows, x[indices], y[indices])
    row_pass = row_pass_of(passes, batch, x, y)
    assert row_pass is not None
    return row_pass


def work_of(rows: int, samples: int, steps: int) -> Tensor:
    """Return the work of rows with the same number of samples, `[rows * samples]` in all."""
    return torch.tensor([(i, i * samples, samples, steps) for i in range(rows)])


def epoch(
    widths: Sequence[int],
    batch: int,
    activation: type[nn.Module] = nn.ReLU,
    sam: bool = True,
    rule: str = "sgd",
    words: int = 0,
) -> list[Tensor]:
    """Return all tensors that two local steps write.

    With `sam` the steps have an adaptive perturbation, both gradients, q, a shift, clipping, and momentum or Adam.
    Otherwise they are plain SGD.
    """
    row_pass, rows, x, y = make_row_pass(widths, batch, activation, words)
    draw = torch.Generator().manual_seed(1)
    hparams = torch.zeros_like(rows.hparams)
    for name, value in NUMBERS.items():
        hparams[..., getattr(HParam, name)] = value
    hparams[..., HParam.ADAPTIVE] = float(sam)
    hparams[..., HParam.CLIP] *= float(sam)
    hparams[..., FIRST_RULE] = 0.9  # momentum, or beta1
    if rule == "adam":
        hparams[..., FIRST_RULE + 1], hparams[..., FIRST_RULE + 2], hparams[..., HParam.DECOUPLED] = 0.99, 1e-6, 1.0
    indices = torch.randint(SAMPLES, (ROWS * STEPS * batch,), generator=draw)
    fields = [0.1 * torch.randn(rows.z.shape, generator=draw) for _ in range(4)]
    state = [fields[0]] if rule == "sgd" else [fields[0], fields[3].abs_()]
    counts = None if rule == "sgd" else torch.ones(ROWS, len(rows.layout.table))
    w, losses, sums = rows.z.clone(), *torch.zeros(2, ROWS, dtype=torch.float64).unbind()
    clip_norms, failures = torch.zeros(ROWS, dtype=torch.float64), torch.full((ROWS, 3), -1)
    options: dict[str, Any] = {
        "rule": rule, "state": state, "counts": counts, "q": fields[1], "shift": fields[2], "sumsq": sums,
        "sumsq_v": clip_norms, "adaptive": True, "keeps_first": True,
    }  # fmt: skip
    program.steps_(
        [row_pass.program], batch, rows.leaves, row_pass.constants, x, y, indices,
        work_of(ROWS, STEPS * batch, STEPS), rows.z, w if sam else None, rows.layout.table, hparams, losses, failures,
        **(options if sam else {}),
    )  # fmt: skip
    written = [rows.z.detach().clone(), w, *state, losses, sums, clip_norms, failures]
    return written if counts is None else [*written, counts]


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
    """Rows with other numbers of samples in one call have the bits of the CPU's rows by themselves."""
    expected = uneven_epoch((13, 4, 20), is_joint=False)
    emulation.order(1, 1)
    with emulated_programs(namespace):
        assert all(map(same_bits, uneven_epoch((13, 4, 20), is_joint=True), expected)), "other bits side by side"


def fixed_epochs(emulation: Emulation, namespace: str = emulated.NAMESPACE) -> None:
    """Compare a few epochs that meet every branch.

    Branches are products of tiles and of elements, a transposed matrix, and pieces of more and fewer than 64.
    """
    same_epochs(emulation, namespace, (64, 32, 10), 16)
    same_epochs(emulation, namespace, (7, 5, 3), 5)
    same_epochs(emulation, namespace, (7, 5, 3), 5, rule="adam")
    same_epochs(emulation, namespace, (5, 3), 4, words=9)
    same_uneven_epochs(emulation, namespace)
    same_epochs(emulation, namespace, (64, 10), 7, sam=False)
    assert emulation.count("misaligned") == 0 and emulation.count("out_of_bounds") == 0
