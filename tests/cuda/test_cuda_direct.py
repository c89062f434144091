"""The direct way to the CUDA kernels (`direct_calls.CudaDirectCalls`), emulated: the bits and the launches of the ops,
and whole steps of `FusedSAM`."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastsam import FusedSAM
from fastsam.optim import storage_swap
from fastsam_kernels import native
from fastsam_kernels.direct_calls import CudaDirectCalls
from fastsam_kernels.rules import RULES
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.emulated_steps import assert_sound
from tests.helpers.native_step import SHAPES, Operands, hparams
from tests.helpers.op_cases import same_bits

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not())),
]


@pytest.fixture
def direct_cuda(emulation: Emulation) -> Iterator[Emulation]:
    emulation.order(0, 0)
    with emulated.direct(emulation.path):
        yield emulation


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    ("dtype", "master", "adaptive"),
    [
        *itertools.product((torch.float32, torch.float64, torch.float16), (False,), (False, True)),
        (torch.bfloat16, True, False),
    ],
)
def test_a_step_has_the_ops_bits(
    direct_cuda: Any, dtype: torch.dtype, master: bool, adaptive: bool, save: bool
) -> None:
    """Twice each into the same memory: the second call finds the tickets that the first one left."""
    kernels, results = direct_cuda.backend.load(), []
    columns = hparams(ADAPTIVE=float(adaptive), ETA=0.1)
    for uses_direct in (True, False):
        o = Operands(dtype, master)
        calls = CudaDirectCalls(o.params, o.backup, o.layout.table, columns)
        for rule, definition in RULES.items():
            state, steps = o.state[: len(definition.state)], o.steps if definition.counter else None
            if uses_direct:
                calls.norm_perturb_(o.g1, o.sumsq, adaptive, save)
                for call in calls.update(rule, state, o.g2, steps=steps, write_master=master):
                    assert not call()
                continue
            masters = o.layout.views(o.backup[0])
            weights = [] if not adaptive else o.params if save else masters
            kernels.norm_(o.sumsq, o.g1, weights, o.layout.table, columns)
            kernels.perturb_(o.params, o.backup, o.g1, o.layout.table, columns, o.sumsq, save)
            options = {"steps": steps, "init_state": False, "write_master": master}
            kernels.update_(o.params, o.backup, o.g2, o.layout.table, columns, rule, state, **options)
        results.append(o.outputs())
    assert all(map(same_bits, *results))
    assert_sound(direct_cuda)


@pytest.mark.parametrize("reuses_gradients", [False, True], ids=["apart", "in the gradients"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_that_are_perturbed_apart_and_updated_in_place(
    direct_cuda: Emulation, dtype: torch.dtype, adaptive: bool, reuses_gradients: bool
) -> None:
    """The bits of the step that saves them, twice; the weights' own memory is not written before the update, and that
    does not read the others."""
    columns = hparams(ADAPTIVE=float(adaptive), ETA=0.1)
    twin, o = Operands(dtype, False), Operands(dtype, False)
    plain, calls = (
        CudaDirectCalls(twin.params, twin.backup, o.layout.table, columns),
        CudaDirectCalls(o.params, None, o.layout.table, columns),
    )
    for rule, definition in RULES.items():
        old_weights, g1 = [p.clone() for p in o.params], [g.clone() for g in o.g1]
        perturbed_weights = g1 if reuses_gradients else [torch.full_like(p, torch.nan) for p in o.params]
        calls.norm_perturb_(g1, o.sumsq, adaptive, save=False, perturbed_weights=perturbed_weights)
        plain.norm_perturb_(twin.g1, twin.sumsq, adaptive)
        assert all(map(same_bits, [*perturbed_weights, o.sumsq], [*twin.params, twin.sumsq]))
        assert all(map(same_bits, o.params, old_weights))
        for tensor in perturbed_weights:
            tensor.fill_(torch.nan)
        for kernel_calls, operands, in_place in ((calls, o, True), (plain, twin, False)):
            state, steps = operands.state[: len(definition.state)], operands.steps if definition.counter else None
            for call in kernel_calls.update(rule, state, operands.g2, in_place, steps=steps):
                assert not call()
        assert all(map(same_bits, [*o.params, *o.state, o.steps], [*twin.params, *twin.state, twin.steps]))
    assert_sound(direct_cuda)


class OpCounter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        OpCounter.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_is_three_launches_and_no_op_of_torch(direct_cuda: Emulation) -> None:
    o = Operands(torch.float32, False)
    calls, old_count = (CudaDirectCalls(o.params, o.backup, o.layout.table, hparams()), direct_cuda.count("launches"))
    with OpCounter():
        calls.norm_perturb_(o.g1, o.sumsq, False)
        for call in calls.update("sgd", o.state[:1], o.g2):
            call()
    assert (direct_cuda.count("launches") - old_count, OpCounter.count) == (3, 0)


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_an_optimizer(
    direct_cuda: Emulation, monkeypatch: MonkeyPatch, base: type[torch.optim.Optimizer]
) -> None:
    """Weights agree up to rounding with a parameter that has no gradient, because CUDA adds in a different order."""
    results = []
    for uses_direct in (False, True):
        if uses_direct:
            monkeypatch.setattr(native, "direct_calls", lambda *operands: CudaDirectCalls(*operands[:4]))
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        opt, old_count = FusedSAM(params, base, lr=0.1, backend="native"), direct_cuda.count("launches")
        for step in range(4):
            for half in (opt.first_step, opt.second_step):
                for p in params[step // 2 :]:
                    p.grad = torch.randn(p.shape, generator=generator)
                half()
                opt.zero_grad()
        results.append([p.detach() for p in params])
        assert direct_cuda.count("launches") - old_count == (12 if uses_direct else 0)
    torch.testing.assert_close(*results)


class DatalessModel(nn.Module):
    """A loss that needs no data."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self) -> Tensor:
        return torch.stack([w.sin().square().sum() for w in self.weights]).sum()


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("updates_in_backward", [False, True])
def test_steps_of_an_exclusive_owner(
    direct_cuda: Emulation, monkeypatch: MonkeyPatch, base: type[torch.optim.Optimizer], updates_in_backward: bool
) -> None:
    """Steps with swapped storage have the bits and the launches of ordinary steps, and need no copy of the weights."""
    monkeypatch.setattr(native, "direct_calls", lambda *operands: CudaDirectCalls(*operands[:4]))
    monkeypatch.setattr(storage_swap, "MIN_MEAN_NUMEL_CPU", 0)
    results = []
    for options in ({}, {"assume_no_alias": True, "optimizer_in_backward": updates_in_backward}):
        model, old_count = DatalessModel(), direct_cuda.count("launches")
        opt = FusedSAM(model.parameters(), base, lr=0.1, rho=0.3, backend="native", **options)

        def closure(model: DatalessModel = model) -> Tensor:
            loss = model()
            loss.backward()
            return loss

        losses, addresses = [], [p.data_ptr() for p in model.parameters()]
        for _ in range(3):
            losses.append(opt.step(closure).detach())
        results.append([*losses, *(p.detach() for p in model.parameters())])
        assert addresses == [p.data_ptr() for p in model.parameters()]
        assert ("backup" in opt._engine.buckets[0].arena) is not bool(options)
        num_updates = len(SHAPES) - (base is torch.optim.SGD)  # which has nothing to do for the empty one
        assert direct_cuda.count("launches") - old_count == 3 * (
            2 + (num_updates if options and updates_in_backward else 1)
        )
    assert all(map(same_bits, *results))


def test_a_step_that_is_captured_exchanges_nothing(direct_cuda: Emulation, monkeypatch: MonkeyPatch) -> None:
    """A replay would not; it saves the weights, also where steps before it exchanged them."""
    monkeypatch.setattr(native, "direct_calls", lambda *operands: CudaDirectCalls(*operands[:4]))
    monkeypatch.setattr(storage_swap, "MIN_MEAN_NUMEL_CPU", 0)
    is_capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    results = []
    for exchanges in (True, False):
        model = DatalessModel()
        opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.1, backend="native", assume_no_alias=exchanges)
        addresses, swaps = [p.data_ptr() for p in model.parameters() if p.numel()], []
        for is_capturing in (False, True, False):  # noqa: B007  (which the stand-in reads)
            model().backward()
            opt._engine._sync_params()
            opt._engine.buckets[0].device = torch.device("cuda")  # a device whose streams may be captured
            with opt.perturbed():
                swaps.append(addresses != [p.data_ptr() for p in model.parameters() if p.numel()])
                opt.zero_grad()
                model().backward()
                opt.step()
            opt.zero_grad()
        assert swaps == [exchanges, False, exchanges]
        results.append([p.detach() for p in model.parameters()])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("in_place", [False, True])
def test_every_call_uses_the_current_stream(direct_cuda: Emulation, monkeypatch: MonkeyPatch, in_place: bool) -> None:
    o = Operands(torch.float32, False)
    calls = CudaDirectCalls(o.params, o.backup, o.layout.table, hparams())
    for stream in (0x1230, 0x4560):
        monkeypatch.setattr(calls, "_stream", lambda stream=stream: stream)
        calls.norm_perturb_(o.g1, o.sumsq, False)
        assert direct_cuda.count("last_stream") == stream
        for call in calls.update("adam", o.state[:2], o.g2, in_place, steps=o.steps):
            assert not call()
        assert direct_cuda.count("last_stream") == stream
        monkeypatch.setattr(calls, "_stream", lambda: 0x7890)
        calls.norm_perturb_(o.g1, o.sumsq, False, save=False, perturbed_weights=o.g2)
        assert direct_cuda.count("last_stream") == 0x7890


def test_during_a_capture_nothing_is_allocated(monkeypatch: MonkeyPatch) -> None:
    """Tickets that a graph zeroes when it is replayed are not zero during the capture.

    So the ops serve until the first call outside of captures.
    """
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    o = Operands(torch.float32, False)
    gpu_weight: Any = type("Weight", (), {"device": torch.device("cuda", 0)})()
    assert native.direct_calls([gpu_weight], None, o.layout.table, hparams()) is None
    assert native.direct_calls(o.params, o.backup, o.layout.table, hparams()) is not None
