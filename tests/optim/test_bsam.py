"""bSAM: its paper, what is drawn, where the weights are and what it keeps."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from fastsam import BayesNewton, FusedSAM, backends
from fastsam.optim import sampled
from fastsam.optim.variants import BSAM
from tests.helpers.bsam_cases import OPTIONS, SAMPLES, bsam, paper
from tests.helpers.crosses import one_in
from tests.helpers.interrupting import KERNELS, Interrupt, Tracer
from tests.helpers.sam_oracle import copies, make_parameters, same_bits
from tests.helpers.variant_cases import RHO, Training, flat, problem

NO_NOISE = 1e30
SAMPLED = sampled.__file__


def scale_of(training: Training) -> torch.Tensor:
    return flat([entry["scale"] for entry in training.opt.state_dict()["state"].values()])


# --- the paper ---


@pytest.mark.parametrize("maximize", [False, True])
def test_the_variant_is_its_papers(maximize: bool, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    training = bsam(6, maximize=maximize, backend=backend.name)
    w, s = paper(6, maximize=maximize)
    torch.testing.assert_close(flat(copies(training.params)), w, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(scale_of(training), s, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_the_variant_in_lower_precision(dtype: torch.dtype, part: float, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    found = flat([p.detach().double() for p in bsam(6, dtype, backend=backend.name).params])
    expected, start = paper(6)[0], flat(problem()[0])
    assert (found - expected).norm() < part * (expected - start).norm()


def test_without_noise_and_radius_it_is_the_class_by_itself() -> None:
    training = bsam(0, sam=BSAM(0.0, samples=NO_NOISE), maximize=True)
    params = [nn.Parameter(p) for p in problem()[0]]
    own = BayesNewton(params, maximize=True, **OPTIONS)
    for t in range(4):
        training.steps(range(t, t + 1))

        def closure(t: int = t) -> torch.Tensor:
            own.zero_grad()
            value = problem()[1](params, t)
            value.backward()
            return value

        own.step(closure)
        for p, q in zip(training.params, params, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    params[0].grad, before = None, copies(params[:1])
    own.step()
    assert same_bits(before, params[:1])


# --- the draw ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_drawn_with_the_variance_of_the_scale(dtype: torch.dtype) -> None:
    """Of 40,000 weights, half of them with four times the scale."""
    params = [nn.Parameter(torch.zeros(200, 100, dtype=dtype)), nn.Parameter(torch.zeros(20_000, dtype=dtype))]
    groups = [{"params": params[:1], "scale": 2.0}, {"params": params[1:], "scale": 8.0}]
    opt = FusedSAM(groups, BayesNewton, sam=BSAM(samples=1000, seed=3), lr=0.1)
    opt.sample()
    for p, scale in zip(params, (2.0, 8.0), strict=True):
        drawn = p.detach().double()
        assert float(drawn.var()) == pytest.approx(1 / (1000 * scale), rel=0.05)
        assert abs(float(drawn.mean())) < 4 * float(drawn.std()) / 20_000**0.5
    assert (
        abs(float(torch.corrcoef(torch.stack([params[0].detach().flatten(), params[1].detach()]).double())[0, 1]))
        < 0.05
    )


def test_a_scale_that_somebody_puts_there_is_the_one_that_draws() -> None:
    params = [nn.Parameter(torch.zeros(10_000)) for _ in range(2)]
    opt = FusedSAM(params, BayesNewton, sam=BSAM(samples=1.0), lr=0.1)
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.sample()
    opt.first_step()
    opt.second_step()
    opt.state[params[1]]["scale"] = torch.full_like(params[1], 100.0)
    opt.sample()
    stds = [float(p.detach().std()) for p in params]
    assert stds == pytest.approx([1.0, 0.1], rel=0.05)


def test_what_is_drawn_is_of_the_step_and_the_seed() -> None:
    def drawn(training: Training) -> torch.Tensor:
        training.opt.sample()
        found = flat(copies(training.params))
        training.opt.restore()
        return found

    training, other = bsam(1), bsam(1, sam=BSAM(RHO, samples=SAMPLES, seed=1))
    once = drawn(training) - flat(copies(training.params))
    assert torch.equal(once, drawn(training) - flat(copies(training.params)))
    assert not torch.allclose(once, drawn(other) - flat(copies(other.params)), atol=1e-3)
    training.steps(range(1, 2))
    assert not torch.allclose(once, drawn(training) - flat(copies(training.params)), atol=1e-3)


def test_buckets_of_two_dtypes_are_drawn_apart() -> None:
    params = [nn.Parameter(torch.zeros(1000, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    FusedSAM(params, BayesNewton, sam=BSAM(samples=10), lr=0.1).sample()
    assert not torch.allclose(params[0].double(), params[1], atol=0.01)


# --- where the weights are ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_clean_between_steps_and_come_back(dtype: torch.dtype) -> None:
    training = bsam(2, dtype)
    params, opt = training
    clean = copies(params)
    opt.eval()
    assert same_bits(clean, params) and not opt.is_perturbed
    opt.train()
    opt.sample()
    assert not same_bits(clean, params) and not opt.is_perturbed and opt.phase == "first" and opt.two_passes
    saved = [entry["unperturbed"] for entry in opt.state_dict()["state"].values()]
    assert same_bits(clean, saved)
    training.backward(2)
    opt.first_step()
    assert opt.is_perturbed and opt.phase == "second"
    assert same_bits(clean, [entry["unperturbed"] for entry in opt.state_dict()["state"].values()])
    opt.restore()
    assert same_bits(clean, params)


def test_the_perturbation_is_the_first_gradient_over_the_scale() -> None:
    training = bsam(2)
    clean, s = flat(copies(training.params)), scale_of(training)
    training.opt.sample()
    training.backward(2)
    g = flat([p.grad for p in training.params if p.grad is not None])
    training.opt.first_step()
    torch.testing.assert_close(flat(copies(training.params)) - clean, RHO * g / s)
    assert training.opt.grad_norm is not None
    torch.testing.assert_close(training.opt.grad_norm, g.norm())


def test_two_halves_are_the_closures_step() -> None:
    whole, training = bsam(4), bsam(0)
    for t in range(4):
        training.opt.sample()
        training.backward(t)
        training.opt.first_step(zero_grad=True)
        training.backward(t)
        training.opt.second_step()
    assert same_bits(whole.params, training.params)


def test_what_fails_leaves_the_weights() -> None:
    training = bsam(2)
    clean = copies(training.params)
    for fails in (1, 2):
        calls: list[int] = []

        def closure(fails: int = fails, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            if len(calls) == fails:
                raise KeyError("mine")
            value = problem()[1](training.params, 2)
            value.backward()
            return value

        with pytest.raises(KeyError):
            training.opt.step(closure)
        assert same_bits(clean, training.params)
    assert same_bits(bsam(4).params, training.steps(range(2, 4)).params)


@pytest.mark.parametrize(("backend", "each"), [("auto", 3), ("foreach", 17)])
def test_an_interrupt_inside_the_draw_leaves_the_weights(backend: str, each: int) -> None:
    """At lines of the moves, those of the kernels included."""
    with Tracer(None, (KERNELS, SAMPLED)) as tracer:
        bsam(1, backend=backend).opt.sample()
    lines = tracer.lines
    for line in range(0, lines, each):
        training = bsam(1, torch.bfloat16 if line % 2 else torch.float32, backend=backend)
        clean = copies(training.params)
        try:
            with Tracer(line, (KERNELS, SAMPLED)):
                training.opt.sample()
        except Interrupt:
            assert same_bits(clean, training.params)


def test_weights_with_gaps_and_in_another_order(backend: backends.Backend) -> None:
    """And a group that comes later, with a radius of its own: the same weights as dense ones have."""
    ends = []
    for dense in (False, True):
        made = [torch.linspace(-1, 1, 48).reshape(6, 8)[:, :3], torch.linspace(-1, 1, 54).reshape(2, 3, 3, 3)]
        made = [t.contiguous() if dense else t for t in (made[0], made[1].to(memory_format=torch.channels_last))]
        if dense:
            made[1] = made[1].contiguous()
        params = [nn.Parameter(t.to(backend.device)) for t in made] + [
            nn.Parameter(torch.ones(5, device=backend.device))
        ]
        opt = FusedSAM(params[:2], BayesNewton, sam=BSAM(RHO, samples=SAMPLES), backend=backend.name, **OPTIONS)

        def closure(params: list[nn.Parameter] = params, opt: FusedSAM = opt) -> torch.Tensor:
            loss = torch.stack([(p.square() + p.sin()).sum() for p in params]).sum()
            loss.backward()
            return loss

        opt.step(closure)
        params[2].grad = None
        opt.add_param_group({"params": params[2:], "rho": 0.9, "scale": 3.0})
        for _ in range(2):
            opt.step(closure)
        ends.append([p.detach().contiguous() for p in params])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# --- gradients that are not there, or not finite ---


def test_parameters_without_a_gradient_in_one_of_the_passes() -> None:
    params = make_parameters([(4,), (3,), (2,), (5,)], torch.float64)
    params[3].requires_grad_(False)
    opt = FusedSAM(params, BayesNewton, sam=BSAM(RHO, samples=NO_NOISE), **OPTIONS)
    before = copies(params)
    opt.sample()
    params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.ones_like(params[1])
    opt.first_step(zero_grad=True)
    assert same_bits(before[2:], params[2:]) and not same_bits(before[:2], params[:2])
    params[1].grad, params[2].grad = torch.ones_like(params[1]), torch.ones_like(params[2])
    opt.second_step()
    assert same_bits([before[0], before[3]], [params[0], params[3]])
    (b1, b2), delta, s0 = OPTIONS["betas"], OPTIONS["weight_decay"], OPTIONS["scale"]
    for i, g1 in ((1, 1.0), (2, 0.0)):
        m = (1 - b1) * (1 + delta * before[i])
        s = b2 * s0 + (1 - b2) * (s0**0.5 * g1 + delta + OPTIONS["damping"])
        torch.testing.assert_close(params[i].detach(), before[i] - OPTIONS["lr"] * m / s)


@pytest.mark.parametrize("second", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(second: bool, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    training = bsam(2, backend=backend.name, check_finite=True)
    params, opt = training
    before, s = copies(params), scale_of(training)
    opt.sample()
    for p in params:
        p.grad = torch.full_like(p, 1.0 if second else torch.inf)
    opt.first_step()
    assert same_bits(before, params) is not second
    for p in params:
        p.grad = torch.full_like(p, torch.inf if second else 1.0)
    opt.second_step()
    assert same_bits(before, params) and torch.equal(s, scale_of(training))
    assert torch.isfinite(flat(training.steps(range(3, 4)).params)).all()


# --- what is kept ---


@pytest.mark.parametrize(
    ("moment", "how", "after", "dtype"),
    one_in(
        3, ["idle", "sampled", "between"], ["state dict", "pickle", "deepcopy"], [0, 2], [torch.float32, torch.bfloat16]
    ),
    ids=str,
)
def test_a_step_goes_on_where_it_was_saved(moment: str, how: str, after: int, dtype: torch.dtype) -> None:
    whole, training = bsam(5, dtype), bsam(after, dtype)
    if moment != "idle":
        training.opt.sample()
    if moment == "between":
        training.backward(after)
        training.opt.first_step(zero_grad=True)
    if how == "deepcopy":
        training = copy.deepcopy(training)
    else:
        file = io.BytesIO()
        params, opt = training
        torch.save(training if how == "pickle" else opt.state_dict(), file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
        training = found if how == "pickle" else bsam(0, dtype)
        if how == "state dict":
            with torch.no_grad():
                for p, old in zip(training.params, params, strict=True):
                    p.copy_(old)
            training.opt.load_state_dict(found)
    if moment == "sampled":
        training.backward(after)
        training.opt.first_step(zero_grad=True)
    if moment != "idle":
        training.backward(after)
        training.opt.second_step()
    training.steps(range(after + (moment != "idle"), 5))
    assert same_bits(training.params, whole.params)


def test_the_state_is_that_of_the_class() -> None:
    training = bsam(3)
    entry = training.opt.state_dict()["state"][0]
    assert set(entry) == {"exp_avg", "scale"}
    own = BayesNewton([nn.Parameter(p) for p in problem()[0]], **OPTIONS)
    own.load_state_dict(training.opt.base_optimizer.state_dict())
    torch.testing.assert_close(own.state[own.param_groups[0]["params"][0]]["scale"], entry["scale"])
