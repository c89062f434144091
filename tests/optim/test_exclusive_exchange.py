"""The choice of parameters that swap storage: a rule on sizes, with the same bits and memory for both choices."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import memory
from bench.contenders import Contender, OptimizerStepper
from fastsam import FusedSAM
from fastsam.optim.storage_swap import MIN_MEAN_NUMEL_CPU, MIN_MEAN_NUMEL_CUDA, worth_swapping
from tests.helpers.sam_cases import ADAM, SGD, Prepared, halves, native, places
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LARGE, SMALL = MIN_MEAN_NUMEL_CPU * 2 - 3, 3  # two tensors at the limit
SIDES = {"exchanged": (LARGE, SMALL), "in place": (LARGE - 1, SMALL)}


def make_params(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return make_parameters([(n,) for n in sizes], dtype)


def find_swaps(params: Sequence[Tensor], opt: FusedSAM) -> list[bool]:
    """Return, per parameter, True if its storage is swapped at the perturbed point."""
    backward([p for p in params if p.requires_grad], 0)
    addresses = places(params)
    with opt.perturbed():
        return [p.data_ptr() != address for p, address in zip(params, addresses, strict=True)]


@native
@pytest.mark.parametrize("base", [SGD, ADAM, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", SIDES)
def test_both_sides_of_the_limit(side: str, dtype: torch.dtype, base: type[torch.optim.Optimizer]) -> None:
    params, plain = make_params(SIDES[side], dtype), make_params(SIDES[side], dtype)
    exclusive_opt, plain_opt = (
        FusedSAM(p, base, lr=0.1, rho=0.2, assume_no_alias=p is params) for p in (params, plain)
    )
    for step in range(2):
        halves(exclusive_opt, params, step)
        halves(plain_opt, plain, step)
    assert same_bits(params, plain) and same_bits([exclusive_opt.grad_norm], [plain_opt.grad_norm])
    assert find_swaps(params, exclusive_opt) == [side == "exchanged"] * 2
    assert same_bits(params, plain), "looking at the perturbed point changes nothing"


@native
def test_frozen_parameters_do_not_count() -> None:
    """Only the parameters that a step perturbs decide."""
    params = make_params((LARGE, SMALL, SMALL))
    opt = FusedSAM(params, SGD, lr=0.1, assume_no_alias=True)
    assert find_swaps(params, opt) == [False] * 3
    params[2].requires_grad_(False)
    params[2].grad = None
    assert find_swaps(params, opt) == [True, True, False]
    params[0].requires_grad_(False)
    params[0].grad = None
    assert find_swaps(params, opt) == [False] * 3


@native
@pytest.mark.parametrize("sizes", [(LARGE, SMALL), (LARGE, SMALL, SMALL)], ids=["exchanged", "in place"])
@pytest.mark.parametrize("absent", [0, 1])
def test_the_second_pass_may_have_fewer_gradients(absent: int, sizes: tuple[int, ...]) -> None:
    """The parameters with a second gradient would by themselves lead to a different choice."""
    params, plain = make_params(sizes), make_params(sizes)
    optimizers = [FusedSAM(p, SGD, lr=0.1, momentum=0.9, rho=0.2, assume_no_alias=p is params) for p in (params, plain)]
    old_weights, places_before = copies(params), places(params)
    for step in range(2):
        for opt, opt_params in zip(optimizers, (params, plain), strict=True):
            backward(opt_params, step)
            opt.first_step(zero_grad=True)
            backward(opt_params, step)
            opt_params[absent].grad = None
            opt.second_step(zero_grad=True)
    assert same_bits(params, plain) and places(params) == places_before
    assert same_bits([params[absent]], [old_weights[absent]]) and not same_bits(params[2 - len(sizes) :], old_weights)


@pytest.mark.parametrize(
    "sizes", [[0], [0, 0], [1], [MIN_MEAN_NUMEL_CPU - 1], [MIN_MEAN_NUMEL_CPU, MIN_MEAN_NUMEL_CPU - 1, 0]]
)
def test_what_does_not_pay(sizes: list[int]) -> None:
    assert not worth_swapping([torch.empty(n) for n in sizes])
    assert worth_swapping([torch.empty(MIN_MEAN_NUMEL_CPU) for _ in range(1 + len(sizes))])


def test_what_pays_on_a_gpu_follows_from_its_prediction() -> None:
    sizes = (MIN_MEAN_NUMEL_CUDA, MIN_MEAN_NUMEL_CUDA - 1)
    on_gpu: Any = [SimpleNamespace(is_cuda=True, numel=lambda n=n: n) for n in sizes]
    assert worth_swapping(on_gpu[:1]) and not worth_swapping(on_gpu)
    seconds, bandwidth = 2.4e-6, 4.3e12  # duration of a swap on the host; speed of a large copy on an H200
    assert 2 ** round(math.log2(seconds * bandwidth / 4)) == MIN_MEAN_NUMEL_CUDA


@native
@pytest.mark.parametrize("side", SIDES)
def test_the_memory_is_the_same(side: str) -> None:
    weights = copies(make_params(SIDES[side]))

    def build(initial: Sequence[Tensor]) -> OptimizerStepper:
        return OptimizerStepper(initial, lambda p: FusedSAM(p, SGD, lr=0.1, momentum=0.9, assume_no_alias=True))

    peak = memory.peak_extra_bytes(Contender("", "", build), weights, Prepared(weights))  # type: ignore[arg-type]
    assert peak / sum(SIDES[side]) == pytest.approx(8, rel=0.01)
