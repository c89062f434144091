"""A step in every style, and calls of users between its two passes."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import SGD
from tests.helpers.sam_oracle import copies, landscape, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# --- the styles are one step ---


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    rho=st.sampled_from([0.0, 1e-6, 0.05, 3.0, 1e4]),
    adaptive=st.booleans(),
    name=st.sampled_from(["native", "foreach", "reference"]),
    special=st.booleans(),
)
def test_restoring_is_bitwise(
    seed: int, dtype: torch.dtype, rho: float, adaptive: bool, name: str, special: bool
) -> None:
    """Weights may be large next to small, negative zeros, infinities or NaN."""
    params = make_parameters([(37,), (4, 5)], dtype, seed=seed)
    with torch.no_grad():
        params[0].mul_(1e3)
        if special:
            params[0][:5] = torch.tensor([-0.0, 0.0, math.inf, -math.inf, 1e-7])
            if dtype.itemsize > 2:  # converting a NaN to the master copy and back keeps it a NaN, and not its payload
                params[0][5] = math.nan
    old_weights = copies(params)
    backend_name = "auto" if name == "native" else name
    for base in (SGD, torch.optim.RMSprop):
        opt = FusedSAM(params, base, rho=rho, adaptive=adaptive, lr=0.1, backend=backend_name)
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        with opt.perturbed():
            pass
        assert same_bits(old_weights, params)
        opt.first_step()
        opt.restore()
        assert same_bits(old_weights, params)


# --- what users do between the passes ---


def test_accumulation_over_micro_batches(backend: Backend) -> None:
    """A closure that accumulates, and gradients accumulated by hand, are the step on the whole batch."""
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(backend.device)

    def train(style: str) -> list[nn.Parameter]:
        params = make_parameters([(3, 4), (4,)], torch.float64, backend.device)
        opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, backend=backend.name)

        def run(batches: list[Tensor]) -> Tensor:
            total = torch.zeros(())
            for batch in batches:
                loss = torch.tanh(batch @ params[0] + params[1]).square().sum() / len(x)
                loss.backward()
                total += loss.detach().cpu()
            return total

        for _ in range(3):
            batches = [x] if style == "whole" else list(x.split(3))
            if style == "by hand":
                run(batches)
                opt.first_step(zero_grad=True)
                run(batches)
                opt.second_step(zero_grad=True)
            else:
                opt.step(partial(run, batches))
        return params

    full_run = train("whole")
    for style in ("closure", "by hand"):
        for p, q in zip(train(style), full_run):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_of_their_own(backend: Backend) -> None:
    params = make_parameters([(5,), (3, 2)], torch.float64, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)

    def closure() -> Tensor:
        loss = landscape(params, 0)
        loss.backward(create_graph=True)
        return loss

    opt.step(closure)
    assert all(p.is_leaf and p.requires_grad for p in params)
    assert not any(v.requires_grad for e in opt.state.values() for v in e.values())


def test_a_stale_graph_is_noticed(backend: Backend) -> None:
    """Weights written by a kernel are written as far as autograd is concerned."""
    p = make_parameters([(6,)], torch.float64, backend.device)[0]
    opt = FusedSAM([p], SGD, lr=0.1, backend=backend.name)
    loss = (p * p.exp()).sum()
    loss.backward(retain_graph=True)
    opt.first_step(zero_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
