"""MSAM and the last gradient, which store the perturbed weights between steps: their papers, what comes out of order,
evaluation at the clean weights, and the model's own modes."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import MSAM, SAM, FusedSAM, backends
from tests.helpers.sam_oracle import copies, make_parameters, same_bits
from tests.helpers.variant_cases import ONE_PASS, RHO, Training, flat, make_fused, one_pass_loop, problem

every_variant = pytest.mark.parametrize("name", ONE_PASS)
# MSAM has a momentum to go against.
every_base = pytest.mark.parametrize(
    ("name", "base"),
    [("msam", "sgd"), ("msam", "adamw"), *(("last gradient", base) for base in ("sgd", "maximize", "adamw", "nadam"))],
)
DTYPES = [torch.float32, torch.bfloat16]


def train_one_pass(name: str, steps: int, base: str = "sgd", **options: Any) -> Training:
    return make_fused(ONE_PASS[name][0], base, steps, **options)


def clean_weights_of(training: Training) -> list[Tensor]:
    training.opt.eval()
    weights = copies(training.params)
    training.opt.train()
    return weights


# --- the papers ---


@every_base
@pytest.mark.parametrize("limit", [None, 0.3], ids=["", "clipped"])
def test_a_variant_is_its_papers(name: str, base: str, limit: float | None, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    training = train_one_pass(name, 6, base, backend=backend.name, max_grad_norm=limit)
    weights = clean_weights_of(training)
    for p, expected in zip(weights, one_pass_loop(ONE_PASS[name][1], base, 6, limit or math.inf), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-9, atol=1e-11)
    assert float((flat(copies(training.params)) - flat(weights)).norm()) == pytest.approx(RHO)


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"maximize": True}, {"dampening": 0.5}], ids=str)
def test_msam_is_its_equations(options: dict[str, Any]) -> None:
    """g at w - rho*v/||v||, v <- mu*v + g, w <- w - lr*v, written out."""
    start, loss = problem()
    params = [nn.Parameter(p) for p in start]
    opt = FusedSAM(params, torch.optim.SGD, variant=MSAM(rho=RHO), lr=0.1, momentum=0.9, **options)
    w, v = flat(start), torch.zeros_like(flat(start))
    for t in range(5):
        for p in params:
            p.grad = None
        loss(params, t).backward()
        g = flat([p.grad for p in params if p.grad is not None])
        perturbed_weights = w - RHO * v / (v.norm() + 1e-12)
        torch.testing.assert_close(flat(params).detach(), perturbed_weights, rtol=1e-10, atol=1e-12)
        g = -g if options.get("maximize") else g
        v = 0.9 * v + (1 if t == 0 else 1 - options.get("dampening", 0.0)) * g
        w = w - 0.1 * (g + 0.9 * v if options.get("nesterov") else v)
        opt.step()


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_asam_scales_the_vector(name: str, dtype: torch.dtype) -> None:
    training = make_fused(type(ONE_PASS[name][0])(RHO, True, 0.1), "sgd", 2, dtype=dtype)
    w, state = flat(clean_weights_of(training)).double(), training.opt.state_dict()["state"].values()
    key, sign = ("momentum_buffer", -1) if name == "msam" else ("sam_memory", 1)
    d, scale = flat([entry[key].double() for entry in state]), w.abs() + 0.1
    eps = sign * RHO * scale**2 * d / (scale * d).norm()
    perturbed_weights = flat([p.detach().double() for p in training.params])
    assert (perturbed_weights - w - eps).abs().max() < (1e-6 if dtype == torch.float32 else 0.02)


# --- a step ---


@every_variant
def test_parameters_without_a_gradient(name: str) -> None:
    """Their weights stay; their momentum goes on pushing, a gradient that was not there does not."""
    params = make_parameters([(4,), (3,)], torch.float64)
    opt = FusedSAM(params, lr=0.1, momentum=0.9, variant=type(ONE_PASS[name][0])(0.5))
    opt.step()  # no parameter has a gradient
    for grads in ((1.0, 2.0), (3.0, None), (1.0, None)):
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.full_like(p, g)
        with opt.evaluating():
            old_weights = copies(params)
        opt.step()
    with opt.evaluating():
        w = copies(params)
    assert torch.equal(w[1], old_weights[1]) and not torch.equal(w[0], old_weights[0])
    v = torch.tensor([((1 * 0.9 + 3) * 0.9 + 1)] * 4 + [2.0] * 3, dtype=torch.float64)
    d = -v if name == "msam" else torch.tensor([1.0] * 4 + [0.0] * 3, dtype=torch.float64)
    torch.testing.assert_close(flat(params).detach(), flat(w) + 0.5 * d / d.norm())


# --- what comes out of order ---


def step_with_scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(problem()[1](training.params, 1)).backward()
    scaler.step(training.opt, lambda: None)


CLEAN = r"clean ones since eval\(\); call train\(\) before"
CALLS: list[tuple[bool, Callable[[Training], Any], str]] = [
    *((True, act, CLEAN) for act in (lambda t: t.opt.step(), lambda t: t.opt.second_step())),
    (True, lambda t: t.opt.step(lambda: None), CLEAN),
    *((False, act, rf"{half}\(\) with MSAM, which takes one pass.*Call step\(\)")
      for half, act in (("first_step", lambda t: t.opt.first_step()), ("restore", lambda t: t.opt.restore()),
                        ("perturbed", lambda t: t.opt.perturbed().__enter__()))),
    (False, lambda t: t.opt.load_state_dict(t.opt.state_dict()), r"call eval\(\) first"),
    (False, lambda t: t.opt.step(t.opt.eval), r"eval\(\) inside a closure"),
    (False, step_with_scaler, r"backward\(\), scaler\.step"),
]  # fmt: skip


@pytest.mark.parametrize(("evaluates", "call", "words"), CALLS)
def test_calls_that_are_refused(evaluates: bool, call: Callable[[Training], Any], words: str) -> None:
    training = train_one_pass("msam", 2)
    if evaluates:
        training.opt.eval()
    old_weights = copies(training.params)
    with pytest.raises(RuntimeError, match=words):
        call(training)
    assert same_bits(old_weights, training.params) and training.opt.training is not evaluates
    training.opt.train()
    training.steps(range(2, 3))
    assert same_bits(training.params, train_one_pass("msam", 3).params)


def test_weights_written_where_a_step_would_lose_it() -> None:
    training = train_one_pass("msam", 2)
    perturbed_weights = copies(training.params)
    with torch.no_grad():
        training.params[1].mul_(0.5)
    training.backward(2)
    with pytest.raises(RuntimeError, match=r"weights were written while they are .* Call eval\(\)"):
        training.opt.step()
    training.opt.eval()  # as they were
    with torch.no_grad():
        training.params[1].mul_(0.5)
    training.opt.train()
    half = copies(training.params)[1]
    assert float((half / perturbed_weights[1]).median()) == pytest.approx(0.5, abs=0.2)
    training.steps(range(2, 3))


def test_weights_swapped_and_put_back_are_no_harm() -> None:
    """Averages of weights do so for an evaluation."""
    training = train_one_pass("msam", 2)
    perturbed_weights = copies(training.params)
    with torch.no_grad():
        for p, value in [(p, 0.0) for p in training.params]:
            p.fill_(value)
        for p, old in zip(training.params, perturbed_weights, strict=True):
            p.copy_(old)
    training.steps(range(2, 3))
    assert same_bits(training.params, train_one_pass("msam", 3).params)


@every_variant
def test_a_training_state_beside_an_evaluated_model(name: str) -> None:
    """Evaluated weights are the clean ones, and the optimizer's state belongs to the perturbed ones."""
    old, new = train_one_pass(name, 2), train_one_pass(name, 0)
    state = old.opt.state_dict()
    old.opt.eval()
    with torch.no_grad():
        for p, q in zip(new.params, old.params, strict=True):
            p.copy_(q)
    new.opt.load_state_dict(state)
    new.backward(2)
    with pytest.raises(RuntimeError, match=r"saved in training.*the model's in evaluation.*Call train\(\)"):
        new.opt.step()
    new.opt.train()
    new.steps(range(2, 4))
    assert same_bits(new.params, train_one_pass(name, 4).params)


def test_the_state_of_another_variant() -> None:
    state = train_one_pass("msam", 2).opt.state_dict()
    with pytest.raises(ValueError, match=r"of MSAM, in training, at its perturbed point.*optimizer's is SAM"):
        make_fused(SAM(RHO), "sgd", 0).opt.load_state_dict(state)
    with pytest.raises(ValueError, match="of LastGradient, which keeps a vector.*optimizer's is MSAM"):
        train_one_pass("msam", 0).opt.load_state_dict(train_one_pass("last gradient", 2).opt.state_dict())
    plain = make_fused(SAM(RHO), "sgd", 2)
    training = train_one_pass("msam", 0)
    with torch.no_grad():
        for p, q in zip(training.params, plain.params, strict=True):
            p.copy_(q)
    training.opt.load_state_dict(plain.opt.state_dict())  # a momentum is a momentum
    training.opt.train()
    assert not same_bits(training.params, plain.params)
    training.steps(range(2, 3))


# --- evaluation ---


@every_base
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounds", [False, True], ids=["nearest", "stochastic"])
def test_evaluation_changes_no_bit_of_the_training(name: str, base: str, dtype: torch.dtype, rounds: bool) -> None:
    full_run = train_one_pass(name, 4, base, dtype=dtype, stochastic_rounding=rounds)
    training = train_one_pass(name, 0, base, dtype=dtype, stochastic_rounding=rounds)
    for t in range(4):
        training.opt.train()
        training.steps(range(t, t + 1))
        point = copies(training.params)
        training.opt.eval()
        weights = copies(training.params)
        training.opt.eval()  # again: nothing
        assert not training.opt.training and same_bits(weights, training.params) and not same_bits(weights, point)
        training.opt.train()
        training.opt.train()
        assert training.opt.training and same_bits(point, training.params)
    assert same_bits(full_run.params, training.params)


def test_evaluating_leaves_the_mode_that_it_found() -> None:
    training = train_one_pass("msam", 1)
    perturbed_weights = copies(training.params)
    with pytest.raises(ZeroDivisionError), training.opt.evaluating():
        assert not training.opt.training and not same_bits(perturbed_weights, training.params)
        _ = 1 / 0
    assert training.opt.training and same_bits(perturbed_weights, training.params)
    training.opt.eval()
    with training.opt.evaluating():
        pass
    assert not training.opt.training


def test_variants_of_two_passes_have_no_modes() -> None:
    training = make_fused(SAM(RHO), "sgd", 2)
    old_weights = copies(training.params)
    training.opt.eval()
    assert training.opt.training and same_bits(old_weights, training.params)
    training.opt.train()
    training.steps(range(2, 3))


# --- the model's own modes ---


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def step_of(model: nn.Module, opt: FusedSAM) -> None:
    opt.zero_grad()
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum().backward()
    opt.step()


def make_hooked_model() -> tuple[nn.Sequential, FusedSAM]:
    model = network()
    opt = FusedSAM(model.parameters(), torch.optim.SGD, variant=MSAM(RHO), lr=0.1, momentum=0.9, model=model)
    for _ in range(2):
        step_of(model, opt)
    return model, opt


def test_the_models_modes_are_the_optimizers() -> None:
    model, opt = make_hooked_model()
    perturbed_weights = copies(model.parameters())
    assert model.eval() is model and not model.training and not model[0].training and not opt.training
    weights = copies(model.parameters())
    assert not same_bits(weights, perturbed_weights)
    nn.Sequential(model).train()  # as a wrapper's
    assert opt.training and same_bits(perturbed_weights, copies(model.parameters()))
    with opt.evaluating():
        assert same_bits(weights, copies(model.parameters()))
    step_of(model, opt)


@pytest.mark.parametrize("copy_method", ["deepcopy", "pickle"])
def test_a_copy_of_the_model_moves_no_weights_of_the_other(copy_method: str) -> None:
    model, opt = make_hooked_model()
    perturbed_weights = copies(model.parameters())
    other_model: nn.Sequential = (
        copy.deepcopy(model) if copy_method == "deepcopy" else pickle.loads(pickle.dumps(model))
    )
    assert other_model.eval() is other_model and not other_model[0].training and model.training
    assert opt.training and same_bits(perturbed_weights, copies(model.parameters()))
    assert same_bits(perturbed_weights, copies(other_model.parameters()))
    pair: tuple[nn.Sequential, FusedSAM] = (
        copy.deepcopy((model, opt)) if copy_method == "deepcopy" else pickle.loads(pickle.dumps((model, opt)))
    )
    pair[0].eval()
    assert not pair[1].training and opt.training and not same_bits(perturbed_weights, copies(pair[0].parameters()))
    model.eval()
    assert same_bits(copies(model.parameters()), copies(pair[0].parameters()))


def test_a_model_outlives_its_optimizer() -> None:
    model, opt = make_hooked_model()
    del opt
    model.eval()
    assert not model.training


# --- costs ---


# Every case compiles for seconds.
@pytest.mark.slow
@every_variant
def test_a_compiled_step_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    training, eager = train_one_pass(name, 1), train_one_pass(name, 6)
    compiled_step = torch.compile(training.opt.step, fullgraph=True, backend="aot_eager")
    for t in range(1, 6):
        training.backward(t)
        compiled_step()
    for weights, expected in zip(training.params, eager.params, strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
