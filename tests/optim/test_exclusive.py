"""`FusedSAM(assume_no_alias=True)`: parameters swap storage with their perturbed weights.

Perturbed weights may use the storage of the first gradients if the step itself clears these.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam.optim import storage_swap
from fastsam.optim.storage_swap import grad_storage_reusable
from tests.helpers.sam_cases import ADAM, HALF, SGD, SHAPES, halves, native, places
from tests.helpers.sam_oracle import backward, copies, landscape, make_parameters, same_bits

pytestmark = [native, pytest.mark.usefixtures("poisoned_memory", "small_exchanges")]
Params = list[nn.Parameter]


def saves_weights(opt: FusedSAM) -> bool:
    """Return True if memory for a copy of the weights is allocated."""
    return any("backup" in bucket.arena for bucket in opt._engine.buckets)


def in_halves(opt: FusedSAM, params: Params) -> None:
    landscape(params, 0).backward()
    opt.first_step(zero_grad=True)
    landscape(params, 0).backward()
    opt.second_step()


def test_the_gradient_becomes_the_perturbed_weights() -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(params, SGD, lr=0.1, assume_no_alias=True)
    backward(params, 0)
    addresses, old_weights, memory = [p.grad.data_ptr() for p in params], copies(params), [p.detach() for p in params]
    opt.first_step(zero_grad=True)
    assert places(params) == addresses and same_bits(memory, old_weights) and not same_bits(params, old_weights)
    perturbed_weights = copies(params)
    backward(params, 1)
    assert same_bits(params, perturbed_weights), "the second pass adds to nothing that is there"
    opt.restore()
    assert same_bits(params, old_weights) and not saves_weights(opt)


@pytest.mark.parametrize("slots", [0, 1])
def test_on_a_gpu_the_memory_waits_for_the_stream_that_updates(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Storage of gradients waits for the stream, because its allocator may know a different stream; a buffer never
    waits."""

    class RecordedTensor(Tensor):
        is_cuda = True  # type: ignore[assignment]

        def record_stream(self, stream: Any) -> None:
            waits.append((self.data_ptr(), stream))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "now")
    for is_donated in (True, False):
        params, waits = make_parameters([(3,), (4,)], torch.float32), []
        swap = storage_swap.StorageSwap(params, (0, 1), [p.detach() for p in params])
        targets = [torch.zeros(p.shape).as_subclass(RecordedTensor) for p in params]
        addresses = places(targets)
        swap.set_targets(targets, is_donated)
        for p, target in zip(params, targets, strict=True):
            p.data = target.as_subclass(Tensor)
        for slot in range(slots):
            assert swap.swap_back_one(slot)
            assert [address for address, _ in waits] == (addresses[:1] if is_donated else [])
        swap.swap_back()
        assert sorted(waits) == sorted((address, "now") for address in addresses if is_donated)


def test_gradients_that_a_trainer_clears_in_place() -> None:
    """Gradients that the trainer fills with zeros do not hold the perturbed weights."""
    results = []
    for exclusive in (True, False):
        params = make_parameters(SHAPES, torch.float32)
        opt = FusedSAM(params, SGD, lr=0.1, assume_no_alias=exclusive)
        opt.zero_grad = partial(opt.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        in_halves(opt, params)
        results.append(params)
    assert same_bits(*results)


def test_without_zero_grad_gradients_stay() -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(params, SGD, lr=0.1, assume_no_alias=True)
    backward(params, 0)
    old_gradients = [p.grad.clone() for p in params]
    opt.first_step()
    assert same_bits([p.grad for p in params], old_gradients) and saves_weights(opt)


def share_gradient(params: Params) -> list[Tensor]:
    """Give two parameters one gradient."""
    params[1].grad = params[0].grad
    return [params[0].grad]


def bucket_gradients(params: Params) -> list[Tensor]:
    """Make gradients views of one bucket, like DistributedDataParallel(gradient_as_bucket_view=True)."""
    flat = torch.cat([p.grad.flatten() for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    return [flat]


def from_numpy(params: Params) -> list[Tensor]:
    arrays = [p.grad.numpy().copy() for p in params]
    for p, array in zip(params, arrays, strict=True):
        p.grad = torch.from_numpy(array)
    return [torch.from_numpy(array) for array in arrays]


def alias_gradient(params: Params) -> list[Tensor]:
    return [params[1].grad.detach()]


def view_gradient(params: Params) -> list[Tensor]:
    return [params[0].grad[:2]]


@pytest.mark.parametrize("hold_memory", [share_gradient, bucket_gradients, from_numpy, alias_gradient, view_gradient])
def test_memory_that_others_hold_is_not_taken(hold_memory: Callable[[Params], list[Tensor]]) -> None:
    """The step then swaps with separate memory."""
    results = []
    for exclusive in (True, False):
        params = make_parameters([(4, 3), (4, 3)], torch.float32)
        opt = FusedSAM(params, SGD, lr=0.1, rho=0.2, assume_no_alias=exclusive)
        backward(params, 0)
        tensors = hold_memory(params)
        old_values = copies(tensors)
        assert not grad_storage_reusable(params, range(2), [p.grad for p in params])
        opt.first_step(zero_grad=True)
        assert same_bits(tensors, old_values) and saves_weights(opt)
        results.append(copies(params))
        backward(params, 1)
        opt.second_step()
        results[-1] += copies(params)
    assert same_bits(*results)


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again() -> None:
    """The storage of its weights changes in every second pass."""
    from torch._dynamo.testing import CompileCounter

    results, counter = [], CompileCounter()
    for exclusive in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        compiled_model = torch.compile(model, backend=counter if exclusive else "eager")
        opt = FusedSAM(model.parameters(), SGD, lr=0.1, assume_no_alias=exclusive)
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))

        def closure(compiled_model: Any = compiled_model, x: Tensor = x) -> Tensor:
            loss = compiled_model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            opt.step(closure)
        results.append(list(model.parameters()))
    assert counter.frame_count == 1 and same_bits(*results)


# --- the exchange itself ---


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float32, HALF)], ids=str)
def test_several_dtypes_take_the_ordinary_way(dtypes: tuple[torch.dtype, ...], backend: Backend) -> None:
    def train_weights(exclusive: bool) -> list[nn.Parameter]:
        params = [make_parameters([(5, 3)], dtype, backend.device, seed=i)[0] for i, dtype in enumerate(dtypes)]
        opt = FusedSAM(params, ADAM, lr=0.1, backend=backend.name, assume_no_alias=exclusive)
        for step in range(3):
            halves(opt, params, step)
        return params

    assert same_bits(train_weights(True), train_weights(False))


def test_parameters_that_the_model_gave_up_are_noticed() -> None:
    """The storage swap keeps references to the parameters, and must notice that no other references exist."""
    model = nn.Linear(3, 2)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, assume_no_alias=True)
    for step in range(2):
        halves(opt, list(model.parameters()), step)
    model.load_state_dict({name: torch.ones_like(w) for name, w in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"only this optimizer still refers to its parameters \[0, 1\]"):
        opt.first_step()


def test_a_graph_of_the_other_point_is_refused() -> None:
    """The swap does not silently replace weights that autograd saved."""
    w = nn.Parameter(torch.ones(3))
    opt = FusedSAM([w], SGD, lr=0.1, assume_no_alias=True)
    loss = (w * w.exp()).sum()
    loss.backward(retain_graph=True)
    opt.first_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (w * w.exp()).sum()
    loss.backward(retain_graph=True)
    opt.second_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
