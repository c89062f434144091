"""Gradients that are absent, zero, not finite or reordered; parameters of every layout and precision."""

import math

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import BASES, SGD
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# --- gradients that are not there ---


def test_no_gradients_at_all(backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, backend=backend.name)
    calls: list[int] = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    old_weights = copies(params)
    opt.first_step()
    assert opt.grad_norm is not None and opt.grad_norm.item() == 0
    opt.second_step()
    assert same_bits(old_weights, params) and len(calls) == 1 and not opt.state


def test_a_zero_gradient_does_not_perturb(backend: Backend) -> None:
    params = make_parameters([(5,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    old_weights = copies(params)
    params[0].grad = torch.zeros_like(params[0])
    opt.first_step()
    assert same_bits(old_weights, params)
    opt.restore()


@pytest.mark.parametrize("bad_value", [math.inf, -math.inf, math.nan])
def test_a_first_gradient_that_is_not_finite_perturbs_nothing(bad_value: float, backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    old_weights = copies(params)
    backward(params, 0)
    params[1].grad[0] = bad_value
    opt.first_step()
    assert same_bits(old_weights, params)
    backward(params, 0)
    expected = [b - 0.1 * p.grad for b, p in zip(old_weights, params)]
    opt.second_step()
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach(), e)


@pytest.mark.parametrize("is_moved", [False, True], ids=["", "moved between the passes"])
@pytest.mark.parametrize("name", BASES)
def test_check_finite_makes_the_update_of_parameters_with_gaps(name: str, is_moved: bool, backend: Backend) -> None:
    base, options = BASES[name]
    params = [nn.Parameter(torch.ones(6, 8, device=backend.device)[:, 2:5])]
    opt = FusedSAM(params, base, backend=backend.name, skip_nonfinite=True, **options)
    for step in range(2):
        old_weights = copies(params)
        backward(params, step)
        opt.first_step()
        if is_moved:
            params[0].data = torch.empty(6, 8, device=backend.device)[:, 2:5].copy_(params[0].data)
        backward(params, step)
        opt.second_step()
        assert not same_bits(old_weights, params)


def test_large_half_precision_gradients_do_not_overflow_the_norm(backend: Backend) -> None:
    p = nn.Parameter(torch.zeros(1000, dtype=torch.float16, device=backend.device))
    opt = FusedSAM([p], SGD, rho=1.0, lr=0.1, backend=backend.name)
    p.grad = torch.full_like(p, 6e4)  # its square is far outside float16
    opt.first_step()
    expected = torch.full((1000,), 1000**-0.5, device=backend.device)
    torch.testing.assert_close(p.detach().float(), expected, rtol=2**-10, atol=0)


def test_half_precision_weights_are_perturbed_in_the_intended_direction(backend: Backend) -> None:
    """bfloat16 rounds a small perturbation to zero or to one unit: it must be the rounding of the right point."""
    p = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16, device=backend.device))
    opt = FusedSAM([p], SGD, rho=0.05, lr=1e-3, backend=backend.name)
    master = torch.ones(4000, device=backend.device)
    for step in range(30):  # each step moves the weights by less than bfloat16 resolves
        gradient = torch.randn(4000, generator=torch.Generator().manual_seed(step)).to(backend.device, torch.bfloat16)
        p.grad = gradient
        opt.first_step()
        point = master + 0.05 * gradient.float() / gradient.float().norm()
        torch.testing.assert_close(p.detach().float(), point.bfloat16().float(), rtol=2**-7, atol=0)
        opt.second_step()
        master -= 1e-3 * gradient.float()
        torch.testing.assert_close(opt.state_dict()["state"][0]["master"], master, rtol=1e-5, atol=1e-6)


# --- layouts ---


def test_tied_parameters_are_one(backend: Backend) -> None:
    class TiedLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    model = TiedLayers().double().to(backend.device)
    x = torch.randn(8, 4, dtype=torch.float64, device=backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, backend=backend.name)
    oracle = Oracle([{"params": list(model.parameters())}], SGD, {"lr": 0.1})
    for _ in range(3):
        for finish in (False, True):
            model.zero_grad()
            model(x).square().sum().backward()
            grads = gradients(list(model.parameters()))
            (oracle.update if finish else oracle.perturb)(grads)
            (opt.second_step if finish else opt.first_step)()
    torch.testing.assert_close(model.a.weight.detach().cpu(), oracle.params[0].detach(), rtol=1e-12, atol=1e-12)
