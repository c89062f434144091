"""`stochastic_rounding=True`: half-precision weights at the perturbed point, over steps and after a checkpoint."""

import pytest
import torch

import fastsam


def made(dtype: torch.dtype = torch.bfloat16, stochastic: bool = True, rho: float = 0.01) -> tuple:
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(40, 50, generator=generator).to(dtype))
    gradient = torch.randn(40, 50, generator=generator).to(dtype)
    optimizer = fastsam.FusedSAM([weight], rho=rho, lr=0.1, stochastic_rounding=stochastic)
    return weight, gradient, optimizer


def perturbations(weight, gradient, optimizer, count: int) -> list[torch.Tensor]:
    """Return the change of the weights in each of `count` first passes that are restored."""
    before, found = weight.detach().clone(), []
    for _ in range(count):
        weight.grad = gradient.clone()
        with optimizer.perturbed():
            found.append(weight.detach().float() - before.float())
        assert torch.equal(weight, before)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_perturbation_is_the_intended_one(dtype: torch.dtype) -> None:
    """A radius far below the weights' last place: rounding to nearest loses it, on average stochastic rounding does
    not."""
    intended = made(dtype)[1].float()
    intended *= 0.01 / intended.norm()

    def gain(found: torch.Tensor) -> float:
        return (found.flatten().dot(intended.flatten()) / intended.square().sum()).item()

    nearest = perturbations(*made(dtype, stochastic=False), 1)[0]
    mean = torch.stack(perturbations(*made(dtype), 300)).mean(0)
    assert abs(gain(mean) - 1) < 0.1
    assert abs(gain(nearest) - 1) > 0.1


def test_every_perturbation_has_noise_of_its_own_and_a_run_can_be_repeated() -> None:
    first, again = perturbations(*made(), 3), perturbations(*made(), 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


def test_full_precision_takes_no_notice() -> None:
    found = [perturbations(*made(torch.float32, stochastic), 1)[0] for stochastic in (True, False)]
    assert torch.equal(*found)
