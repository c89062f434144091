"""The variants of SAM: each against its paper's equations in float64, written without fastsam; and the promises of a
step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastsam import GSAM, MSAM, SAM, FusedSAM, backends
from fastsam.optim.variants import LastGradient
from tests.helpers.crosses import one_in
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.variant_cases import ALPHA, BASES, CASES, RHO, PaperGSAM, Training, flat, fused, like, loop, problem


@pytest.mark.parametrize(("name", "base"), one_in(2, CASES, BASES))
def test_a_variant_is_its_papers(name: str, base: str, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    case = CASES[name]
    for found, expected in zip(fused(case.sam, base, 6, backend.name).params, loop(case.paper(), base, 6), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["sgd", "adamw", "nadam"])
def test_a_step_between_is_the_base_optimizers(
    base: str, dtype: torch.dtype, exclusive: bool, backend: backends.Backend
) -> None:
    """After one that perturbed: the bits of a step with rho = 0, and half-precision weights that somebody wrote are
    taken over."""
    if exclusive and dtype != torch.float32:
        pytest.skip("the promise of `exclusive` forbids such writes")
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    own, still = (fused(SAM(RHO, every=n), base, 1, backend.name, dtype, exclusive=exclusive) for n in (4, 1))
    still.opt.param_groups[0]["rho"] = 0.0
    for training in (own, still):
        training.steps(range(1, 3))
        with torch.no_grad():
            training.params[0].data.mul_(0.5)
        training.steps(range(3, 4))
    assert same_bits(own.params, still.params)


@pytest.mark.parametrize("sam", [SAM(RHO, every=3), MSAM(RHO), LastGradient(RHO)], ids=lambda sam: type(sam).__name__)
def test_weights_with_gaps_that_somebody_writes(sam: SAM, backend: backends.Backend) -> None:
    """A step that begins where the weights are reads them, and not the dense copy of them that the last step left."""
    ends = []
    for gaps in (False, True):
        room = torch.linspace(-1, 1, 48, device=backend.device).reshape(6, 8)
        w = nn.Parameter(room[:, :3] if gaps else room[:, :3].clone())
        opt = FusedSAM([w], torch.optim.SGD, sam=sam, lr=0.1, momentum=0.9, backend=backend.name)
        for _ in range(5):
            with opt.evaluating(), torch.no_grad():
                w.mul_(0.5)
            for _ in range(1 + opt.two_passes):
                opt.zero_grad()
                w.square().sum().backward()
                opt.first_step() if opt.two_passes and not opt.is_perturbed else None
            opt.second_step()
        ends.append(w.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("base", ["sgd", "nadam"])
def test_a_first_gradient_that_is_not_finite_changes_nothing(base: str) -> None:
    params, opt = fused(GSAM(RHO, alpha=ALPHA), base, 2)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.full_like(p, torch.inf)
    opt.first_step()
    for p in params:
        p.grad = torch.ones_like(p)
    opt.second_step()
    assert all(map(torch.equal, before, params))


def test_parameters_without_a_gradient_in_one_of_the_passes() -> None:
    start, _ = problem()
    params = [nn.Parameter(p) for p in start]
    opt = FusedSAM(params, torch.optim.SGD, sam=GSAM(RHO, alpha=ALPHA), lr=1.0)
    before = [p.detach().clone() for p in params]
    opt.first_step()  # nobody has one: the field of first gradients is there, and empty
    opt.restore()
    g = [torch.full_like(p, 2.0) for p in params]
    params[0].grad, params[1].grad, params[2].grad = g[0].clone(), g[1].clone(), None
    opt.first_step(zero_grad=True)
    params[1].grad, params[2].grad = g[1].clone(), g[2].clone()
    opt.second_step()
    found = PaperGSAM().mixed(flat([g[1], torch.zeros_like(g[2])]), flat(g[1:]))
    two = like(found, g[1:])
    assert torch.equal(params[0], before[0])
    torch.testing.assert_close(params[1].detach(), before[1] - two[0])
    torch.testing.assert_close(params[2].detach(), before[2] - two[1])


def test_one_bad_gradient_costs_one_step() -> None:
    """A first gradient with inf leaves no weight of the gradients behind, of which the next check would make another
    skipped step."""
    params, opt = fused(GSAM(RHO, alpha=ALPHA), "sgd", 1, check_finite=True)
    for p in params:
        p.grad = torch.full_like(p, torch.inf)
    opt.first_step()
    for p in params:
        p.grad = torch.ones_like(p)
    opt.second_step()
    before = copies(params)
    Training(params, opt).steps(range(2, 3))
    assert not same_bits(before, copies(params))


# Every case compiles for seconds; of one with intervals torch compiles both kinds of step, for any number of them.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_is_the_same(name: str) -> None:
    torch._dynamo.reset()  # of what other tests have compiled
    sam = CASES[name].sam
    (params, opt), eager = fused(sam, "sgd", 1), fused(sam, "sgd", 13)  # state is made in an ordinary step
    _, loss = problem()
    first = torch.compile(opt.first_step, fullgraph=True, backend="aot_eager")
    second = torch.compile(opt.second_step, fullgraph=True, backend="aot_eager")
    for t in range(1, 13):
        while opt.phase == "first":
            opt.zero_grad()
            loss(params, t).backward()
            first()
        opt.zero_grad()
        loss(params, t).backward()
        second()
    for found, expected in zip(params, eager.params, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
