"""Gradients that are absent, zero, not finite or reordered; parameters of every layout and precision."""

import math

import pytest
import torch
from torch import nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import BASES, SGD
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16], ids=str)
def test_gradients_of_another_dtype(dtype: torch.dtype, backend: Backend) -> None:
    """Complex gradients are refused, lower precision is accepted."""
    p = make_parameters([(5,)], torch.float32, backend.device)[0]
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch cannot have a gradient of another dtype than its parameter's")
    opt = FusedSAM([p], SGD, lr=1.0, rho=0.0, backend=backend.name)
    p.grad_dtype = dtype
    p.grad = torch.full((5,), 0.5, dtype=dtype, device=backend.device)
    old_weights = p.detach().clone()
    if dtype.is_complex:
        with pytest.raises(RuntimeError, match="gradient of parameter 0 is complex"):
            opt.first_step()
        assert torch.equal(p.detach(), old_weights)
    else:
        opt.first_step()
        opt.second_step()
        assert torch.equal(p.detach(), old_weights - 0.5)
