"""An exclusive owner's perturbed weights in the memory of the first gradients, where the step itself clears these;
where it is not theirs to take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.optim import exclusive as exchange
from fastsam.optim.exclusive import lendable
from tests.helpers.sam_cases import SGD, SHAPES, native, places
from tests.helpers.sam_oracle import backward, copies, landscape, make_parameters, same_bits

pytestmark = [native, pytest.mark.usefixtures("poisoned_memory", "worth")]
Params = list[nn.Parameter]


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are exchanged too."""
    monkeypatch.setattr(exchange, "WORTH", 0)


def saves_weights(opt: FusedSAM) -> bool:
    """Whether there is memory for a copy of the weights."""
    return any("origin" in bucket.arena for bucket in opt._engine.buckets)


def in_halves(opt: FusedSAM, params: Params) -> None:
    landscape(params, 0).backward()
    opt.first_step(zero_grad=True)
    landscape(params, 0).backward()
    opt.second_step()


def test_the_gradient_becomes_the_perturbed_weights() -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(params, SGD, lr=0.1, exclusive=True)
    backward(params, 0)
    at, before, memory = [p.grad.data_ptr() for p in params], copies(params), [p.detach() for p in params]
    opt.first_step(zero_grad=True)
    assert places(params) == at and same_bits(memory, before) and not same_bits(params, before)
    perturbed = copies(params)
    backward(params, 1)
    assert same_bits(params, perturbed), "the second pass adds to nothing that is there"
    opt.restore()
    assert same_bits(params, before) and not saves_weights(opt)


@pytest.mark.parametrize("early", [0, 1])
def test_on_a_gpu_the_memory_waits_for_the_stream_that_updates(monkeypatch: pytest.MonkeyPatch, early: int) -> None:
    """That of gradients, whose allocator knows another stream, perhaps; never that of a buffer."""

    class Lent(Tensor):
        is_cuda = True  # type: ignore[assignment]

        def record_stream(self, stream: Any) -> None:
            waited.append((self.data_ptr(), stream))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "now")
    for lent in (True, False):
        params, waited = make_parameters([(3,), (4,)], torch.float32), []
        exchange_ = exchange.Exchange(params, (0, 1), [p.detach() for p in params])
        apart = [torch.zeros(p.shape).as_subclass(Lent) for p in params]
        at = places(apart)
        exchange_.take(apart, lent)
        for p, other in zip(params, apart, strict=True):
            p.data = other.as_subclass(Tensor)
        for slot in range(early):
            assert exchange_.bring(slot)
            assert [where for where, _ in waited] == (at[:1] if lent else [])
        exchange_.come_home()
        assert sorted(waited) == sorted((where, "now") for where in at if lent)


def test_gradients_that_a_trainer_clears_in_place() -> None:
    """What it fills with zeros is not where the perturbed weights are."""
    results = []
    for exclusive in (True, False):
        params = make_parameters(SHAPES, torch.float32)
        opt = FusedSAM(params, SGD, lr=0.1, exclusive=exclusive)
        opt.zero_grad = partial(opt.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        in_halves(opt, params)
        results.append(params)
    assert same_bits(*results)


def test_without_zero_grad_gradients_stay() -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(params, SGD, lr=0.1, exclusive=True)
    backward(params, 0)
    before = [p.grad.clone() for p in params]
    opt.first_step()
    assert same_bits([p.grad for p in params], before) and saves_weights(opt)


def shared(params: Params) -> list[Tensor]:
    """Two parameters, one gradient."""
    params[1].grad = params[0].grad
    return [params[0].grad]


def bucketed(params: Params) -> list[Tensor]:
    """As DistributedDataParallel(gradient_as_bucket_view=True) has them."""
    flat = torch.cat([p.grad.flatten() for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    return [flat]


def from_numpy(params: Params) -> list[Tensor]:
    arrays = [p.grad.numpy().copy() for p in params]
    for p, array in zip(params, arrays, strict=True):
        p.grad = torch.from_numpy(array)
    return [torch.from_numpy(array) for array in arrays]


def aliased(params: Params) -> list[Tensor]:
    return [params[1].grad.detach()]


def viewed(params: Params) -> list[Tensor]:
    return [params[0].grad[:2]]


@pytest.mark.parametrize("how", [shared, bucketed, from_numpy, aliased, viewed])
def test_memory_that_others_hold_is_not_taken(how: Callable[[Params], list[Tensor]]) -> None:
    """The step is exchanged with memory of its own."""
    results = []
    for exclusive in (True, False):
        params = make_parameters([(4, 3), (4, 3)], torch.float32)
        opt = FusedSAM(params, SGD, lr=0.1, rho=0.2, exclusive=exclusive)
        backward(params, 0)
        held = how(params)
        before = copies(held)
        assert not lendable(params, range(2), [p.grad for p in params])
        opt.first_step(zero_grad=True)
        assert same_bits(held, before) and saves_weights(opt)
        results.append(copies(params))
        backward(params, 1)
        opt.second_step()
        results[-1] += copies(params)
    assert same_bits(*results)


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again() -> None:
    """Its weights lie elsewhere in every second pass."""
    from torch._dynamo.testing import CompileCounter

    results, counter = [], CompileCounter()
    for exclusive in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        compiled = torch.compile(model, backend=counter if exclusive else "eager")
        opt = FusedSAM(model.parameters(), SGD, lr=0.1, exclusive=exclusive)
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))

        def closure(compiled: Any = compiled, x: Tensor = x) -> Tensor:
            loss = compiled(x).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            opt.step(closure)
        results.append(list(model.parameters()))
    assert counter.frame_count == 1 and same_bits(*results)
