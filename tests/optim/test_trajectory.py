"""FusedSAM against an independent SAM in float64: every base optimizer, dtype and option, over many steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastsam
from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam_kernels.rules import RULES
from tests.helpers.crosses import one_in
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, make_parameters, same_bits
from tests.helpers.tolerances import tolerances_of, trajectory

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [(5, 3), (7,), (), (0,), (17, 2), (300,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
CONFIGURATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd momentum decay": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd dampening": (SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "sgd nesterov decay": (SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    "sgd maximize": (SGD, {"lr": 0.05, "momentum": 0.9, "maximize": True, "weight_decay": 0.01}),
    "sgd adaptive": (SGD, {"lr": 0.05, "momentum": 0.9, "adaptive": True, "rho": 0.5}),
    "sgd adaptive eta": (SGD, {"lr": 0.05, "adaptive": True, "rho": 0.5, "eta": 0.01}),
    "sgd rho 0": (SGD, {"lr": 0.05, "momentum": 0.9, "rho": 0.0}),
    "adam": (ADAM, {"lr": 0.01}),
    "adam decay": (ADAM, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    "adam decoupled": (ADAM, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (ADAMW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw maximize adaptive": (ADAMW, {"lr": 0.01, "maximize": True, "adaptive": True, "rho": 0.3}),
    "adam amsgrad": (ADAM, {"lr": 0.01, "amsgrad": True}),
    "lion": (fastsam.Lion, {"lr": 0.003, "weight_decay": 0.1, "adaptive": True, "rho": 0.3}),
    "lion maximize": (fastsam.Lion, {"lr": 0.003, "betas": (0.8, 0.9), "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01}),
    "adagrad accumulated": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.5, "maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop momentum": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    "rmsprop centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 0.1, "alpha": 0.9}),
    "rmsprop centered momentum": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "eps": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
}


def follow(opt: FusedSAM, oracle: Oracle, params: list[nn.Parameter], steps: int) -> None:
    """Step both, the oracle with the gradients of `opt`, and compare the perturbed points in every step."""
    dtype = params[0].dtype
    for step in range(steps):
        backward(params, step)
        norm = oracle.perturb(gradients(params))
        opt.first_step()
        # The norm of adaptive groups uses the rounded weights, and not the master copy.
        rtol = max(tolerances_of(dtype)[0], trajectory(dtype, step + 1)[0])
        torch.testing.assert_close(opt.grad_norm.cpu(), norm, rtol=rtol, atol=0)
        if step in (0, steps - 1):
            compare(params, oracle, max(tolerances_of(dtype), trajectory(dtype, step + 1)))
        backward(params, step)
        oracle.update(gradients(params))
        opt.second_step()


def compare(actual: list[Any], oracle: Oracle, tolerance: tuple[float, float]) -> None:
    for a, b in zip(actual, oracle.params):
        torch.testing.assert_close(a.detach().double().cpu(), b.detach(), rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize(("name", "dtype"), one_in(12, CONFIGURATIONS, DTYPES), ids=str)
def test_follows_the_oracle(name: str, dtype: torch.dtype, backend: Backend) -> None:
    base, options = CONFIGURATIONS[name]
    has_rule = any(base in rule.optimizer_types for rule in RULES.values()) and not options.get("amsgrad")
    if dtype.itemsize == 2 and not has_rule:
        pytest.skip("without a fused update there is no master copy: the base optimizer rounds as it likes")
    params = make_parameters(SHAPES, dtype, backend.device)
    opt = FusedSAM(params, base, backend=backend.name, **options)
    assert (opt._engine.rule is not None) == has_rule
    oracle = Oracle([{"params": params}], base, options)
    follow(opt, oracle, params, steps=20)
    if dtype.itemsize == 2:
        state = opt.state_dict()["state"]
        masters = [state[i]["master"] for i in range(len(params))]
        assert same_bits([m.to(dtype) for m in masters], params), "the weights are the rounding of their master copy"
        compare(masters, oracle, trajectory(dtype, 20))
    else:
        compare(params, oracle, trajectory(dtype, 20))


@pytest.mark.parametrize("base", [SGD, ADAMW])
def test_groups_have_their_own_options(base: Any, backend: Backend) -> None:
    params = make_parameters([(6,), (5, 2), (9,), (4,)], torch.float64, backend.device)
    groups = [
        {"params": params[:1], "rho": 0.3, "lr": 0.2},
        {"params": params[1:3], "adaptive": True, "eta": 0.1, "weight_decay": 0.1},
        {"params": params[3:], "rho": 0.0, "maximize": True},
    ]
    options = {"lr": 0.03, "momentum": 0.9} if base is SGD else {"lr": 0.03}
    oracle = Oracle([dict(g) for g in groups], base, options)
    opt = FusedSAM([dict(g) for g in groups], base, backend=backend.name, **options)
    follow(opt, oracle, params, steps=10)
    compare(params, oracle, trajectory(torch.float64, 10))


def test_groups_with_and_without_momentum(backend: Backend) -> None:
    params = make_parameters([(6,), (5, 2), (9,)], torch.float64, backend.device)
    groups = [
        {"params": params[:1], "momentum": 0.9, "dampening": 0.5},
        {"params": params[1:2], "momentum": 0.0, "dampening": 0.5},
        {"params": params[2:], "momentum": 0.5, "nesterov": True, "dampening": 0.0},
    ]
    oracle = Oracle([dict(g) for g in groups], SGD, {"lr": 0.1})
    opt = FusedSAM([dict(g) for g in groups], SGD, backend=backend.name, lr=0.1)
    follow(opt, oracle, params, steps=5)
    for o in (
        opt.param_groups,
        oracle.base.param_groups,
    ):
        # momentum switched on later starts from nothing, as in torch
        o[1]["momentum"] = 0.8
    follow(opt, oracle, params, steps=5)
    compare(params, oracle, trajectory(torch.float64, 10))
    assert "momentum_buffer" in opt.state[params[1]]


def test_mixed_dtypes_share_one_norm(backend: Backend) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    params = [make_parameters([(40,)], dtype, backend.device, seed=i)[0] for i, dtype in enumerate(dtypes)]
    oracle = Oracle([{"params": params}], SGD, {"lr": 0.1, "momentum": 0.9})
    opt = FusedSAM(params, SGD, backend=backend.name, lr=0.1, momentum=0.9)
    for step in range(5):
        for second in (False, True):
            for i, p in enumerate(params):
                p.grad = torch.sin(p.detach().double() * (i + 1) + step + second).to(p.dtype)
            if second:
                oracle.update(gradients(params))
                opt.second_step()
            else:
                norm = oracle.perturb(gradients(params))
                opt.first_step()
                torch.testing.assert_close(opt.grad_norm.cpu(), norm, rtol=1e-6, atol=0)
    for i, p in enumerate(params):
        weights = opt.state_dict()["state"][i].get("master", p)
        rtol, atol = trajectory(p.dtype, 5)
        if p.dtype == torch.float64:
            rtol = atol = 1e-7  # the norm that scales it contains float32 products
        torch.testing.assert_close(weights.detach().double().cpu(), oracle.params[i].detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("base", [SGD, ADAM])
def test_every_backend_takes_three_steps(base: Any, every_backend: Backend) -> None:
    params = make_parameters([(6, 3), (130,), ()], torch.float32, every_backend.device)
    options = {"lr": 0.05, "momentum": 0.9} if base is SGD else {"lr": 0.05}
    oracle = Oracle([{"params": params}], base, options)
    opt = FusedSAM(params, base, backend=every_backend.name, adaptive=True, rho=0.5, **options)
    oracle.sam[0].update(adaptive=True, rho=0.5)
    follow(opt, oracle, params, steps=3)
    compare(params, oracle, trajectory(torch.float32, 3))
    old_weights = copies(params)
    backward(params, 9)
    with opt.perturbed():
        assert not same_bits(old_weights, params)
    assert same_bits(old_weights, params)


RATES, SMALL, FLAG = st.floats(0, 0.5), st.floats(0, 0.2), st.booleans()
RADII = {"rho": st.floats(0, 2), "eta": st.floats(0, 1), "adaptive": FLAG}
SGD_OPTIONS = st.fixed_dictionaries(
    {"lr": RATES, "momentum": st.sampled_from([0.0, 0.5, 0.99]), "dampening": st.sampled_from([0.0, 0.4])}
    | {"weight_decay": SMALL, "nesterov": FLAG, "maximize": FLAG, **RADII}
).filter(lambda o: not o["nesterov"] or (o["momentum"] > 0 and o["dampening"] == 0))
ADAM_OPTIONS = st.fixed_dictionaries(
    {"lr": SMALL, "betas": st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.5, 0.999]))}
    | {"eps": st.sampled_from([1e-8, 1e-3]), "weight_decay": SMALL, "maximize": FLAG}
)
ANY = [st.tuples(st.just(SGD), SGD_OPTIONS), st.tuples(st.sampled_from([ADAM, ADAMW]), ADAM_OPTIONS)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.one_of(*ANY), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_any_options(case: tuple[Any, dict[str, Any]], lengths: list[int]) -> None:
    base, options = case
    params = make_parameters([(n,) for n in lengths], torch.float64)
    oracle, opt = Oracle([{"params": params}], base, options), FusedSAM(params, base, **options)
    if base is not SGD and not any(lengths):
        return
    follow(opt, oracle, params, steps=3)
    compare(params, oracle, (1e-9, 1e-11))  # with eps = 1e-8 a rounding of a tiny gradient is divided by as little


@pytest.mark.parametrize("base", [SGD, ADAM])
def test_options_changed_between_steps(base: Any, backend: Backend) -> None:
    """Betas in a list that is changed in place among them."""
    params, betas = make_parameters([(6,), (5, 2)], torch.float64, backend.device), [0.9, 0.99]
    base_options: dict[str, Any] = {"momentum": 0.9} if base is SGD else {"betas": betas}
    groups = [{"params": params, "lr": 0.1, "rho": 0.2, **base_options}]
    oracle, opt = Oracle(groups, base, {}), FusedSAM(groups, base, backend=backend.name)
    new_options = [{"momentum": 0.5, "weight_decay": 0.1}] if base is SGD else [{"weight_decay": 0.1}]
    changes: list[dict[str, Any]] = [{}, {"rho": 0.4}, {"lr": 0.3}, *new_options, {"maximize": True}]
    for number, change in enumerate([*changes, {"adaptive": True, "eta": 0.1}]):
        betas[0] = 0.9 - 0.1 * number
        for name, value in change.items():
            opt.param_groups[0][name] = value
            (oracle.sam[0] if name in oracle.sam[0] else oracle.base.param_groups[0])[name] = value
        follow(opt, oracle, params, steps=2)
    compare(params, oracle, (1e-9, 1e-11))


@pytest.mark.parametrize("tensor_option", ["lr", "rho", "both"])
@pytest.mark.parametrize("maximize", [False, True])
def test_learning_rate_and_rho_as_tensors(tensor_option: str, maximize: bool, backend: Backend) -> None:
    """Their values are read in every step, also when they are written in place."""
    params = make_parameters([(6,), (5, 2)], torch.float64, backend.device)
    options: dict[str, Any] = {"lr": 0.1, "rho": 0.2, "momentum": 0.9, "maximize": maximize}
    oracle = Oracle([{"params": params}], SGD, options)
    tensors = {
        n: torch.tensor(options[n], dtype=torch.float64, device=backend.device)
        for n in ("lr", "rho")
        if tensor_option in (n, "both")
    }
    opt = FusedSAM(params, SGD, backend=backend.name, **{**options, **tensors})
    for round in range(3):
        follow(opt, oracle, params, steps=3)
        compare(params, oracle, trajectory(torch.float64, 3 * round + 3))
        for name, tensor in tensors.items():
            tensor.mul_(0.7)
            target = oracle.base.param_groups[0] if name == "lr" else oracle.sam[0]
            target[name] = tensor.item()


def test_rounding_makes_no_variance_negative(backend: Backend) -> None:
    """Constant gradients have none in the end: `v - mean**2` may be a rounding below zero."""
    p = nn.Parameter(torch.zeros(1000, device=backend.device))
    options: dict[str, Any] = {"lr": 0.1, "alpha": 0.5, "centered": True, "eps": 1.0}
    opt = FusedSAM([p], torch.optim.RMSprop, backend=backend.name, **options)
    for _ in range(40):
        for half in (opt.first_step, opt.second_step):
            p.grad = torch.linspace(0.1, 1.0, 1000, device=backend.device)
            half()
    assert bool((opt.state[p]["square_avg"] < opt.state[p]["grad_avg"] ** 2).any()) and bool(p.isfinite().all())


def test_lion_is_algorithm_2_of_its_paper() -> None:
    """The class by itself, against the update written down once more; a closure is called, a parameter without a
    gradient stays."""
    params = make_parameters([(6,), (5, 2), (3,)], torch.float64)
    weights, momenta = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    opt = fastsam.Lion(params, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for step in range(5):
        loss = backward(params, step)
        params[2].grad = None
        assert opt.step(lambda loss=loss: loss) == loss
        for w, m, p in zip(weights, momenta, params):
            if p.grad is not None:
                w.copy_(w - 0.01 * (torch.sign(0.8 * m + 0.2 * p.grad) + 0.1 * w))
                m.copy_(0.95 * m + 0.05 * p.grad)
        compare(params, SimpleNamespace(params=weights), (1e-12, 1e-14))
    for options, message in (({"lr": -1.0}, "lr must be 0 or more"), ({"betas": (0.9, 1.0)}, "betas must be two")):
        with pytest.raises(ValueError, match=message):
            fastsam.Lion(params, **options)
