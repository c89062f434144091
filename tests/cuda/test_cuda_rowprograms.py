"""Row programs as a CUDA kernel, run on the CPU by an emulation: the bits of the CPU's row programs, errors that are
found, and nvcc's report."""

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam_kernels import build, toolchain
from fastsam_kernels.rowprograms.program import steps_
from tests.fed.executors.test_rowprograms import train
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.emulated_rows import (
    ROWS,
    emulated_programs,
    epoch,
    make_row_pass,
    same_epochs,
    uneven_epoch,
    why_not,
    work_of,
)
from tests.helpers.fed_runs import digest
from tests.helpers.op_cases import same_bits

pytestmark = [pytest.mark.gpu_code, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


CASES = {
    "mlp": ((64, 32, 10), 16, {}),
    "softmax regression": ((64, 10), 7, {}),
    "plain": ((64, 32, 10), 16, {"sam": False}),
    "adam": ((17, 12, 5), 7, {"rule": "adam"}),
    "odd": ((17, 33, 9, 5), 17, {}),
    "one": ((3, 2), 1, {}),
    "tanh": ((12, 9, 4), 5, {"activation": nn.Tanh}),
    "sigmoid": ((12, 9, 4), 5, {"activation": nn.Sigmoid}),
    "gelu": ((12, 9, 4), 5, {"activation": nn.GELU}),
    "words": ((20, 4), 5, {"words": 11}),
    "many words": ((17, 9, 4), 5, {"words": 150, "rule": "adam"}),
    "several chunks": ((300, 40, 3), 4, {}),
    "memory of its own": ((300, 230, 5), 2, {}),  # more than a block's shared memory
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("mlp", "odd", "adam", "words") else pytest.mark.slow) for n in CASES]
)
def test_an_epoch_has_the_bits_of_the_cpu(emulation: Emulation, name: str) -> None:
    widths, batch, options = CASES[name]
    same_epochs(emulation, emulated.NAMESPACE, widths, batch, **options)
    assert emulation.count("misaligned") == 0 and emulation.count("out_of_bounds") == 0


@pytest.mark.parametrize("batch", [13, pytest.param(29, marks=pytest.mark.slow)])
def test_lines_whose_order_is_that_of_16_lanes(emulation: Emulation, batch: int) -> None:
    """Sums over 8 to 15 and over 24 or more neighbours (bias gradients, losses) have the bits of AVX-512.

    After two steps other sums agree up to rounding.
    """
    expected = epoch((17, 9, 5), batch, sam=False)
    emulation.order(0, 0)
    with emulated_programs():
        results = epoch((17, 9, 5), batch, sam=False)
    assert all(map(partial(torch.allclose, rtol=2 * batch * 2**-24, atol=2 * batch * 2**-24), results, expected))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("fedavg", {}, marks=pytest.mark.slow),
        ("fedsam", {"momentum": 0.3, "weight_decay": 0.01}),
        pytest.param("fedsam-asam", {"clip_norm": 0.05, "clip_scope": "linear"}, marks=pytest.mark.slow),
        pytest.param("fedgamma", {"clip_norm": 0.05, "weight_decay": 0.01}, marks=pytest.mark.slow),
        pytest.param("fedlesam", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_has_the_bits_of_the_cpu(emulation: Emulation, method: str, options: dict[str, object]) -> None:
    """Clients of unequal sizes, a last partial batch, momentum and clipping: the whole loop with emulated programs."""
    emulation.order(0, 0)
    expected, old_count = digest(train(method, slots=3, **options)), emulation.count("launches")
    with emulated_programs():
        assert digest(train(method, slots=3, **options)) == expected
    assert emulation.count("launches") > old_count


@pytest.mark.parametrize("samples", [(13, 4, 20), (0, 12, 10)], ids=str)
def test_rows_of_unequal_samples_are_one_launch(emulation: Emulation, samples: tuple[int, ...]) -> None:
    """The bits of the CPU's rows, together and by themselves."""
    emulation.order(0, 0)
    expected, counts = uneven_epoch(samples, is_joint=False), [emulation.count("launches")]
    assert all(map(same_bits, uneven_epoch(samples, is_joint=True), expected))
    with emulated_programs():
        for is_joint in (True, False):
            assert all(map(same_bits, uneven_epoch(samples, is_joint), expected))
            counts.append(emulation.count("launches"))
    assert expected[1].count_nonzero() == expected[3].count_nonzero() == sum(map(bool, samples))
    assert (counts[2] - counts[1]) - (counts[1] - counts[0]) == ROWS - 1


@pytest.mark.parametrize("slots", [pytest.param(3, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("method", ["fedsam", pytest.param("fedgamma", marks=pytest.mark.slow)])
def test_unlike_clients_train_in_one_launch(
    emulation: Emulation, monkeypatch: MonkeyPatch, method: str, slots: int
) -> None:
    """Clients of other sizes, with whole batches and partial ones, in one launch with the CPU's bits."""
    emulation.order(0, 0)
    options = {"momentum": 0.3, "clip_norm": 0.05}
    expected, sizes, train_rows = digest(train(method, slots=slots, **options)), list[int](), RowSteps._train
    monkeypatch.setattr(RowSteps, "_train", lambda *args: (sizes.append(len(args[1])), train_rows(*args)))
    with emulated_programs():
        assert digest(train(method, slots=slots, **options)) == expected
    assert max(sizes) > 1


def test_an_epoch_is_one_launch_and_what_is_not_there_is_nan(emulation: Emulation) -> None:
    """A kernel cannot raise, so a wrong label, sample or index of a table makes the loss of its row NaN, and no other
    loss. The row's failure has the label or index."""
    emulation.order(0, 0)
    with emulated_programs():
        row_pass, rows, x, y = make_row_pass((12, 9, 4), 5, words=8)
        for error, failure in (
            ("none", [0, 0, 3]), ("label", [1, 4, 0]), ("place", [2, 40, 1]), ("word", [3, 8, 0]), ("word", [3, -1, 0])
        ):  # fmt: skip
            labels, samples, losses = y.clone(), x.clone(), torch.zeros(ROWS, dtype=torch.float64)
            indices = (torch.arange(ROWS * 20).view(ROWS, 20) % 10 + torch.arange(ROWS).view(ROWS, 1) * 10 + 5).view(-1)
            if error == "label":
                labels[17] = 4
            if error == "place":
                indices[27] = 40
            if error == "word":
                samples[17, 3] = failure[1]
            old_count, hparams = emulation.count("launches"), torch.zeros_like(rows.hparams)
            failures = torch.full((ROWS, 3), -1)
            steps_(
                [row_pass.program], 5, rows.leaves, row_pass.constants, samples, labels, indices, work_of(ROWS, 20, 4),
                rows.z, None, rows.layout.table, hparams, losses, failures,
            )  # fmt: skip
            assert emulation.count("launches") == old_count + 1
            assert losses.isnan().tolist() == [False, error != "none", False]
            assert failures.tolist() == [[0, 0, 3], failure, [0, 0, 3]]


def test_weights_outside_of_params_are_refused(emulation: Emulation) -> None:
    with emulated_programs():
        row_pass, rows, x, y = make_row_pass((12, 9, 4), 5)
        losses, indices = torch.zeros(ROWS, dtype=torch.float64), torch.arange(5).repeat(ROWS)
        leaves = [leaf.detach().clone() for leaf in rows.leaves]
        operands = (row_pass.constants, x, y, indices, work_of(ROWS, 5, 1), rows.z, None, rows.layout.table)
        for rule, message in (("sgd", "weights must be views of params"), ("lion", "rules sgd and adam")):
            state = [torch.zeros_like(rows.z)] if rule == "lion" else []
            with pytest.raises(RuntimeError, match=message):
                steps_(
                    [row_pass.program], 5, leaves if rule == "sgd" else rows.leaves, *operands, rows.hparams, losses,
                    torch.zeros(ROWS, 3, dtype=torch.int64), rule=rule, state=state,
                )  # fmt: skip


# --- errors put into the kernel ---

KERNEL, LINES = "cuda/rowprograms.cu", "cuda/row_ops.cuh"
ERRORS = {
    "none": {},
    "barrier of an instruction": {
        KERNEL: [("      elements(op, at);\n    }\n    __syncthreads();", "      elements(op, at);\n    }")]
    },
    "barrier of a transposed matrix": {
        LINES: [("    }\n    __syncthreads();\n  }\n  const float* b =", "    }\n  }\n  const float* b =")]
    },
    "stride": {
        LINES: [
            (
                "step * op.b.stride[0] + column * op.b.stride[1]",
                "step * op.b.stride[1] + column * op.b.stride[0]",
            )
        ]
    },
    "last rows of a product": {LINES: [("if (top + r >= m) break;", "if (top + r + 1 >= m) break;")]},
    "bias": {LINES: [("column * op.c.stride[1]] + sum[r]", "column * op.c.stride[0]] + sum[r]")]},
    "rounding of a product": {LINES: [("fmaf(left[row[r]], factor, sum[r])", "left[row[r]] * factor + sum[r]")]},
    "order of a norm": {KERNEL: [("(s[lane] + s[lane + 16]) + (s[lane + 32]",
        "(s[lane] + s[lane + 32]) + (s[lane + 16]")]},
    "rest of a norm": {KERNEL: [("for (int i = full; i < count; ++i)", "for (int i = full + 1; i < count; ++i)")]},
    "barrier of a norm": {KERNEL: [("    lanes[threadIdx.x] = sum;\n    __syncthreads();",
        "    lanes[threadIdx.x] = sum;")]},
    "padding": {LINES: [("wrong || index == padding", "wrong")]},
    "entry of a gradient": {LINES: [("entry * op.out.stride[2]", "entry * op.a.stride[2]")]},
    "samples of a batch": {KERNEL: [("sample * p.words + i % p.words]", "sample * p.words]")]},
    "row": {KERNEL: [("const RowWork work = p.work[r.item]", "const RowWork work = p.work[0]")]},
    "steps of its own": {KERNEL: [("k < work.steps; ++k", "k < p.work[0].steps; ++k")]},
    "program of a batch": {KERNEL: [("r.form == number) return;", "r.form >= 0) return;")]},
    "row of a delta": {KERNEL: [("r.item * p.deltas.stride", "r.row * p.deltas.stride")]},
    "count of a rule": {KERNEL: [("counts[p.segment[s].slot] + 1.0 : 0.0", "counts[p.segment[s].slot] : 0.0")]},
    "field of a rule": {KERNEL: [("state[k][i] = values[k]", "state[0][i] = values[k]")]},
    "what is written back": {KERNEL: [("i < p.width - kShared; i += kThreads) backup[i] = z[i];",
        "i < (p.width - kShared) / 2; i += kThreads) backup[i] = z[i];")]},
}  # fmt: skip
CHEAP = ("none", "barrier of an instruction", "order of a norm")  # the others: `make test-slow`
SCRIPT = """
import sys
import torch
from pathlib import Path
from tests.helpers.emulated import Emulation
from tests.helpers.emulated_rows import fixed_epochs
torch.set_num_threads(1)
fixed_epochs(Emulation(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("error", [pytest.param(e, marks=() if e in CHEAP else pytest.mark.slow) for e in ERRORS])
def test_a_seeded_error_is_found(folder: Path, error: str) -> None:
    emulated.compile_library(folder / "as-it-is")
    path = folder / re.sub(r"\W", "-", f"rows {error}")
    library = emulated.compile_library(path, ERRORS[error], ready=folder / "as-it-is")
    emulated.assert_found(error, SCRIPT, library)


# --- what nvcc makes of it ---


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", toolchain.CUDA_ARCHS)
def test_registers_and_shared_memory(arch: str, tmp_path: Path) -> None:
    """Two blocks of 128 registers fit a multiprocessor, nothing is in local memory, and shared memory is as
    launched."""
    source = build.csrc() / "cuda" / "rowprograms.cu"
    argv = [
        str(toolchain.find_nvcc()), *build.NVCC_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v",
        "-c",
        str(source), "-o", str(tmp_path / "rows.o"),
    ]  # fmt: skip
    report = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
    stacks = re.findall(r"(\d+) bytes stack frame, \d+ bytes spill stores", report)
    assert set(map(int, stacks)) == {0}, report
    registers = re.findall(r"Used (\d+) registers", report)
    assert len(registers) == 2 and max(map(int, registers)) <= 128 and "smem" not in report, (
        report
    )  # a kernel for each rule
