"""The variants of SAM: each against its paper's equations in float64, written without fastsam; and the promises of a
step."""

import math

import pytest
import torch
from torch import nn

from fastsam import GSAM, MSAM, SAM, FusedSAM, backend, backends
from fastsam.optim.variants import LastGradient, VaSSO
from tests.helpers.crosses import one_in
from tests.helpers.sam_oracle import copies, make_parameters, same_bits
from tests.helpers.variant_cases import (
    ALPHA,
    BASES,
    CASES,
    RHO,
    PaperGSAM,
    flat,
    like,
    loop,
    make_fused,
    problem,
)

LIMIT = 0.3  # of a gradient's norm; most steps of the problem reach it


@pytest.mark.parametrize(("name", "base"), one_in(2, CASES, BASES))
def test_a_variant_is_its_papers(name: str, base: str, backend: backends.Backend) -> None:
    """Without a limit, and with one, which clips the combined gradient."""
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    case, ends = CASES[name], []
    if base not in case.bases:
        pytest.skip("the variant does not have this base")
    for limit in (None, LIMIT):
        ends.append(loop(case.paper(), base, 6, limit or math.inf))
        weights = make_fused(case.sam, base, 6, backend.name, max_grad_norm=limit).params
        for param, expected in zip(weights, ends[-1], strict=True):
            torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-11)
    assert not any(torch.allclose(p, q, rtol=1e-3) for p, q in zip(*ends, strict=True)), "the limit was not reached"


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["sgd", "adamw", "nadam"])
def test_steps_between_are_the_bases(base: str, dtype: torch.dtype, exclusive: bool, backend: object) -> None:
    """A step after a perturbed one has the bits of a step with rho = 0, and takes over half-precision weights that were
    written outside of it."""
    if exclusive and dtype != torch.float32:
        pytest.skip("the promise of `exclusive` forbids such writes")
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    interval_training, plain_training = (
        make_fused(SAM(RHO, interval=n), base, 1, backend.name, dtype, assume_no_alias=exclusive) for n in (4, 1)
    )
    plain_training.opt.param_groups[0]["rho"] = 0.0
    for training in (interval_training, plain_training):
        training.steps(range(1, 3))
        with torch.no_grad():
            training.params[0].data.mul_(0.5)
        training.steps(range(3, 4))
    assert same_bits(interval_training.params, plain_training.params)


@pytest.mark.parametrize("sam", [SAM(RHO, interval=3), MSAM(RHO), LastGradient(RHO)], ids=lambda s: type(s).__name__)
def test_weights_with_gaps_that_somebody_writes(sam: SAM, backend: backends.Backend) -> None:
    """A step that begins where the weights are reads them, and not the dense copy of them that the last step left."""
    ends = []
    for gaps in (False, True):
        room = torch.linspace(-1, 1, 48, device=backend.device).reshape(6, 8)
        w = nn.Parameter(room[:, :3] if gaps else room[:, :3].clone())
        opt = FusedSAM([w], torch.optim.SGD, variant=sam, lr=0.1, momentum=0.9, backend=backend.name)
        for _ in range(5):
            with opt.evaluating(), torch.no_grad():
                w.mul_(0.5)
            for _ in range(1 + opt.perturbs):
                opt.zero_grad()
                w.square().sum().backward()
                opt.first_step() if opt.perturbs and not opt.is_perturbed else None
            opt.second_step()
        ends.append(w.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("base", ["sgd", "nadam"])
def test_a_first_gradient_that_is_not_finite_changes_nothing(base: str) -> None:
    params, opt = make_fused(GSAM(RHO, alpha=ALPHA), base, 2)
    old_weights = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.full_like(p, torch.inf)
    opt.first_step()
    for p in params:
        p.grad = torch.ones_like(p)
    opt.second_step()
    assert all(map(torch.equal, old_weights, params))


def test_parameters_without_a_gradient_in_one_of_the_passes() -> None:
    start, _ = problem()
    params = [nn.Parameter(p) for p in start]
    opt = FusedSAM(params, torch.optim.SGD, variant=GSAM(RHO, alpha=ALPHA), lr=1.0)
    old_weights = [p.detach().clone() for p in params]
    for value in (5.0, None):  # the field of first gradients was full, and then no parameter has a gradient
        for p in params:
            p.grad = None if value is None else torch.full_like(p, value)
        opt.first_step()
        opt.restore()
    g = [torch.full_like(p, 2.0) for p in params]
    params[0].grad, params[1].grad, params[2].grad = g[0].clone(), g[1].clone(), None
    opt.first_step(zero_grad=True)
    params[1].grad, params[2].grad = g[1].clone(), g[2].clone()
    opt.second_step()
    mixture = PaperGSAM().mix(flat([g[1], torch.zeros_like(g[2])]), flat(g[1:]))
    two = like(mixture, g[1:])
    assert torch.equal(params[0], old_weights[0])
    torch.testing.assert_close(params[1].detach(), old_weights[1] - two[0])
    torch.testing.assert_close(params[2].detach(), old_weights[2] - two[1])


# Every case compiles for seconds. With intervals torch compiles both kinds of step once, for all steps.
@pytest.mark.skipif(backend("cpu") != "native", reason="whole graphs need the compiled kernels")
@pytest.mark.parametrize(
    "name", ["gsam", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "gsam")]
)
def test_a_compiled_step_is_the_same(name: str) -> None:
    torch._dynamo.reset()  # drop what other tests have compiled
    sam, base = CASES[name].sam, CASES[name].bases[0]
    (params, opt), eager = make_fused(sam, base, 1), make_fused(sam, base, 13)  # state is made in an ordinary step
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
    for weights, expected in zip(params, eager.params, strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


# --- what they remember ---


def test_a_parameter_without_a_gradient_keeps_what_it_remembers() -> None:
    params = make_parameters([(4,), (3,)], torch.float32)
    opt = FusedSAM(params, lr=0.1, variant=VaSSO(theta=0.5))
    for grads in ((1.0, 2.0), (3.0, None), (None, None)):
        for _ in range(2):
            for p, g in zip(params, grads, strict=True):
                p.grad = None if g is None else torch.full_like(p, g)
            (opt.second_step if opt.is_perturbed else opt.first_step)()
    memories = [opt.state_dict()["state"][i]["sam_memory"] for i in range(2)]
    assert memories[0].tolist() == [0.5 * 0.5 + 0.5 * 3.0] * 4 and memories[1].tolist() == [1.0] * 3


def test_first_gradients_with_inf_are_not_remembered() -> None:
    training = make_fused(CASES["friendly"].sam, "sgd", 2)
    old_memories = copies([e["sam_memory"] for e in training.opt.state_dict()["state"].values()])
    for p in training.params:
        p.grad = torch.full_like(p, torch.inf)
    training.opt.first_step()
    training.backward(2)
    training.opt.second_step()
    assert same_bits(old_memories, [e["sam_memory"] for e in training.opt.state_dict()["state"].values()])


def test_what_is_remembered_has_the_scale_of_no_step() -> None:
    """Resumed with another scale of the GradScaler, which the second process does not know before its first step."""
    ends = []
    for resumes in (False, True):
        training = make_fused(CASES["friendly"].sam, "sgd", 0)
        scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
        for t in range(6):
            if resumes and t == 4:
                new_training = make_fused(CASES["friendly"].sam, "sgd", 0)
                with torch.no_grad():
                    for p, q in zip(new_training.params, training.params, strict=True):
                        p.copy_(q)
                new_training.opt.load_state_dict(training.opt.state_dict())
                scaler_state, scaler = scaler.state_dict(), torch.amp.GradScaler("cpu", 2.0**4, growth_interval=3)
                scaler.load_state_dict(scaler_state)
                training = new_training
            for _ in range(2):
                training.opt.zero_grad()
                scaler.scale(problem()[1](training.params, t)).backward()
                training.opt.is_perturbed or training.opt.first_step()
            scaler.step(training.opt)
            scaler.update()
        ends.append(training.params)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("source", "loads", "is_refused"),
    [
        ("looksam", "gsam", True),
        ("gsam", "looksam", False),
        ("wsam", "every other", False),
        ("looksam", "looksam", False),
    ],
)
def test_the_state_of_another_variant(source: str, loads: str, is_refused: bool) -> None:
    state = make_fused(CASES[source].sam, "sgd", 2).opt.state_dict()
    training = make_fused(CASES[loads].sam, "sgd", 1)
    old_weights = copies(training.params)
    if is_refused:
        with pytest.raises(ValueError, match="of LookSAM, which keeps a vector, .* optimizer's is GSAM"):
            training.opt.load_state_dict(state)
    else:
        training.opt.load_state_dict(state)
    assert same_bits(old_weights, copies(training.params))
    training.steps(range(1, 3))


def test_the_state_of_another_variant_between_its_passes() -> None:
    training, other_training = make_fused(CASES["gsam"].sam, "sgd", 1), make_fused(CASES["wsam"].sam, "sgd", 0)
    training.backward(1)
    training.opt.first_step()
    with pytest.raises(ValueError, match="of GSAM, between its two passes"):
        other_training.opt.load_state_dict(training.opt.state_dict())
