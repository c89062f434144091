"""Calling styles, absent gradients, parameters of every layout, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sam_oracle import Oracle, backward, copies, gradients, landscape, make_parameters, same_bits
from tolerances import TOLERANCE, trajectory
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.backends import Backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SGD = torch.optim.SGD
BASES = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05}),
}


def closure_of(params: list[nn.Parameter], zero_grad: Callable[[], None] | None = None) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        if zero_grad is not None:
            zero_grad()
        loss = landscape(params, 0)
        loss.backward()
        return loss

    return closure


# --- the styles are one step ---


@pytest.mark.parametrize("name", BASES)
def test_all_styles_make_the_same_step(name: str, backend: Backend) -> None:
    base, options = BASES[name]

    def run(step: Callable[[FusedSAM, list[nn.Parameter]], None]) -> list[nn.Parameter]:
        params = make_parameters([(5, 3), (8,)], torch.float32, backend.device)
        opt = FusedSAM(params, base, backend=backend.name, **options)
        for _ in range(3):
            step(opt, params)
        return params

    def halves(opt: FusedSAM, params: list[nn.Parameter]) -> None:
        backward(params, 0)
        opt.first_step(zero_grad=True)
        assert all(p.grad is None for p in params)
        landscape(params, 0).backward()
        opt.second_step(zero_grad=True)
        assert all(p.grad is None for p in params)

    def step_without_closure(opt: FusedSAM, params: list[nn.Parameter]) -> None:
        backward(params, 0)
        opt.first_step()
        backward(params, 0)
        assert opt.step() is None

    def inside_perturbed(opt: FusedSAM, params: list[nn.Parameter]) -> None:
        backward(params, 0)
        with opt.perturbed():
            backward(params, 0)
            opt.step()

    def gradients_before_the_closure(opt: FusedSAM, params: list[nn.Parameter]) -> None:
        """As the commonly copied class is called."""
        backward(params, 0)
        opt.step(closure_of(params))

    expected = run(halves)
    for style in (
        step_without_closure,
        inside_perturbed,
        gradients_before_the_closure,
        lambda opt, params: opt.step(closure_of(params)),
        lambda opt, params: opt.step(closure=closure_of(params, opt.zero_grad)),
    ):
        assert same_bits(expected, run(style)), style


def test_step_returns_the_loss_at_the_weights(backend: Backend) -> None:
    params = make_parameters([(5, 3), (8,)], torch.float64, backend.device)
    opt = FusedSAM(params, SGD, rho=1.0, lr=0.1, backend=backend.name)
    expected, losses = landscape(params, 0).item(), []

    def closure() -> Tensor:
        loss = closure_of(params)()
        losses.append(loss.item())
        return loss

    with torch.no_grad():  # a trainer may have switched gradients off
        assert opt.step(closure).item() == expected
    assert losses[0] == expected and losses[1] != expected


def test_the_second_gradient_does_not_contain_the_first(backend: Backend) -> None:
    p = make_parameters([(6,)], torch.float64, backend.device)[0]
    opt = FusedSAM([p], SGD, rho=0.1, lr=1.0, backend=backend.name)
    before = p.detach().clone()

    def closure() -> Tensor:
        loss = p.sum()  # its gradient is 1 everywhere
        loss.backward()
        return loss

    opt.step(closure)
    torch.testing.assert_close(p.detach(), before - 1)


def test_restore_ends_a_step(backend: Backend) -> None:
    params = make_parameters([(5, 3), (8,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    backward(params, 0)
    opt.first_step()
    assert not same_bits(before, params)
    opt.restore()
    assert same_bits(before, params)
    opt.step(closure_of(params))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    rho=st.sampled_from([0.0, 1e-6, 0.05, 3.0, 1e4]),
    adaptive=st.booleans(),
    name=st.sampled_from(["native", "reference"]),
    special=st.booleans(),
)
def test_restoring_is_bitwise(
    seed: int, dtype: torch.dtype, rho: float, adaptive: bool, name: str, special: bool
) -> None:
    """Whatever the weights: large beside small, negative zeros, infinities, NaN."""
    params = make_parameters([(37,), (4, 5)], dtype, seed=seed)
    with torch.no_grad():
        params[0].mul_(1e3)
        if special:
            params[0][:5] = torch.tensor([-0.0, 0.0, math.inf, -math.inf, 1e-7])
            if dtype.itemsize > 2:  # converting a NaN to the master copy and back keeps it a NaN, and not its payload
                params[0][5] = math.nan
    before = copies(params)
    backend_name = name if name == "reference" else "auto"
    for base in (SGD, torch.optim.RMSprop):
        opt = FusedSAM(params, base, rho=rho, adaptive=adaptive, lr=0.1, backend=backend_name)
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        with opt.perturbed():
            pass
        assert same_bits(before, params)
        opt.first_step()
        opt.restore()
        assert same_bits(before, params)


# --- gradients that are not there ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BASES)
def test_gradients_absent_in_either_pass(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Each of five parameters misses its gradient in some passes; it then moves as torch's optimizer moves it."""
    base, options = BASES[name]
    if dtype == torch.bfloat16 and name == "rmsprop":
        pytest.skip("without a fused update there is no master copy")
    params = make_parameters([(5,), (3, 2), (4,), (7,), (2,)], dtype, backend.device)
    opt = FusedSAM(params, base, rho=0.3, backend=backend.name, **options)
    oracle = Oracle([{"params": params}], base, {"rho": 0.3, **options})
    absent = [
        ({1}, {2}),
        ({1, 2}, set()),
        (set(), {0, 4}),
        ({3}, {3}),
        ({0, 1, 2, 3, 4}, {1}),
        ({4}, {0, 1, 2, 3, 4}),
        (set(), set()),
    ]
    for step, (first, second) in enumerate(absent):
        before = copies(params)
        for missing in (first, second):
            backward(params, step)
            for i in missing:
                params[i].grad = None
            if missing is first:
                oracle.perturb(gradients(params))
                opt.first_step()
                for i in missing:
                    assert same_bits([before[i]], [params[i]]), "not perturbed without a gradient"
            else:
                oracle.update(gradients(params))
                opt.second_step()
                for i in missing:
                    assert same_bits([before[i]], [params[i]]), "restored, and not updated, without a second gradient"
    for i, p in enumerate(params):
        weights = opt.state_dict()["state"].get(i, {}).get("master", p)
        rtol, atol = trajectory(dtype, 7)
        torch.testing.assert_close(weights.detach().double().cpu(), oracle.params[i].detach(), rtol=rtol, atol=atol)


def test_no_gradients_at_all(backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, backend=backend.name)
    fired: list[int] = []
    opt.register_step_post_hook(lambda *_: fired.append(1))
    before = copies(params)
    opt.first_step()
    assert opt.grad_norm is not None and opt.grad_norm.item() == 0
    opt.second_step()
    assert same_bits(before, params) and len(fired) == 1 and not opt.state


def test_a_zero_gradient_does_not_perturb(backend: Backend) -> None:
    params = make_parameters([(5,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    params[0].grad = torch.zeros_like(params[0])
    opt.first_step()
    assert same_bits(before, params)
    opt.restore()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_first_gradient_that_is_not_finite_perturbs_nothing(bad: float, backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    backward(params, 0)
    params[1].grad[0] = bad
    opt.first_step()
    assert same_bits(before, params)
    backward(params, 0)
    expected = [b - 0.1 * p.grad for b, p in zip(before, params)]
    opt.second_step()
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach(), e)


@pytest.mark.parametrize("name", BASES)
def test_check_finite_skips_the_update(name: str, backend: Backend) -> None:
    base, options = BASES[name]
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, base, backend=backend.name, check_finite=True, **options)
    opt.step(closure_of(params))
    before, state = copies(params), [v.clone() for e in opt.state.values() for v in e.values()]
    backward(params, 0)
    opt.first_step()
    backward(params, 0)
    params[0].grad[2] = math.nan
    opt.second_step()
    assert same_bits(before, params)
    assert same_bits(state, [v for e in opt.state.values() for v in e.values()])
    opt.step(closure_of(params))
    assert not same_bits(before, params)


def test_large_half_precision_gradients_do_not_overflow_the_norm(backend: Backend) -> None:
    p = nn.Parameter(torch.zeros(1000, dtype=torch.float16, device=backend.device))
    opt = FusedSAM([p], SGD, rho=1.0, lr=0.1, backend=backend.name)
    p.grad = torch.full_like(p, 6e4)  # its square is far outside float16
    opt.first_step()
    torch.testing.assert_close(
        p.detach().float(), torch.full((1000,), 1000**-0.5, device=backend.device), rtol=2**-10, atol=0
    )


def test_half_precision_weights_are_perturbed_in_the_intended_direction(backend: Backend) -> None:
    """bfloat16 rounds a perturbation that is small beside the weights to nothing, or to one unit: it must at least be the rounding of the
    right point, step after step."""
    p = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16, device=backend.device))
    opt = FusedSAM([p], SGD, rho=0.05, lr=1e-3, backend=backend.name)
    master = torch.ones(4000, device=backend.device)
    for step in range(30):  # each step moves the weights by less than bfloat16 resolves
        gradient = torch.randn(4000, generator=torch.Generator().manual_seed(step)).to(backend.device, torch.bfloat16)
        p.grad = gradient
        opt.first_step()
        point = master + 0.05 * gradient.float() / gradient.float().norm()
        torch.testing.assert_close(p.detach().float(), point.bfloat16().float(), rtol=2**-7, atol=0)
        opt.second_step()
        master -= 1e-3 * gradient.float()
        torch.testing.assert_close(opt.state_dict()["state"][0]["master"], master, rtol=1e-5, atol=1e-6)


# --- layouts ---


def awkward_parameters(dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    def fresh(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(
            device, dtype
        )

    return [
        nn.Parameter(fresh(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(fresh(6, 7).t()),
        nn.Parameter(fresh(6, 8)[:, 2:5]),  # gaps in memory
        nn.Parameter(fresh(40)[3:20]),  # an address that is not aligned
        nn.Parameter(fresh(0, 4)),
        nn.Parameter(fresh()),
        nn.Parameter(fresh(2, 3, 4).permute(2, 0, 1)),
        nn.Parameter(fresh(30)[::3]),
    ]


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_of_every_layout(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """The same numbers in contiguous parameters must take the same steps, bit for bit where the order of the norm's sum is the same."""
    base, options = BASES[name]
    if dtype == torch.bfloat16 and name == "rmsprop":
        pytest.skip("without a fused update there is no master copy")
    params = awkward_parameters(dtype, backend.device)
    opt = FusedSAM(params, base, rho=0.3, backend=backend.name, **options)
    oracle = Oracle([{"params": params}], base, {"rho": 0.3, **options})
    gaps = params[2].untyped_storage().nbytes()
    around = torch.tensor([], dtype=dtype, device=backend.device).set_(params[2].untyped_storage()).clone()
    for step in range(4):
        before = copies(params)
        backward(params, step)
        with opt.perturbed():
            assert not same_bits(before, params)
        assert same_bits(before, params)
        oracle.perturb(gradients(params))
        opt.first_step()
        backward(params, step)
        if step == 2:  # a gradient in another order of elements than its parameter
            params[0].grad = params[0].grad.contiguous()
            params[3].grad = params[3].grad.repeat_interleave(2)[::2]
        oracle.update(gradients(params))
        opt.second_step()
    for i, (p, q) in enumerate(zip(params, oracle.params)):
        weights = opt.state_dict()["state"].get(i, {}).get("master", p)
        rtol, atol = trajectory(dtype, 4)
        torch.testing.assert_close(weights.detach().double().cpu(), q.detach(), rtol=rtol, atol=atol)
        for value in opt.state[p].values():
            assert value.shape in (p.shape, torch.Size([]))
    after = torch.tensor([], dtype=dtype, device=backend.device).set_(params[2].untyped_storage())
    mask = torch.ones(gaps // dtype.itemsize, dtype=torch.bool).reshape(6, 8)
    mask[:, 2:5] = False
    assert torch.equal(after[mask.flatten().to(backend.device)], around[mask.flatten().to(backend.device)]), (
        "wrote into the gaps"
    )


def test_gradients_in_another_order_than_contiguous_parameters(backend: Backend) -> None:
    params = make_parameters([(5, 3), (4, 6)], torch.float64, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, adaptive=True, backend=backend.name)
    oracle = Oracle([{"params": params}], SGD, {"lr": 0.1, "momentum": 0.9, "adaptive": True})
    for step in range(3):
        for finish in (False, True):
            backward(params, step)
            params[0].grad = params[0].grad.t().contiguous().t()
            (oracle.update if finish else oracle.perturb)(gradients(params))
            (opt.second_step if finish else opt.first_step)()
    for p, q in zip(params, oracle.params):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-12, atol=1e-12)


def test_tied_parameters_are_one(backend: Backend) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    model = Tied().double().to(backend.device)
    x = torch.randn(8, 4, dtype=torch.float64, device=backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, backend=backend.name)
    oracle = Oracle([{"params": list(model.parameters())}], SGD, {"lr": 0.1})
    for _ in range(3):
        for finish in (False, True):
            model.zero_grad()
            model(x).square().sum().backward()
            grads = gradients(list(model.parameters()))
            (oracle.update if finish else oracle.perturb)(grads)
            (opt.second_step if finish else opt.first_step)()
    torch.testing.assert_close(model.a.weight.detach().cpu(), oracle.params[0].detach(), rtol=1e-12, atol=1e-12)


# --- what users do between the passes ---


def test_clipping_between_the_passes(backend: Backend) -> None:
    params = make_parameters([(5,), (3, 2)], torch.float64, backend.device)
    opt = FusedSAM(params, SGD, lr=0.5, momentum=0.9, backend=backend.name)
    oracle = Oracle([{"params": params}], SGD, {"lr": 0.5, "momentum": 0.9})
    for step in range(4):
        backward(params, step)
        oracle.perturb(gradients(params))
        opt.first_step()
        backward(params, step)
        torch.nn.utils.clip_grad_norm_(params, 0.01)
        assert torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params])) < 0.0101
        oracle.update(gradients(params))
        opt.second_step()
    for p, q in zip(params, oracle.params):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-12, atol=1e-12)


def test_accumulation_over_micro_batches(backend: Backend) -> None:
    """A closure that accumulates, and gradients accumulated by hand, are the step on the whole batch."""
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(backend.device)

    def train(style: str) -> list[nn.Parameter]:
        params = make_parameters([(3, 4), (4,)], torch.float64, backend.device)
        opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, backend=backend.name)

        def run(batches: list[Tensor]) -> Tensor:
            total = torch.zeros(())
            for batch in batches:
                loss = torch.tanh(batch @ params[0] + params[1]).square().sum() / len(x)
                loss.backward()
                total += loss.detach().cpu()
            return total

        for _ in range(3):
            batches = [x] if style == "whole" else list(x.split(3))
            if style == "by hand":
                run(batches)
                opt.first_step(zero_grad=True)
                run(batches)
                opt.second_step(zero_grad=True)
            else:
                opt.step(partial(run, batches))
        return params

    whole = train("whole")
    for style in ("closure", "by hand"):
        for p, q in zip(train(style), whole):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_gradients_are_only_read(backend: Backend) -> None:
    params = make_parameters([(5,), (3, 2)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, weight_decay=0.1, backend=backend.name)
    backward(params, 0)
    kept, grads = [p.grad for p in params], gradients(params)
    opt.first_step()
    opt.second_step()
    assert all(p.grad is k for p, k in zip(params, kept))
    assert same_bits(grads, kept)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_of_their_own(backend: Backend) -> None:
    params = make_parameters([(5,), (3, 2)], torch.float64, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)

    def closure() -> Tensor:
        loss = landscape(params, 0)
        loss.backward(create_graph=True)
        return loss

    opt.step(closure)
    assert all(p.is_leaf and p.requires_grad for p in params)
    assert not any(v.requires_grad for e in opt.state.values() for v in e.values())


def test_a_stale_graph_is_noticed(backend: Backend) -> None:
    """Weights written by a kernel are written as far as autograd is concerned."""
    p = make_parameters([(6,)], torch.float64, backend.device)[0]
    opt = FusedSAM([p], SGD, lr=0.1, backend=backend.name)
    loss = (p * p.exp()).sum()
    loss.backward(retain_graph=True)
    opt.first_step(zero_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- errors ---


def test_calls_out_of_order(backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    with pytest.raises(RuntimeError, match="second_step\\(\\) without first_step\\(\\)"):
        opt.second_step()
    with pytest.raises(RuntimeError, match="no closure.*step\\(closure\\)"):
        opt.step()
    with pytest.raises(RuntimeError, match="nothing to restore"):
        opt.restore()
    assert same_bits(before, params)
    backward(params, 0)
    opt.first_step()
    perturbed = copies(params)
    for call in (opt.first_step, lambda: opt.step(closure_of(params)), lambda: opt.perturbed().__enter__()):
        with pytest.raises(RuntimeError, match="restore\\(\\)"):
            call()
        assert same_bits(perturbed, params), "a call out of order changes nothing"
    opt.restore()
    assert same_bits(before, params)


@pytest.mark.parametrize("base", [SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("bad_pass", [1, 2])
def test_sparse_gradients(base: Any, bad_pass: int, backend: Backend) -> None:
    params = make_parameters([(5, 2), (4, 3)], torch.float32, backend.device)
    opt = FusedSAM(params, base, lr=0.1, backend=backend.name)
    before = copies(params)

    def spoil() -> None:
        dense = params[1].grad
        params[1].grad = None
        params[1].grad = dense.to_sparse()

    backward(params, 0)
    if bad_pass == 1:
        spoil()
        with pytest.raises(RuntimeError, match="gradient of parameter 1 is sparse"):
            opt.first_step()
    else:
        opt.first_step()
        backward(params, 0)
        spoil()
        with pytest.raises(RuntimeError, match="gradient of parameter 1 is sparse"):
            opt.second_step()
    assert same_bits(before, params)
    opt.step(closure_of(params))


def test_complex_gradients(backend: Backend) -> None:
    p = make_parameters([(5,)], torch.float32, backend.device)[0]
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch cannot have a gradient of another dtype than its parameter's")
    opt = FusedSAM([p], SGD, lr=0.1, backend=backend.name)
    p.grad_dtype = torch.complex64
    p.grad = torch.ones(5, dtype=torch.complex64, device=backend.device)
    before = copies([p])
    with pytest.raises(RuntimeError, match="gradient of parameter 0 is complex"):
        opt.first_step()
    assert same_bits(before, [p])


def test_gradients_of_another_precision(backend: Backend) -> None:
    p = make_parameters([(5,)], torch.float32, backend.device)[0]
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch cannot have a gradient of another dtype than its parameter's")
    opt = FusedSAM([p], SGD, lr=1.0, rho=0.0, backend=backend.name)
    p.grad_dtype = torch.bfloat16
    p.grad = torch.full((5,), 0.5, dtype=torch.bfloat16, device=backend.device)
    before = p.detach().clone()
    opt.first_step()
    opt.second_step()
    assert torch.equal(p.detach(), before - 0.5)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"rho": -0.1}, "rho must be 0 or more"),
    ({"rho": math.nan}, "rho must be 0 or more"),
    ({"rho": math.inf}, "finite"),
    ({"rho": torch.tensor(-0.1)}, "rho must be 0 or more"),
    ({"rho": torch.tensor([0.1, 0.2])}, "one element"),
    ({"eta": -1.0}, "eta must be 0 or more"),
    ({"lr": -0.1}, "[Ii]nvalid learning rate|lr must be"),
    ({"lr": math.nan}, "lr must be 0 or more|[Ii]nvalid learning rate"),
    ({"lr": torch.tensor(math.nan)}, "lr must be 0 or more|[Ii]nvalid learning rate"),
    ({"momentum": math.nan}, "momentum is NaN"),
    ({"momentum": -1.0}, "[Ii]nvalid momentum"),
    ({"weight_decay": math.nan}, "weight_decay is NaN|[Ii]nvalid weight_decay"),
    ({"nesterov": True}, "Nesterov"),
    ({"differentiable": True}, "differentiable"),
    ({"backend": "fast"}, "backend must be one of"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(o) for o, _ in BAD_OPTIONS])
def test_bad_options(options: dict[str, Any], message: str) -> None:
    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(ValueError, match=message):
        FusedSAM(params, SGD, **{"lr": 0.1, **options})


@pytest.mark.parametrize("option", ["rho", "lr", "eta", "momentum"])
def test_options_that_become_bad(option: str, backend: Backend) -> None:
    params = make_parameters([(3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    good = opt.param_groups[0][option]
    opt.param_groups[0][option] = math.nan
    with pytest.raises(ValueError, match="NaN|must be 0 or more"):
        opt.step(closure_of(params))
    assert same_bits(before, params)
    opt.param_groups[0][option] = good
    opt.step(closure_of(params))


def test_bad_parameters() -> None:
    a, b = make_parameters([(6,), (4,)], torch.float32)
    whole = torch.randn(4, 6)
    view = torch.nn.Parameter(whole[:, :3])
    disjoint, overlapping = torch.nn.Parameter(whole[:, 3:]), torch.nn.Parameter(whole[1:, 2:5])
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty parameter list"),
        ([a, b, a], ValueError, "duplicate parameters"),
        ([{"params": [a]}, {"params": [b, a]}], ValueError, "more than one parameter group"),
        ([nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)], ValueError, "torch.int64"),
        ([nn.Parameter(torch.ones(3, dtype=torch.complex64))], ValueError, "view_as_real"),
        ([nn.Parameter(torch.ones(1).expand(5))], ValueError, "expanded"),
        ([a, nn.Parameter(a.data)], ValueError, "shares memory"),
        ([a, nn.Parameter(a.data[2:4])], ValueError, "shares memory"),
        ([view, overlapping], ValueError, "shares memory"),
        ([a, nn.Parameter(torch.ones(3, device="meta"))], ValueError, "several devices"),
        ([nn.Parameter(torch.ones(3, device="meta"))], RuntimeError, "meta"),
        (a, TypeError, "iterable"),
        ([torch.ones(3).to_sparse().requires_grad_()], ValueError, "sparse"),
        ([a * 2], ValueError, "non-leaf"),
    ]
    for params, error, message in cases:
        with pytest.raises(error, match=message):
            FusedSAM(params, SGD, lr=0.1)
    FusedSAM([view, disjoint], SGD, lr=0.1)  # columns of one matrix: interleaved, and no element in common


def test_two_devices() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device; the meta device stands for the second one in test_bad_parameters")
    with pytest.raises(ValueError, match="several devices"):
        FusedSAM([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cuda"))], SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_sharded_parameters(tmp_path: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
        with pytest.raises(TypeError, match="DTensor"):
            FusedSAM([sharded], SGD, lr=0.1)
    finally:
        torch.distributed.destroy_process_group()
    flat = nn.Parameter(torch.ones(4))
    flat._is_flat_param = True  # what FullyShardedDataParallel marks its parameters with
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        FusedSAM([flat], SGD, lr=0.1)


def test_bases_that_cannot_be() -> None:
    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(TypeError, match="a class such as torch.optim.SGD"):
        FusedSAM(params, SGD(params, lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Adadelta has options of its own called rho"):
        FusedSAM(params, torch.optim.Adadelta)
    with pytest.raises(ValueError, match="LBFGS calls a closure several times"):
        FusedSAM(params, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="unexpected keyword"):
        FusedSAM(params, SGD, lr=0.1, betas=(0.9, 0.99))
    with pytest.raises(TypeError, match=r"must make a torch.optim.Optimizer"):
        FusedSAM(params, lambda groups, **options: object())  # type: ignore[arg-type,return-value]


def test_a_backend_that_cannot_serve() -> None:
    params = make_parameters([(3,)], torch.float32, "cpu")
    from fastsam import backends

    missing = [b for b in backends.table() if b.device == "cuda" and not b.available and b.name == "native"]
    if missing:
        with pytest.raises(RuntimeError, match="cannot serve"):
            backends.select("native", torch.device("cuda"), torch.float32)
    with pytest.raises(ValueError, match="'auto', 'native', 'triton', 'reference'"):
        FusedSAM(params, SGD, lr=0.1, backend="cuda")


def test_a_function_that_makes_the_base(backend: Backend) -> None:
    params = make_parameters([(3,)], torch.float32, backend.device)
    opt = FusedSAM(params, partial(SGD, momentum=0.9, nesterov=True), lr=0.1, backend=backend.name)
    assert opt.param_groups[0]["nesterov"] is True
    opt.step(closure_of(params))
    assert "momentum_buffer" in opt.state[params[0]]


def test_tolerances_are_what_restore_does_not_need() -> None:
    """Going back by subtraction would not do: this is how inexact it is."""
    w = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    e = 0.01 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    assert not torch.equal((w + e) - e, w)
    torch.testing.assert_close((w + e) - e, w, rtol=TOLERANCE[torch.float32][0], atol=TOLERANCE[torch.float32][1])
