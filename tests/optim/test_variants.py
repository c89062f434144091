"""The variants of SAM: each against its paper's equations in float64, written without fastsam; and the promises of a step."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import GSAM, SAM, FusedSAM, backends
from fastsam.optim.variants import LESAM, SAMON, WSAM, FriendlySAM, LookSAM, VaSSO
from tests.helpers.crosses import one_in
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits
from tests.helpers.variant_cases import ALPHA, BASES, CASES, RHO, PaperGSAM, Training, flat, fused, like, loop, problem

every_case = pytest.mark.parametrize("name", CASES)


@every_case
@pytest.mark.parametrize("base", BASES)
def test_a_variant_is_its_papers(name: str, base: str, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    case = CASES[name]
    for found, expected in zip(fused(case.sam, base, 6, backend.name).params, loop(case.paper(), base, 6), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-11)


# Gradients of half precision, and the point where g2 is taken, are rounded to 2^-9; WSAM multiplies their difference by 9, and LookSAM makes it as
# long as the gradient. On the way of three steps: 0.6 % with GSAM, 8 % with these.
@every_case
@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 1e-4), (torch.bfloat16, 0.12)])
def test_a_variant_in_lower_precision(name: str, dtype: torch.dtype, part: float) -> None:
    case = CASES[name]
    found = flat([p.detach().double() for p in fused(case.sam, "sgd", 3, dtype=dtype).params])
    expected, start = flat(loop(case.paper(), "sgd", 3)), flat(problem()[0])
    assert (found - expected).norm() < part * (expected - start).norm()


@every_case
@pytest.mark.parametrize("skips", [False, True], ids=["both passes", "no needless pass"])
@pytest.mark.parametrize("base", ["sgd", "nadam"])
def test_two_halves_are_the_closures_step(name: str, base: str, skips: bool) -> None:
    """With `first_step` in every step, and with a loop that asks."""
    case, passes = CASES[name], 0
    whole, training = fused(case.sam, base, 6), fused(case.sam, base, 0)
    opt = training.opt
    for t, perturbed in enumerate(case.perturbed):
        assert opt.two_passes is perturbed
        if not skips or opt.two_passes:
            training.backward(t)
            before, passes = copies(training.params), passes + 1
            opt.first_step()
            assert opt.is_perturbed and same_bits(before, copies(training.params)) is not perturbed
        training.backward(t)
        opt.second_step()
        passes += 1
        assert not opt.is_perturbed
    assert same_bits(whole.params, training.params)
    assert passes == (case.passes if skips else 12)


@every_case
def test_a_closure_is_called_once_for_every_pass(name: str) -> None:
    case, calls = CASES[name], []
    params, opt = fused(case.sam, "sgd", 0)
    for t in range(6):

        def closure(t: int = t) -> torch.Tensor:
            calls.append(opt.is_perturbed)
            value = problem()[1](params, t)
            value.backward()
            return value

        opt.step(closure)
    assert calls == [second for perturbed in case.perturbed for second in (False, True)[: 1 + perturbed]]


def test_no_gap_is_sam_to_the_last_bit() -> None:
    ends = [fused(sam, "sgd", 3, dtype=torch.float32).params for sam in (GSAM(RHO, alpha=0.0), SAM(RHO))]
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["sgd", "adamw", "nadam"])
def test_a_step_between_is_the_base_optimizers(
    base: str, dtype: torch.dtype, exclusive: bool, backend: backends.Backend
) -> None:
    """After one that perturbed: the bits of a step with rho = 0, and half-precision weights that somebody wrote are taken over."""
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


@every_case
def test_first_gradients_may_be_overwritten_in_place(name: str) -> None:
    """Their owner zeroes and fills the same tensors in the second pass."""
    _, loss = problem()
    params, opt = fused(CASES[name].sam, "sgd", 0)
    for t in range(6):
        opt.zero_grad(set_to_none=False)
        loss(params, t).backward()
        opt.first_step()
        opt.zero_grad(set_to_none=False)
        loss(params, t).backward()
        opt.second_step()
    for found, expected in zip(params, loop(CASES[name].paper(), "sgd", 6), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-11)


@every_case
@pytest.mark.parametrize(
    ("base", "dtype"), [("sgd", torch.float32), ("sgd", torch.bfloat16), ("nadam", torch.float32)], ids=str
)
@pytest.mark.parametrize(
    ("moment", "how", "after"), one_in(3, ["idle", "between"], ["state dict", "pickle", "deepcopy"], [2, 3])
)
def test_a_step_goes_on_where_it_was_saved(
    name: str, base: str, dtype: torch.dtype, moment: str, how: str, after: int
) -> None:
    """Between the two passes too, where the first gradients are a part of the state."""
    sam = CASES[name].sam
    whole, training = fused(sam, base, 6, dtype=dtype), fused(sam, base, after, dtype=dtype)
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
        training = found if how == "pickle" else fused(sam, base, 0, dtype=dtype)
        if how == "state dict":
            with torch.no_grad():
                for p, old in zip(training.params, params, strict=True):
                    p.copy_(old)
            training.opt.load_state_dict(found)
    if moment == "between":
        training.backward(after)
        training.opt.second_step()
    training.steps(range(after + (moment == "between"), 6))
    assert same_bits(training.params, whole.params)


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


# The radius of a loss needs the scale itself, which is not known before the first step: below.
@pytest.mark.parametrize("name", [name for name in CASES if name != "lesam"])
@pytest.mark.parametrize("unscales", [False, True], ids=["the step unscales", "unscaled before it"])
@pytest.mark.parametrize("base", ["sgd", "adamw", "nadam"])
def test_with_a_scaler(name: str, base: str, unscales: bool) -> None:
    """Scaled gradients in both passes, the first ones too, and another scale in every step: the same step. Whoever clips unscales the second
    gradients alone."""
    _, loss = problem()
    params, opt = fused(CASES[name].sam, base, 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for t in range(4):
        opt.zero_grad()
        if opt.two_passes:
            scaler.scale(loss(params, t)).backward()
            opt.first_step(zero_grad=True)
        scaler.scale(loss(params, t)).backward()
        if unscales:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    for found, expected in zip(params, loop(CASES[name].paper(), base, 4), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-7, atol=1e-9)


@every_case
def test_a_scaler_that_skips_a_step_leaves_the_state(name: str) -> None:
    """Second gradients with inf: weights and state stay as they were, and the step after it is as without it."""
    case = CASES[name]
    one, other = fused(case.sam, "sgd", 3), fused(case.sam, "sgd", 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = copies(one.params)
    for p in one.params:
        p.grad = torch.ones_like(p)
    scaler.scale(torch.ones(()))  # makes its scale
    one.opt.first_step()
    for p in one.params:
        p.grad = torch.full_like(p, torch.inf)
    scaler.step(one.opt)
    scaler.update()
    assert same_bits(before, copies(one.params))
    other.opt._engine.steps = one.opt._engine.steps  # a step that was skipped counts
    for training in (one, other):
        training.steps(range(4, 7))
    assert same_bits(one.params, other.params)


@every_case
def test_a_step_that_is_taken_back_leaves_the_state(name: str) -> None:
    whole, training = fused(CASES[name].sam, "sgd", 5), fused(CASES[name].sam, "sgd", 2)
    for t in range(2, 5):
        training.backward(t + 7)
        training.opt.first_step()
        training.opt.restore()
        training.steps(range(t, t + 1))
    assert same_bits(whole.params, training.params)


def test_a_half_of_wsam_is_sam_and_nothing_of_it_the_base_optimizer() -> None:
    half = fused(WSAM(RHO, gamma=0.5, decouple=False), "sgd", 3), fused(SAM(RHO), "sgd", 3)
    none = fused(WSAM(RHO, gamma=0.0), "sgd", 3), fused(SAM(0.0), "sgd", 3)
    for one, other in (half, none):
        assert same_bits(one.params, other.params)


def test_directions_of_the_gradient_alone_are_sams() -> None:
    sam = fused(SAM(RHO), "sgd", 3, dtype=torch.float32).params
    for other in (VaSSO(RHO, theta=1.0), FriendlySAM(RHO, sigma=0.0)):
        assert same_bits(sam, fused(other, "sgd", 3, dtype=torch.float32).params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_asam_scales_another_direction_as_it_scales_the_gradient(dtype: torch.dtype) -> None:
    """The weights at the perturbed point: T^2*d over the norm of T*d."""
    params, opt = fused(FriendlySAM(RHO, True, 0.1, sigma=0.8, lmbda=0.7), "sgd", 0, dtype=dtype)
    m = torch.zeros(())
    for t in range(3):
        w = flat([p.detach().double() for p in params])
        Training(params, opt).backward(t)
        g = flat([p.grad.double() for p in params if p.grad is not None])
        m = 0.7 * m + 0.3 * g
        d, scale = g - 0.8 * m, w.abs() + 0.1
        opt.first_step()
        found = flat([p.detach().double() for p in params])
        eps = RHO * scale**2 * d / (scale * d).norm()
        assert (found - w - eps).abs().max() < (1e-6 if dtype == torch.float32 else 0.02)
        Training(params, opt).backward(t)
        opt.second_step()


def test_a_parameter_without_a_gradient_keeps_what_it_remembers() -> None:
    params = make_parameters([(4,), (3,)], torch.float32)
    opt = FusedSAM(params, lr=0.1, sam=VaSSO(theta=0.5))
    for grads in ((1.0, 2.0), (3.0, None), (None, None)):
        for _ in range(2):
            for p, g in zip(params, grads, strict=True):
                p.grad = None if g is None else torch.full_like(p, g)
            (opt.second_step if opt.is_perturbed else opt.first_step)()
    kept = [opt.state_dict()["state"][i]["sam_memory"] for i in range(2)]
    assert kept[0].tolist() == [0.5 * 0.5 + 0.5 * 3.0] * 4 and kept[1].tolist() == [1.0] * 3


def test_first_gradients_with_inf_are_not_remembered() -> None:
    training = fused(CASES["friendly"].sam, "sgd", 2)
    before = copies([e["sam_memory"] for e in training.opt.state_dict()["state"].values()])
    for p in training.params:
        p.grad = torch.full_like(p, torch.inf)
    training.opt.first_step()
    training.backward(2)
    training.opt.second_step()
    assert same_bits(before, [e["sam_memory"] for e in training.opt.state_dict()["state"].values()])


def test_what_is_remembered_has_the_scale_of_no_step() -> None:
    """Resumed with another scale of the GradScaler, which the second process does not know before its first step."""
    ends = []
    for resumes in (False, True):
        training, scaler = (
            fused(CASES["friendly"].sam, "sgd", 0),
            torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3),
        )
        for t in range(6):
            if resumes and t == 4:
                again = fused(CASES["friendly"].sam, "sgd", 0)
                with torch.no_grad():
                    for p, q in zip(again.params, training.params, strict=True):
                        p.copy_(q)
                again.opt.load_state_dict(training.opt.state_dict())
                saved, scaler = scaler.state_dict(), torch.amp.GradScaler("cpu", 2.0**4, growth_interval=3)
                scaler.load_state_dict(saved)
                training = again
            for _ in range(2):
                training.opt.zero_grad()
                scaler.scale(problem()[1](training.params, t)).backward()
                training.opt.is_perturbed or training.opt.first_step()
            scaler.step(training.opt)
            scaler.update()
        ends.append(training.params)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_the_radius_of_a_loss_is_both_of_its_kinds_in_these_steps() -> None:
    """Else the case beside the paper would show one of them only; and `rho` bounds it in every group, as a number and as a tensor."""
    training, radii = fused(SAM(RHO, radius=LESAM(sigma=8.0)), "sgd", 0), []
    for t in range(6):
        training.backward(t)
        before = flat(copies(training.params))
        training.opt.first_step()
        radii.append(float((flat(copies(training.params)) - before).norm()))
        training.opt.restore()
        training.steps(range(t, t + 1))
        if t == 3:
            training.opt.param_groups[0]["rho"] = torch.tensor(0.01, dtype=torch.float64)
    assert min(radii[:4]) < RHO - 1e-3 and max(radii[:4]) == pytest.approx(RHO)
    assert radii[4:] == pytest.approx([0.01, 0.01])


def test_the_radius_of_a_loss_is_of_the_unscaled_gradient() -> None:
    training, scaler = fused(CASES["lesam"].sam, "sgd", 0), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1)
    _, loss = problem()
    for t in range(3):
        training.backward(t)
        norm, before = flat([p.grad for p in training.params if p.grad is not None]).norm(), copies(training.params)
        training.opt.zero_grad()
        scaler.scale(loss(training.params, t)).backward()
        training.opt.first_step(zero_grad=True)
        radius = (flat(copies(training.params)) - flat(before)).norm()
        if t:  # the first step cannot know the scale
            assert float(radius) == pytest.approx(min(8.0 / float(norm), RHO))
        scaler.scale(loss(training.params, t)).backward()
        scaler.step(training.opt)
        scaler.update()


def test_a_radius_of_ones_own() -> None:
    """Any function of rho and the norm, on the device; with another variant's direction."""
    params, opt = fused(VaSSO(RHO, radius=lambda rho, norm: rho * norm / (1 + norm)), "sgd", 0)
    Training(params, opt).backward(0)
    before, d = flat(copies(params)), 0.9 * flat([p.grad for p in params if p.grad is not None])
    opt.first_step()
    torch.testing.assert_close(flat(params).detach() - before, RHO * d / (1 + d.norm()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        )


def test_sam_on_perturbs_normalisation_layers_alone_by_the_whole_radius(backend: backends.Backend) -> None:
    torch.manual_seed(0)
    net = Net().to(backend.device)
    opt = FusedSAM(SAMON.groups(net), torch.optim.SGD, sam=SAMON(rho=0.5), lr=0.1, backend=backend.name)
    names = [name for name, p in net.named_parameters() if any(p is q for q in opt.param_groups[0]["params"])]
    assert names == [f"layers.{i}.{kind}" for i in (1, 3) for kind in ("weight", "bias")]
    x, plain = torch.randn(16, 4).to(backend.device), copy.deepcopy(net)
    for _ in range(2):
        opt.zero_grad()
        net.layers(x).square().mean().backward()
        before = [p.detach().clone() for p in net.parameters()]
        grads = [p.grad.clone() for p in opt.param_groups[0]["params"]]
        opt.first_step()
        moved = [p for p, old in zip(net.parameters(), before, strict=True) if not torch.equal(p, old)]
        assert {id(p) for p in moved} == {id(p) for p in opt.param_groups[0]["params"]}
        length = flat([p - old for p, old in zip(net.parameters(), before, strict=True)]).norm()
        torch.testing.assert_close(length, torch.tensor(0.5).to(length.device))
        assert opt.grad_norm is not None
        torch.testing.assert_close(opt.grad_norm.float(), flat(grads).norm())
        opt.zero_grad()
        net.layers(x).square().mean().backward()
        opt.second_step()
        for p, old in zip(net.parameters(), before, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)
    assert len(list(plain.parameters())) == sum(len(group["params"]) for group in opt.param_groups)


def test_sam_on_without_normalisation_layers() -> None:
    with pytest.raises(ValueError, match="Linear has no parameters in .*LayerNorm.*; name the classes"):
        SAMON.groups(nn.Linear(3, 3))
    assert len(SAMON.groups(nn.Linear(3, 3), (nn.Linear,))[0]["params"]) == 2


def test_a_sharpness_follows_the_schedule_of_the_learning_rate() -> None:
    """`lr` as a number that somebody changes, and as a tensor: the correction after the update has the learning rate of its step."""
    ends = []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        training = fused(WSAM(RHO, gamma=0.8), "adamw", 2)
        training.opt.param_groups[0]["lr"] = lr
        ends.append(training.steps(range(2, 4)).params)
    start = fused(WSAM(RHO, gamma=0.8), "adamw", 2).steps(range(2, 4)).params
    assert same_bits(*ends) and not same_bits(ends[0], start)


def test_looksam_reuses_nothing_where_there_is_nothing() -> None:
    """Without a perturbation both gradients are the same, so that no part of the second one is orthogonal: steps as of the base optimizer."""
    steps = [fused(sam, "sgd", 3).params for sam in (LookSAM(0.0, k=3, alpha=ALPHA), SAM(0.0, every=3))]
    assert same_bits(*steps)


PEERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "coupled": (WSAM(RHO, gamma=0.8, decouple=False), "WSAM", {"gamma": 0.8, "decouple": False}),
    "decoupled": (WSAM(RHO, gamma=0.8), "WSAM", {"gamma": 0.8}),
    "adaptive": (WSAM(RHO, True, gamma=0.8), "WSAM", {"gamma": 0.8, "adaptive": True}),
    "one tensor": (LookSAM(RHO, k=3, alpha=ALPHA), "LookSAM", {"k": 3, "alpha": ALPHA}),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_beside_pytorch_optimizers_class(name: str, base: str) -> None:
    """Its LookSAM takes norms and projections tensor by tensor, so they agree for one tensor."""
    library = pytest.importorskip("pytorch_optimizer")
    sam, theirs, options = PEERS[name]
    cls, own = BASES[base]
    shapes = [(5, 3)] if theirs == "LookSAM" else [(5, 3), (8,), (2, 2, 2)]
    params, their_params = (make_parameters(shapes, torch.float64) for _ in range(2))
    model = nn.ParameterList(their_params)
    extra = {"model": model} if theirs == "WSAM" else {}
    peer = getattr(library, theirs)(params=their_params, base_optimizer=cls, rho=RHO, **options, **extra, **own)
    opt = FusedSAM(params, cls, sam=sam, **own)
    for step in range(7):
        opt.step(lambda step=step: backward(params, step))
        backward(their_params, step)
        peer.first_step(zero_grad=True)
        backward(their_params, step)
        peer.second_step(zero_grad=True)
    for p, q in zip(params, their_params, strict=True):
        torch.testing.assert_close(
            p, q, rtol=1e-6, atol=1e-7
        )  # coupled, 4*g2 - 3*g1: what differs in the last bit grows


@pytest.mark.parametrize(
    ("saved", "loads", "refused"),
    [
        ("looksam", "gsam", True),
        ("gsam", "looksam", False),
        ("wsam", "every other", False),
        ("looksam", "looksam", False),
    ],
)
def test_the_state_of_another_variant(saved: str, loads: str, refused: bool) -> None:
    state = fused(CASES[saved].sam, "sgd", 2).opt.state_dict()
    training = fused(CASES[loads].sam, "sgd", 1)
    before = copies(training.params)
    if refused:
        with pytest.raises(ValueError, match="of LookSAM, which keeps a vector, .* optimizer's is GSAM"):
            training.opt.load_state_dict(state)
    else:
        training.opt.load_state_dict(state)
    assert same_bits(before, copies(training.params))
    training.steps(range(1, 3))


def test_the_state_of_another_variant_between_its_passes() -> None:
    training, other = fused(CASES["gsam"].sam, "sgd", 1), fused(CASES["wsam"].sam, "sgd", 0)
    training.backward(1)
    training.opt.first_step()
    with pytest.raises(ValueError, match="of GSAM, between its two passes"):
        other.opt.load_state_dict(training.opt.state_dict())


def test_one_bad_gradient_costs_one_step() -> None:
    """A first gradient with inf leaves no weight of the gradients behind, of which the next check would make another skipped step."""
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
@pytest.mark.parametrize(
    "name", [name if name == "gsam" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_compiled_step_is_the_same(name: str) -> None:
    torch._dynamo.reset()  # of what other tests have compiled
    sam = CASES[name].sam
    (params, opt), eager = fused(sam, "sgd", 1), fused(sam, "sgd", 13)  # state is made in an ordinary step
    _, loss = problem()
    first = torch.compile(opt.first_step, fullgraph=True, backend="aot_eager")
    second = torch.compile(opt.second_step, fullgraph=True, backend="aot_eager")
    for t in range(1, 13):
        opt.zero_grad()
        loss(params, t).backward()
        first()
        opt.zero_grad()
        loss(params, t).backward()
        second()
    for found, expected in zip(params, eager.params, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sam": GSAM(), "rho": 0.1}, ValueError, "beside sam"),
        ({"sam": GSAM(), "adaptive": True}, ValueError, "beside sam"),
        ({"sam": GSAM}, TypeError, "sam must be a variant"),
        ({"sam": "gsam"}, TypeError, "sam must be a variant"),
        ({"sam": GSAM(rho=-1.0)}, ValueError, "rho must be 0 or more"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FusedSAM([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1, **options)


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)])
def test_an_interval_that_is_none(every: Any, error: type[Exception]) -> None:
    for variant in (SAM, GSAM):
        with pytest.raises(error, match="every must be .* steps?, got"):
            variant(every=every)


def test_halves_out_of_order_in_a_step_that_does_not_perturb() -> None:
    params = make_parameters([(5, 3)], torch.float32)
    opt = FusedSAM(params, lr=0.1, sam=SAM(every=2))
    with pytest.raises(RuntimeError, match="without first_step"):
        opt.second_step()
    backward(params, 0)
    opt.first_step()
    opt.second_step()
    assert not opt.two_passes
    opt.first_step()
    with pytest.raises(RuntimeError, match="called already"):
        opt.first_step()
    with pytest.raises(RuntimeError, match="between first_step"):
        opt.step(lambda: None)
    opt.restore()
    with pytest.raises(RuntimeError, match="nothing to restore"):
        opt.restore()
    assert not opt.two_passes, "a step that was taken back does not count"
    opt.step()
    assert opt.two_passes


@pytest.mark.parametrize(
    ("variant", "options", "error", "words"),
    [
        (WSAM, {"gamma": 1.0}, ValueError, "gamma must be"),
        (WSAM, {"gamma": -0.1}, ValueError, "gamma must be"),
        (WSAM, {"gamma": float("nan")}, ValueError, "gamma must be"),
        (WSAM, {"decouple": "no"}, TypeError, "decouple must be"),
        (FriendlySAM, {"sigma": -1.0}, ValueError, "sigma must be"),
        (FriendlySAM, {"sigma": float("inf")}, ValueError, "sigma must be"),
        (FriendlySAM, {"lmbda": 1.0}, ValueError, "lmbda must be"),
        (VaSSO, {"theta": 0.0}, ValueError, "theta must be"),
        (VaSSO, {"theta": 1.5}, ValueError, "theta must be"),
        (VaSSO, {"every": 0}, ValueError, "every must be"),
        (LESAM, {"sigma": 0.0}, ValueError, "sigma must be"),
        (LESAM, {"sigma": float("nan")}, ValueError, "sigma must be"),
        (SAM, {"radius": 0.1}, TypeError, "radius must be a function"),
        (LookSAM, {"radius": 0.1}, TypeError, "radius must be a function"),
        (LookSAM, {"k": 0}, ValueError, "k must be 1 or more"),
        (LookSAM, {"k": 2.0}, TypeError, "k must be a whole number"),
        (LookSAM, {"every": 2}, ValueError, "every must be left at 1"),
        (LookSAM, {"alpha": -1.0}, ValueError, "alpha must be 0 or more"),
        (LookSAM, {"alpha": float("inf")}, ValueError, "finite"),
    ],
)
def test_an_option_out_of_its_range(variant: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        variant(**options)


def test_a_base_optimizer_without_a_learning_rate_serves_no_decoupled_sharpness() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None: ...

    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(ValueError, match="WSAM needs a base optimizer with a learning rate"):
        FusedSAM(params, Fixed, sam=WSAM())
    FusedSAM(params, Fixed, sam=WSAM(decouple=False))


@pytest.mark.parametrize("alpha", [-1.0, float("nan"), float("inf")])
def test_a_gap_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        GSAM(alpha=alpha)
