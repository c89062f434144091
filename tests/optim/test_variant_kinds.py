"""Single variants: special cases, helpers, and comparisons with classes of other libraries."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import MSAM, SAM, FusedSAM, backends
from fastsam.backends import Backend
from fastsam.optim.variants import LESAM, SAMON, WSAM, FriendlySAM, LInfSAM, LookSAM, PreconditionedSAM, VaSSO
from fastsam.step import GradCoefficients
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.variant_cases import BASES, CASES, RHO, Training, flat, like, make_fused, problem


class Part(SAM):
    """A variant that combines only g2, with a weight other than 1."""

    @property
    def coefficients(self) -> GradCoefficients:
        return GradCoefficients(g2=0.25)


class CustomSGD(torch.optim.SGD):
    """An optimizer with its own step, because a subclass may do anything."""


@pytest.mark.parametrize("base", [torch.optim.SGD, CustomSGD], ids=lambda base: base.__name__)
def test_a_weight_of_the_second_gradient_alone(base: type[torch.optim.Optimizer]) -> None:
    """A perturbed step has its learning rate scaled by the weight; an unperturbed step has the whole gradient."""
    start, _ = problem()
    ends = []
    for sam, lr in ((Part(RHO, interval=2), 0.1), (SAM(RHO, interval=2), 0.025)):
        params = [nn.Parameter(p.clone()) for p in start]
        training = Training(params, FusedSAM(params, base, variant=sam, lr=lr))
        for t in range(4):
            training.opt.param_groups[0]["lr"] = lr if training.opt.perturbs else 0.1
            training.steps(range(t, t + 1))
        ends.append(params)
    for result, expected in zip(*ends, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_asam_scales_another_direction_as_it_scales_the_gradient(dtype: torch.dtype) -> None:
    """The weights at the perturbed point: T^2*d over the norm of T*d."""
    params, opt = make_fused(FriendlySAM(RHO, True, 0.1, sigma=0.8, lmbda=0.7), "sgd", 0, dtype=dtype)
    m = torch.zeros(())
    for t in range(3):
        w = flat([p.detach().double() for p in params])
        Training(params, opt).backward(t)
        g = flat([p.grad.double() for p in params if p.grad is not None])
        m = 0.7 * m + 0.3 * g
        d, scale = g - 0.8 * m, w.abs() + 0.1
        opt.first_step()
        perturbed_weights = flat([p.detach().double() for p in params])
        eps = RHO * scale**2 * d / (scale * d).norm()
        assert (perturbed_weights - w - eps).abs().max() < (1e-6 if dtype == torch.float32 else 0.02)
        Training(params, opt).backward(t)
        opt.second_step()


def test_the_radius_of_a_loss_is_both_of_its_kinds_in_these_steps() -> None:
    """The paper's case has both kinds of radius; `rho` bounds it in every group, as a number and as a tensor."""
    training, radii = make_fused(SAM(RHO, rho_fn=LESAM(sigma=8.0)), "sgd", 0), []
    for t in range(6):
        training.backward(t)
        old_weights = flat(copies(training.params))
        training.opt.first_step()
        radii.append(float((flat(copies(training.params)) - old_weights).norm()))
        training.opt.restore()
        training.steps(range(t, t + 1))
        if t == 3:
            training.opt.param_groups[0]["rho"] = torch.tensor(0.01, dtype=torch.float64)
    assert min(radii[:4]) < RHO - 1e-3 and max(radii[:4]) == pytest.approx(RHO)
    assert radii[4:] == pytest.approx([0.01, 0.01])


def test_the_radius_of_a_loss_is_of_the_unscaled_gradient() -> None:
    training, scaler = make_fused(CASES["lesam"].sam, "sgd", 0), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1)
    _, loss = problem()
    for t in range(3):
        training.backward(t)
        norm, start = flat([p.grad for p in training.params if p.grad is not None]).norm(), copies(training.params)
        training.opt.zero_grad()
        scaler.scale(loss(training.params, t)).backward()
        training.opt.first_step(zero_grad=True)
        radius = (flat(copies(training.params)) - flat(start)).norm()
        if t:  # the first step cannot know the scale
            assert float(radius) == pytest.approx(min(8.0 / float(norm), RHO))
        scaler.scale(loss(training.params, t)).backward()
        scaler.step(training.opt)
        scaler.update()


def test_a_radius_of_ones_own() -> None:
    """Any function of rho and the norm, on the device; with another variant's direction."""
    params, opt = make_fused(VaSSO(RHO, rho_fn=lambda rho, norm: rho * norm / (1 + norm)), "sgd", 0)
    Training(params, opt).backward(0)
    old_weights, d = flat(copies(params)), 0.9 * flat([p.grad for p in params if p.grad is not None])
    opt.first_step()
    torch.testing.assert_close(flat(params).detach() - old_weights, RHO * d / (1 + d.norm()))


def test_a_direction_of_ones_own_needs_no_flag() -> None:
    class AveragedSAM(SAM):
        def direction(self, g: torch.Tensor, state: torch.Tensor, next_state: torch.Tensor) -> torch.Tensor:
            return next_state.copy_(torch.lerp(state, g, 0.9))

    assert same_bits(make_fused(AveragedSAM(RHO), "sgd", 3).params, make_fused(VaSSO(RHO), "sgd", 3).params)


@pytest.mark.parametrize("base", [LookSAM, MSAM])
def test_a_direction_that_no_step_would_ask_for_is_refused(base: type[SAM]) -> None:
    with pytest.raises(TypeError, match=f"Own overrides direction, and {base.__name__}"):
        type("Own", (base,), {"direction": VaSSO.direction})


def test_a_norm_is_of_the_second_or_the_largest_degree() -> None:
    with pytest.raises(TypeError, match="norm_degree must be 2 or math.inf, got 1"):
        type("Own", (SAM,), {"norm_degree": 1})
    params, opt = make_fused(LInfSAM(), "sgd", 1)
    opt.param_groups[0]["adaptive"] = True
    old_weights = copies(params)
    Training(params, opt).backward(0)
    with pytest.raises(ValueError, match="adaptive=True in a parameter group"):
        opt.first_step()
    assert same_bits(old_weights, params) and not opt.is_perturbed


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_signs_of_a_gradient_that_is_not_finite_do_not_perturb(value: float) -> None:
    params, opt = make_fused(LInfSAM(), "sgd", 1)
    old_weights = copies(params)
    for p in params:
        p.grad = torch.full_like(p, value)
    opt.first_step()
    assert same_bits(old_weights, params)


def test_signs_keep_no_vector() -> None:
    params, opt = make_fused(LInfSAM(), "sgd", 2)
    assert all(set(entry) <= {"momentum_buffer"} for entry in opt.state_dict()["state"].values())
    assert len(params) == 3


def replace_entries(opt: FusedSAM) -> None:
    for entry in opt.state.values():
        entry["exp_avg_sq"] = torch.full_like(entry["exp_avg_sq"], 4.0)


def load_entries(opt: FusedSAM) -> None:
    other_opt = make_fused(PreconditionedSAM(RHO), "adamw", 2).opt
    replace_entries(other_opt)
    opt.load_state_dict(other_opt.state_dict())


STATE_CHANGES: dict[str, tuple[Callable[[FusedSAM], Any], float]] = {
    "replaced": (replace_entries, 4.0),
    "loaded": (load_entries, 4.0),
    "cleared": (lambda opt: opt.state.clear(), 0.0),
}


@pytest.mark.parametrize("change", STATE_CHANGES)
def test_a_preconditioner_is_the_state_as_it_is(change: str, backend: Backend) -> None:
    """A change of Adam's state counts in the next perturbation. Elements with a second moment of 0 are not divided."""
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    training = make_fused(PreconditionedSAM(RHO, eps=0.5), "adamw", 3, backend.name)
    change_state, v = STATE_CHANGES[change]
    change_state(training.opt)
    for p, size in zip(training.params, (0.0, v, v), strict=True):
        if p in training.opt.state:
            training.opt.state[p]["exp_avg_sq"].fill_(size)
    training.backward(3)
    gradients, old_weights = [p.grad.clone() for p in training.params if p.grad is not None], copies(training.params)
    training.opt.first_step()
    roots = [1.0, 2.5, 2.5] if v else [1.0, 1.0, 1.0]
    d = flat([g / root for g, root in zip(gradients, roots, strict=True)])
    torch.testing.assert_close(flat(copies(training.params)) - flat(old_weights), RHO * d / d.norm())


def test_the_scale_of_a_grad_scaler_changes_no_preconditioned_step() -> None:
    weights = []
    for scale in (1.0, 2.0**12):
        training, scaler = make_fused(PreconditionedSAM(RHO), "adamw", 0), torch.amp.GradScaler("cpu", scale)
        for t in range(4):
            for half in (training.opt.first_step, lambda: scaler.step(training.opt)):  # noqa: B023
                training.opt.zero_grad()
                scaler.scale(problem()[1](training.params, t)).backward()
                half()
            scaler.update()
        weights.append(flat(copies(training.params)))
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.layers = nn.Sequential(nn.Linear(4, 6), norms[0], nn.Linear(6, 6), norms[1], nn.Linear(6, 1))


def test_sam_on_perturbs_normalisation_layers_alone_by_the_whole_radius(backend: backends.Backend) -> None:
    torch.manual_seed(0)
    net = Net().to(backend.device)
    opt = FusedSAM(SAMON.groups(net), torch.optim.SGD, variant=SAMON(rho=0.5), lr=0.1, backend=backend.name)
    names = [name for name, p in net.named_parameters() if any(p is q for q in opt.param_groups[0]["params"])]
    assert names == [f"layers.{i}.{kind}" for i in (1, 3) for kind in ("weight", "bias")]
    x, plain = torch.randn(16, 4).to(backend.device), copy.deepcopy(net)
    for _ in range(2):
        opt.zero_grad()
        net.layers(x).square().mean().backward()
        old_weights = [p.detach().clone() for p in net.parameters()]
        grads = [p.grad.clone() for p in opt.param_groups[0]["params"]]
        opt.first_step()
        perturbed_params = [p for p, old in zip(net.parameters(), old_weights, strict=True) if not torch.equal(p, old)]
        assert {id(p) for p in perturbed_params} == {id(p) for p in opt.param_groups[0]["params"]}
        length = flat([p - old for p, old in zip(net.parameters(), old_weights, strict=True)]).norm()
        torch.testing.assert_close(length, torch.tensor(0.5).to(length.device))
        assert opt.grad_norm is not None
        torch.testing.assert_close(opt.grad_norm.float(), flat(grads).norm())
        opt.zero_grad()
        net.layers(x).square().mean().backward()
        opt.second_step()
        for p, old in zip(net.parameters(), old_weights, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)
    assert len(list(plain.parameters())) == sum(len(group["params"]) for group in opt.param_groups)


def test_sam_on_without_normalisation_layers() -> None:
    with pytest.raises(ValueError, match="Linear has no parameters in .*LayerNorm.*; name the classes"):
        SAMON.groups(nn.Linear(3, 3))
    assert len(SAMON.groups(nn.Linear(3, 3), (nn.Linear,))[0]["params"]) == 2


def test_a_sharpness_follows_the_schedule_of_the_learning_rate() -> None:
    """The correction after the update has the learning rate of its step, which may be a number or a tensor."""
    ends = []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        training = make_fused(WSAM(RHO, gamma=0.8), "adamw", 2)
        training.opt.param_groups[0]["lr"] = lr
        ends.append(training.steps(range(2, 4)).params)
    start = make_fused(WSAM(RHO, gamma=0.8), "adamw", 2).steps(range(2, 4)).params
    assert same_bits(*ends) and not same_bits(ends[0], start)


def test_a_perturbation_for_each_part_of_a_batch() -> None:
    """m-SAM as the page on variants writes it: the mean of the parts' gradients, each at the point that the part's own
    gradient perturbs to."""
    start, loss = problem()
    training = make_fused(SAM(RHO), "sgd", 0)
    params, opt = training
    clean_params = [p.clone().requires_grad_() for p in start]
    cls, options = BASES["sgd"]
    plain = cls(clean_params, **options)
    for t in range(3):
        parts, sums = [3 * t, 3 * t + 1, 3 * t + 2], None
        for number, part in enumerate(parts):
            training.backward(part)
            opt.first_step(zero_grad=True)
            (loss(params, part) / len(parts)).backward()
            grads = [p.grad for p in params if p.grad is not None]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            if number < len(parts) - 1:
                opt.restore()
        for p, total in zip(params, sums or [], strict=True):
            p.grad = total
        opt.second_step()
        mean = torch.zeros(())
        for part in parts:
            g = flat(torch.autograd.grad(loss(clean_params, part), clean_params))
            eps = like(RHO * g / (g.norm() + 1e-12), clean_params)
            perturbed_params = [(p + e).detach().requires_grad_() for p, e in zip(clean_params, eps, strict=True)]
            mean = mean + flat(torch.autograd.grad(loss(perturbed_params, part), perturbed_params)) / len(parts)
        for p, v in zip(clean_params, like(mean, clean_params), strict=True):
            p.grad = v
        plain.step()
        for p, q in zip(params, clean_params, strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-11)
