"""A parameter that changes and keeps its address: another shape, order, dtype or size of its storage is noticed before
a kernel touches memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam.optim import tensor_table
from tests.helpers.sam_cases import SGD
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIDE = 12


def assign(p: Tensor, data: Tensor) -> None:
    p.data = data


RESHAPED: dict[str, Callable[[Tensor], None]] = {
    "pruned": lambda p: assign(p, p.data[:8]),
    "grown in place": lambda p: assign(p, p.data.as_strided((SIDE + 4, SIDE), (SIDE, 1))),
    "flattened": lambda p: assign(p, p.data.flatten()),
}
WITHOUT_MEMORY: dict[str, Callable[[Tensor], object]] = {
    "freed": lambda p: p.untyped_storage().resize_(0),
    "cut": lambda p: p.untyped_storage().resize_(4 * SIDE),
    "one byte short": lambda p: p.untyped_storage().resize_(p.untyped_storage().nbytes() - 1),
}


@pytest.fixture(params=["guards", "python"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for changes in both ways: by torch's own guards, and without them."""
    if request.param == "python":
        monkeypatch.setattr(tensor_table, "TensorGuards", None)
    elif tensor_table.TensorGuards is None:
        pytest.skip("this torch has no such guards")


def model(device: str) -> list[nn.Parameter]:
    """Return parameters; the first one has unused elements after it in its storage."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(SIDE + 6, SIDE, generator=generator).to(device)
    last = numbers[-1].clone()
    return [nn.Parameter(numbers[:SIDE]), nn.Parameter(last)]


def train(backend: Backend) -> tuple[list[nn.Parameter], FusedSAM]:
    params = model(backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, rho=0.5, backend=backend.name)
    for step in range(3):
        for half in (opt.first_step, opt.second_step):
            backward(params, step)
            half()
    return params, opt


def give_gradients(params: list[nn.Parameter]) -> None:
    for p in params:
        p.grad = torch.ones_like(p)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("change", RESHAPED)
@pytest.mark.parametrize("halfway", [False, True])
def test_another_shape_is_an_error(halfway: bool, change: str, backend: Backend) -> None:
    """Between the passes all others are restored."""
    params, opt = train(backend)
    address, old_weights = params[0].data_ptr(), copies(params)
    if halfway:
        give_gradients(params)
        opt.first_step()
    opt.zero_grad()
    RESHAPED[change](params[0])
    assert params[0].data_ptr() == address
    new_weights = copies(params[:1])
    give_gradients(params)
    with pytest.raises(RuntimeError, match=r"parameter 0 had shape \(12, 12\) when it was last stepped"):
        (opt.second_step if halfway else opt.first_step)()
    assert same_bits(old_weights[1:], params[1:]) and (halfway or same_bits(new_weights, params[:1]))


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("change", WITHOUT_MEMORY)
@pytest.mark.parametrize("halfway", [False, True])
def test_a_parameter_without_its_memory_is_an_error(halfway: bool, change: str, backend: Backend) -> None:
    """Sharding libraries leave such parameters between their passes. Between the passes all others are restored."""
    params, opt = train(backend)
    params[0].data = params[0].data.clone()
    old_weights = copies(params)
    if halfway:
        give_gradients(params)
        opt.first_step()
        assert not same_bits(old_weights, params)
    give_gradients(params)
    WITHOUT_MEMORY[change](params[0])
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(12, 12\) needs 576 bytes .* its storage has \d+"):
        (opt.second_step if halfway else opt.first_step)()
    assert same_bits(old_weights[1:], params[1:])

    params[0].untyped_storage().resize_(576)
    params[0].data.copy_(old_weights[0])
    for half in (opt.first_step, opt.second_step):
        give_gradients(params)
        half()
    assert not same_bits(old_weights, params)


@pytest.mark.usefixtures("looks")
def test_a_transposed_square_goes_on_in_its_new_order(backend: Backend) -> None:
    """Its momentum stays with the indices, as with torch's own optimizers."""
    params, opt = train(backend)
    oracle = Oracle([{"params": params}], SGD, {"lr": 0.1, "momentum": 0.9, "rho": 0.5})
    oracle.base.load_state_dict(opt.state_dict())
    for p in (oracle.params[0], params[0]):
        p.data = p.data.t()
    opt.zero_grad()
    for step in range(3, 6):
        backward(params, step)
        oracle.perturb(gradients(params))
        opt.first_step()
        backward(params, step)
        oracle.update(gradients(params))
        opt.second_step()
    for p, q in zip(params, oracle.params, strict=True):
        torch.testing.assert_close(p.detach().double().cpu(), q.detach(), rtol=1e-5, atol=1e-5)


def test_a_parameter_cut_while_its_memory_is_exchanged(backend: Backend) -> None:
    """With `assume_no_alias=True` large weights are swapped between the passes; a cut is not undone but reported."""
    p = nn.Parameter(torch.ones(300, 300, device=backend.device))
    opt = FusedSAM([p], SGD, lr=0.1, assume_no_alias=True, backend=backend.name)
    p.grad = torch.ones_like(p)
    opt.first_step(zero_grad=True)
    p.data = p.data[:8]
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"parameter 0 had shape \(300, 300\) .* has \(8, 300\) now"):
        opt.second_step()
    assert p.shape == (8, 300)
