"""The compiled backend: its schemas, instruction sets, threads, streamed stores, and torch.compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastsam_kernels import native
from tests.helpers.native_step import Step, calls
from tests.helpers.places import ROOT

pytestmark = pytest.mark.skipif(
    native.why_not("cpu") is not None, reason=f"no compiled kernels: {native.why_not('cpu')}"
)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", native._OPS)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """Schema, autograd registration, fake and AOT dispatch of every op."""
    step = Step(dtype=dtype, shapes=[(33,), (5, 7), ()])
    op, args = calls(step)[name]
    torch.library.opcheck(op, args)


def test_every_instruction_set_gives_the_same_bits() -> None:
    code = "from tests.helpers.native_step import Step; s = Step(3); print(s.run(), s.run_dual())"
    step = Step(3)
    digests = {"here": f"{step.run()} {step.run_dual()}"}
    processor = Path("/proc/cpuinfo").read_text()
    # avx2 is the default without AVX-512
    for name in ("baseline", "avx2") if "avx512bw" in processor else ("baseline",):
        env = os.environ | {"FASTSAM_ISA": name}
        command = [sys.executable, "-c", code]
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        digests[name] = process.stdout.strip()
    assert len(set(digests.values())) == 1, digests


@pytest.mark.slow
def test_threads_and_streamed_stores_change_no_bit() -> None:
    """A large call streams its stores and is spread over threads; the same numbers in pieces take neither path."""
    threads = torch.get_num_threads()
    n = 12_000_000  # three float32 buffers of this length are beyond the last-level cache of most processors
    digests = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            step = Step(5, shapes=[(n,), (17,)])
            digests.append((step.run(), step.run_dual()))
    finally:
        torch.set_num_threads(threads)
    assert digests[0] == digests[1]

    joint_step, pieces = Step(5, shapes=[(n,), (17,)]), Step(5, shapes=[(n,), (17,)])
    joint_step.run()
    w = joint_step
    native.dual_perturb_(w.params, w.backup, w.mu, w.g1, w.m, w.table, w.h, w.sumsq, w.v)
    native.norm_(pieces.sumsq, pieces.g1, [], pieces.table, pieces.h)
    length_of_piece = 8192 * 100 + 3  # pieces that start off every alignment
    for start in range(0, n, length_of_piece):
        length = min(length_of_piece, n - start)
        table = torch.tensor([[start, length, 0, 0]])
        params, g1, g2 = (operand[0][start : start + length] for operand in (pieces.params, pieces.g1, pieces.g2))
        native.perturb_([params], pieces.backup, [g1], table, pieces.h, pieces.sumsq, True)
        native.update_([params], pieces.backup, [g2], table, pieces.h, "sgd", [pieces.m])
        dual = pieces.mu, [g1], pieces.m, table, pieces.h, pieces.sumsq, pieces.v
        native.dual_perturb_([params], pieces.backup, *dual)
    shifted_step, tail = Step(5, shapes=[(n,), (17,)]), slice(3, n)  # streamed to places that no vector is aligned to
    table = torch.tensor([[3, n - 3, 0, 0]])
    params, g1, g2 = (operand[0][tail] for operand in (shifted_step.params, shifted_step.g1, shifted_step.g2))
    native.norm_(shifted_step.sumsq, shifted_step.g1, [], shifted_step.table, shifted_step.h)
    native.perturb_([params], shifted_step.backup, [g1], table, shifted_step.h, shifted_step.sumsq, True)
    native.update_([params], shifted_step.backup, [g2], table, shifted_step.h, "sgd", [shifted_step.m])
    s = shifted_step
    native.dual_perturb_([params], s.backup, s.mu, [g1], s.m, table, s.h, s.sumsq, s.v)
    for step_of_part, part in ((pieces, slice(0, n)), (shifted_step, tail)):
        assert torch.equal(joint_step.params[0][part], step_of_part.params[0][part])
        assert torch.equal(joint_step.backup[:, part], step_of_part.backup[:, part])
        for name in ("m", "mu", "v"):
            assert torch.equal(getattr(joint_step, name)[:, part], getattr(step_of_part, name)[:, part])


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older than torch 2.13, which traces requires_grad_()")
def test_compiled_without_graph_breaks() -> None:
    """Forward, backward and the three ops of a SAM step in one graph."""
    eager_step, compiled_step = Step(7, shapes=[(6, 4), (6,)]), Step(7, shapes=[(6, 4), (6,)])
    x = torch.randn(5, 4)

    def step(s: Step, params: list[Tensor]) -> None:
        weight, bias = (p.detach().requires_grad_() for p in params)
        g1 = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).square().sum(), (weight, bias))
        native.norm_(s.sumsq, g1, [], s.table, s.h)
        native.perturb_(params, s.backup, g1, s.table, s.h, s.sumsq, True)
        native.update_(params, s.backup, g1, s.table, s.h, "sgd", [s.m])

    step(eager_step, eager_step.params)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(step, fullgraph=True, backend="aot_eager")(compiled_step, compiled_step.params)
    for a, b in zip(eager_step.params, compiled_step.params, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.__setattr__("g1", s.g1[:-1]), "one tensor per segment"),
        (lambda s: s.__setattr__("g1", [g.double() for g in s.g1]), "in the dtype of the weights"),
        (lambda s: s.__setattr__("backup", s.backup.half()), "backup must have the dtype of the weights"),
        (lambda s: s.__setattr__("h", s.h.float()), "hparams must be float64"),
        (lambda s: s.__setattr__("table", s.table.int()), "table must be int64"),
        (lambda s: s.__setattr__("sumsq", torch.zeros(2, dtype=torch.float64)), "sumsq must be contiguous float64"),
    ],
)
def test_the_ops_refuse_what_does_not_fit(change, message: str) -> None:
    step = Step()
    original = [p.clone() for p in step.params]
    change(step)
    with pytest.raises(RuntimeError, match=message):
        native.perturb_(step.params, step.backup, step.g1, step.table, step.h, step.sumsq, True)
    assert all(torch.equal(a, b) for a, b in zip(original, step.params, strict=True))


def test_the_update_refuses_rules_and_states_that_it_does_not_know() -> None:
    step = Step()
    operands = step.params, step.backup, step.g1, step.table, step.h
    for rule, state, steps, message in (
        ("adamw", [], None, "rule must be one of .*adam.*, got adamw"),
        ("adam", [step.m], step.steps, "the state of adam has 2 fields"),
        ("sgd", [step.m, step.v], None, "the state of sgd has 1 fields"),
        ("adam", [step.m, step.v], None, "adam counts them"),
        ("sgd", [step.m], step.steps, "not for sgd"),
    ):
        with pytest.raises(RuntimeError, match=message):
            native.update_(*operands, rule, state, steps=steps)
