"""`stochastic_rounding=True`: half-precision weights at the perturbed point, over steps and after a checkpoint."""

import pytest
import torch

import fastsam


def make_problem(dtype: torch.dtype = torch.bfloat16, stochastic: bool = True, rho: float = 0.01) -> tuple:
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(40, 50, generator=generator).to(dtype))
    gradient = torch.randn(40, 50, generator=generator).to(dtype)
    optimizer = fastsam.FusedSAM([weight], rho=rho, lr=0.1, stochastic_rounding=stochastic)
    return weight, gradient, optimizer


def perturbations(weight, gradient, optimizer, count: int) -> list[torch.Tensor]:
    """Return the change of the weights in each of `count` first passes that are restored."""
    old_weight, differences = weight.detach().clone(), []
    for _ in range(count):
        weight.grad = gradient.clone()
        with optimizer.perturbed():
            differences.append(weight.detach().float() - old_weight.float())
        assert torch.equal(weight, old_weight)
    return differences


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_perturbation_is_the_intended_one(dtype: torch.dtype) -> None:
    """A radius far below the weights' last place: rounding to nearest loses it, on average stochastic rounding does
    not."""
    expected = make_problem(dtype)[1].float()
    expected *= 0.01 / expected.norm()

    def gain(perturbation: torch.Tensor) -> float:
        return (perturbation.flatten().dot(expected.flatten()) / expected.square().sum()).item()

    nearest = perturbations(*make_problem(dtype, stochastic=False), 1)[0]
    mean = torch.stack(perturbations(*make_problem(dtype), 300)).mean(0)
    assert abs(gain(mean) - 1) < 0.1
    assert abs(gain(nearest) - 1) > 0.1


def test_every_perturbation_has_noise_of_its_own_and_a_run_can_be_repeated() -> None:
    first, second = perturbations(*make_problem(), 3), perturbations(*make_problem(), 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


def test_full_precision_takes_no_notice() -> None:
    results = [perturbations(*make_problem(torch.float32, stochastic), 1)[0] for stochastic in (True, False)]
    assert torch.equal(*results)
