"""Base optimizers that wrap another one, or have modes: refused by name, or served in both modes."""

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import MSAM, SAM, FusedSAM
from fastsam.optim.variants import LastGradient
from tests.helpers.sam_cases import SGD, closure_of
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, make_parameters, same_bits

library = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
Lookahead, ScheduleFreeSGD = library.Lookahead, library.ScheduleFreeSGD


class DPOptimizer(torch.optim.Optimizer):
    """An optimizer like Opacus': groups, state and defaults are the inner optimizer's."""

    def __init__(self, params: Any, lr: float) -> None:
        self.original_optimizer = SGD(params, lr=lr)

    param_groups = property(lambda self: self.original_optimizer.param_groups, lambda self, groups: None)
    state = property(lambda self: self.original_optimizer.state, lambda self, state: None)
    defaults = property(lambda self: self.original_optimizer.defaults, lambda self, defaults: None)


def lookahead(groups: Any, **options: Any) -> Any:
    return Lookahead(SGD(groups, **options), k=2)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lookahead, r"Lookahead wraps another optimizer \(SGD\).*around: Lookahead\(FusedSAM\(params, SGD"),
        (DPOptimizer, r"DPOptimizer wraps another optimizer \(SGD\).*first pass"),
    ],
)
def test_a_wrapper_is_refused_by_name(base: Any, message: str) -> None:
    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(ValueError, match=message):
        FusedSAM(params, base, lr=0.1)


def test_two_passes_over_parameters_of_opacus_are_refused() -> None:
    """Opacus marks its parameters. It would add the gradients of both passes; one-pass variants become private."""
    params = make_parameters([(3,)], torch.float32)
    sam, msam = FusedSAM(params, SGD, lr=0.1), FusedSAM(params, SGD, lr=0.1, momentum=0.9, variant=MSAM(rho=0.1))
    params[0].summed_grad = None  # type: ignore[attr-defined]
    backward(params, 0)
    with pytest.raises(ValueError, match="DPOptimizer of Opacus.*MSAM"):
        sam.first_step()
    msam.step()


def test_lookahead_around_sam_is_lookahead_of_its_steps() -> None:
    """The remedy in the message equals an independent SAM whose weights are interpolated by hand."""
    params: list[nn.Parameter] = make_parameters([(5, 3), (8,)], torch.float64)
    oracle = Oracle([{"params": params}], SGD, {"rho": 0.3, "lr": 0.1})
    slow_weights = [p.detach().clone() for p in oracle.params]
    opt = Lookahead(FusedSAM(params, SGD, rho=0.3, lr=0.1), k=2, alpha=0.5)
    for step in range(4):
        backward(oracle.params, 0)
        oracle.perturb(gradients(oracle.params))
        backward(oracle.params, 0)
        oracle.update(gradients(oracle.params))
        if step % 2:
            with torch.no_grad():
                for p, s in zip(oracle.params, slow_weights):
                    s.add_(0.5 * (p - s))
                    p.copy_(s)
        opt.step(closure_of(params))
    for p, q in zip(params, oracle.params):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sam", [SAM(0.3), LastGradient(0.3)], ids=lambda sam: type(sam).__name__)
def test_the_modes_of_a_schedule_free_base(sam: SAM) -> None:
    params = make_parameters([(5, 3), (8,)], torch.float64)
    opt = FusedSAM(params, ScheduleFreeSGD, variant=sam, lr=0.1)
    base = opt.base_optimizer
    for step in range(3):
        opt.step(closure_of(params))
        train_weights = copies(params)
        with opt.evaluating():
            average_weights = copies(params)
            assert not opt.training
            with opt.evaluating():
                assert same_bits(average_weights, params)
            assert not opt.training, "as it was before"
        assert opt.training
        torch.testing.assert_close(copies(params), train_weights)
        for p, weights in zip(params, average_weights, strict=True):
            y = 0.1 * base.state[p]["z"] + 0.9 * weights
            assert (y - p).norm() <= 1e-9 + (0.3 if opt._engine.one_pass else 0.0)
            assert step == 0 or not torch.allclose(y, weights), "it evaluates its own average"
    backward(params, 0)
    if not opt._engine.one_pass:
        opt.first_step()
        for change in (opt.eval, opt.train):
            with pytest.raises(RuntimeError, match="ScheduleFreeSGD would change the perturbed weights"):
                change()
