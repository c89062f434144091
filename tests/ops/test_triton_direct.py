"""The prepared passes of a step in Triton (`TritonCalls`), in Triton's interpreter: the bits of the ops, and whole
steps of `FusedSAM`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.arena import Layout
from fastsam_kernels.constants import FreedError
from fastsam_kernels.rules import RULES
from tests.helpers import native_step
from tests.helpers.native_step import hparams
from tests.helpers.op_cases import same_bits
from tests.helpers.traffic import needs_interpreter

triton_direct = pytest.importorskip("fastsam_kernels.triton_direct", reason="Triton is not installed")
triton_backend = pytest.importorskip("fastsam_kernels.triton_backend")
triton_op = pytest.importorskip("fastsam_kernels.triton_op")
pytestmark = needs_interpreter

Operands = partial(native_step.Operands, shapes=((3, 4), (0,), (17,)))


def step(calls: Any, o: native_step.Operands, g1: Sequence[Tensor], g2: Sequence[Tensor], **options: bool) -> None:
    """Make a prepared step of SGD, with the calls of the last one if they serve."""
    calls.norm_perturb_(g1, o.sumsq, options.get("adaptive", False))
    last_calls = getattr(calls, "last_calls", None)
    if last_calls is None or not calls.renew(last_calls, g2):
        last_calls = calls.last_calls = calls.update("sgd", o.state[:1], g2)
    for call in last_calls:
        assert not call()


def ops_step(o: native_step.Operands, columns: Tensor, g1: Sequence[Tensor], g2: Sequence[Tensor]) -> None:
    triton_backend.norm_(o.sumsq, g1, [], o.table, columns)
    triton_backend.perturb_(o.params, o.backup, g1, o.table, columns, o.sumsq, True)
    triton_backend.update_(o.params, o.backup, g2, o.table, columns, "sgd", o.state[:1])


@pytest.mark.parametrize(
    ("dtype", "master", "adaptive"),
    [(torch.float32, False, False), (torch.float32, False, True), (torch.bfloat16, True, False)],
)
def test_a_step_has_the_ops_bits(dtype: torch.dtype, master: bool, adaptive: bool) -> None:
    """A step of each rule, one after the other into the same memory."""
    columns, results = hparams(ADAPTIVE=float(adaptive), ETA=0.1), []
    for is_prepared in (True, False):
        o = Operands(dtype, master)
        calls = triton_backend.direct_calls(o.params, o.backup, o.table, columns)
        for rule, definition in RULES.items():
            state, steps = o.state[: len(definition.state)], o.steps if definition.counter else None
            if is_prepared:
                calls.norm_perturb_(o.g1, o.sumsq, adaptive, not master)
                for call in calls.update(rule, state, o.g2, steps=steps, write_master=master):
                    assert not call()
                continue
            triton_backend.norm_(o.sumsq, o.g1, o.params if adaptive else [], o.table, columns)
            triton_backend.perturb_(o.params, o.backup, o.g1, o.table, columns, o.sumsq, not master)
            options = {"steps": steps, "write_master": master}
            triton_backend.update_(o.params, o.backup, o.g2, o.table, columns, rule, state, **options)
        results.append(o.outputs())
    assert all(map(same_bits, *results))


def test_gradients_that_move_are_found() -> None:
    """New gradients in every step, with and without alignment, and freed memory that is handed out again."""
    o, twin, columns = Operands(), Operands(), hparams()
    calls = triton_backend.direct_calls(o.params, o.backup, o.table, columns)
    for k in range(5):
        shift = k % 2
        memory = [[torch.randn(g.numel() + 1) for g in o.g1] for _ in range(2)]
        g1, g2 = ([m[shift : shift + s.numel()].view(s.shape) for m, s in zip(x, o.g1, strict=True)] for x in memory)
        step(calls, o, g1, g2)
        ops_step(twin, columns, g1, g2)
        assert all(map(same_bits, o.outputs(), twin.outputs()))


def test_a_steady_step_prepares_and_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes three launches. New addresses are one upload per pass, and no new launch."""
    counts = {"launch_call": 0, "upload_words": 0}

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    count(triton_op, "launch_call")
    count(triton_direct, "upload_words")
    o = Operands()
    calls = triton_backend.direct_calls(o.params, o.backup, o.table, hparams())
    for g1, g2, expected in (
        (o.g1, o.g2, (3, 2)),
        (o.g1, o.g2, (3, 2)),
        ([g.clone() for g in o.g1], [g.clone() for g in o.g2], (3, 4)),
        (o.g1, o.g2, (3, 6)),
    ):
        step(calls, o, g1, g2)
        assert tuple(counts.values()) == expected


def test_other_numbers_are_prepared_anew() -> None:
    """A new output of the norm, other flags, and calls of an update that another one followed."""
    o, twin, columns = Operands(), Operands(), hparams()
    calls = triton_backend.direct_calls(o.params, o.backup, o.table, columns)
    step(calls, o, o.g1, o.g2)
    ops_step(twin, columns, o.g1, o.g2)
    old_calls = calls.last_calls
    o.sumsq = torch.zeros(1, dtype=torch.float64)
    step(calls, o, o.g1, o.g2)
    ops_step(twin, columns, o.g1, o.g2)
    assert all(map(same_bits, o.outputs(), twin.outputs()))
    assert calls.renew(old_calls, o.g2)
    calls.update("lion", o.state[:1], o.g2)
    assert not calls.renew(old_calls, o.g2)


def test_freed_gradients_are_refused_before_anything_is_written() -> None:
    o = Operands()
    calls = triton_backend.direct_calls(o.params, o.backup, o.table, hparams())
    step(calls, o, o.g1, o.g2)
    old_outputs = [t.clone() for t in o.outputs()]
    freed_grads = [g.clone() for g in o.g1]
    freed_grads[0].untyped_storage().resize_(0)
    with pytest.raises(FreedError, match="tensor 0 of 3 has no memory"):
        calls.norm_perturb_(freed_grads, o.sumsq, False)
    with pytest.raises(FreedError, match="tensor 0 of 3 has no memory"):
        calls.renew(calls.last_calls, freed_grads)
    assert all(map(same_bits, o.outputs(), old_outputs))


def test_an_interrupt_before_the_upload_leaves_no_stale_table(monkeypatch: pytest.MonkeyPatch) -> None:
    o, twin, columns = Operands(), Operands(), hparams()
    calls = triton_backend.direct_calls(o.params, o.backup, o.table, columns)
    step(calls, o, o.g1, o.g2)
    ops_step(twin, columns, o.g1, o.g2)

    def write_and_raise(words: bytes, target: Tensor) -> None:
        target.copy_(torch.tensor([g.data_ptr() for g in o.g2]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(triton_direct, "upload_words", write_and_raise)
        with pytest.raises(KeyboardInterrupt):
            calls.norm_perturb_(o.g2, o.sumsq, False)
    step(calls, o, o.g1, o.g2)
    ops_step(twin, columns, o.g1, o.g2)
    assert all(map(same_bits, o.outputs(), twin.outputs()))


def test_operands_that_need_the_ops() -> None:
    o, columns = Operands(), hparams()
    assert triton_backend.direct_calls(o.params, None, o.table, columns) is None
    empty = [torch.zeros(0)]
    assert triton_backend.direct_calls(empty, o.backup, Layout.from_tensors(empty).table, columns) is None


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_an_optimizer(base: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the ops, with gradients at new addresses, two parameter groups, and one parameter without
    gradient."""
    results = []
    for has_direct_calls in (True, False):
        torch.manual_seed(1)
        params = [nn.Parameter(torch.randn(5 + i)) for i in range(3)]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
        if not has_direct_calls:
            monkeypatch.delattr(triton_backend, "direct_calls")
        opt = FusedSAM(groups, base, rho=0.1, lr=0.1, backend="triton")
        for k in range(3):
            for half in (opt.first_step, opt.second_step):
                for p in params:
                    p.grad = torch.randn(p.shape)
                if k == 1:
                    params[0].grad = None
                half()
        found = [
            calls
            for selection in opt._engine.buckets[0]._selections.values()
            for calls in selection.direct_calls.values()
        ]
        assert any(isinstance(calls, triton_direct.TritonCalls) for calls in found) == has_direct_calls
        results.append([*params, *(opt.state[p][key] for p in params for key in opt.state[p])])
    assert all(map(same_bits, *results))
