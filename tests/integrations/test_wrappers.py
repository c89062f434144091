"""Optimizers that wrap other optimizers, from their libraries: as FusedSAM's base, and around it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fastsam import FusedSAM, variants
from tests.helpers.libraries import library
from tests.helpers.sam_oracle import same_bits

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
OPTIONS = {"lr": 0.1, "momentum": 0.9}


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def private(model: nn.Module, opt: FusedSAM, **options: Any) -> tuple[nn.Module, Any]:
    """Return model and optimizer as Opacus wraps them, in full batches.

    Without noise and clipping the gradient is the ordinary one.
    """
    opacus = library("opacus")
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "poisson_sampling": False} | options
    data = DataLoader(TensorDataset(X), batch_size=len(X))
    module, wrapper, _ = opacus.PrivacyEngine().make_private(module=model, optimizer=opt, data_loader=data, **options)
    return module, wrapper


@pytest.mark.shows("Opacus", "`DPOptimizer` as the base", "clear error")
def test_a_private_base_is_refused() -> None:
    library("opacus")
    from opacus.optimizers import DPOptimizer

    def base(groups: Any, **options: Any) -> DPOptimizer:
        return DPOptimizer(SGD(groups, **options), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)

    with pytest.raises(ValueError, match=r"DPOptimizer wraps another optimizer \(SGD\).*first pass"):
        FusedSAM(tiny_model().parameters(), base, lr=0.1)


@pytest.mark.shows("Opacus", "`make_private` with a FusedSAM of two passes", "clear error")
@pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Full backward hook", "ignore:Using a non-full backward"
)
def test_two_passes_inside_a_private_optimizer_are_refused() -> None:
    """Opacus would add the gradients of both passes, through its wrapper and with separate first and second steps."""
    model = tiny_model()
    opt = FusedSAM(model.parameters(), SGD, rho=0.3, **OPTIONS)
    module, wrapper = private(model, opt)
    start = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        loss = loss_of(module, X)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="step.. has nothing to do"):
        wrapper.step(closure)
    wrapper.zero_grad()
    closure()
    with pytest.raises(ValueError, match=r"DPOptimizer of Opacus.*variant of one pass"):
        opt.first_step(zero_grad=True)
    assert same_bits(list(model.parameters()), start)


@pytest.mark.shows("Opacus", "`make_private` with a variant of one pass (`MSAM`)", "works")
@pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Full backward hook", "ignore:Using a non-full backward"
)
def test_one_pass_inside_a_private_optimizer() -> None:
    ends = []
    for is_private in (True, False):
        model = tiny_model()
        opt = FusedSAM(model.parameters(), SGD, variant=variants.MSAM(rho=0.3), **OPTIONS)
        module, active_opt = private(model, opt) if is_private else (model, opt)
        for _ in range(4):
            active_opt.zero_grad()
            loss_of(module, X).backward()
            active_opt.step()
        opt.eval()
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.shows("pytorch-optimizer", "`Lookahead` as the base", "clear error")
def test_lookahead_as_the_base_is_refused() -> None:
    lookahead = library("pytorch_optimizer").Lookahead
    with pytest.raises(ValueError, match=r"Lookahead wraps another optimizer \(SGD\).*around: Lookahead\(FusedSAM"):
        FusedSAM(tiny_model().parameters(), lambda groups, **o: lookahead(SGD(groups, **o), k=2), lr=0.1)


@pytest.mark.shows("pytorch-optimizer", "`Lookahead(FusedSAM(...))` with `step(closure)`", "works")
def test_lookahead_around() -> None:
    """Compare with the rule of Lookahead, written by hand around the steps of a plain loop."""
    model, expected = tiny_model(), tiny_model()
    opt = library("pytorch_optimizer").Lookahead(FusedSAM(model.parameters(), SGD, rho=0.3, **OPTIONS), k=2, alpha=0.5)
    inner = FusedSAM(expected.parameters(), SGD, rho=0.3, **OPTIONS)
    slow_weights = [p.detach().clone() for p in expected.parameters()]
    for step in range(4):
        opt.step(lambda: loss_of(model, X).backward())
        inner.step(lambda: loss_of(expected, X).backward())
        if step % 2:
            with torch.no_grad():
                for p, s in zip(expected.parameters(), slow_weights):
                    s.add_(0.5 * (p - s))
                    p.copy_(s)
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), rtol=1e-6, atol=1e-7)
