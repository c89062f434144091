"""Refusals of the optimizer and its variants: the call, and words of the answer. Nothing changes then."""

import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastsam import GSAM, MSAM, SAM, FusedSAM
from fastsam.backends import Backend
from fastsam.optim.variants import (
    LESAM,
    WSAM,
    FriendlySAM,
    GradientPenalty,
    LastGradient,
    LInfSAM,
    LookSAM,
    PreconditionedSAM,
    VaSSO,
)
from tests.helpers.nonsense import Hostile
from tests.helpers.sam_cases import ADAM, SGD, closure_of
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")
ADAMW, RMSPROP = torch.optim.AdamW, torch.optim.RMSprop
EARLY = {"assume_no_alias": True, "optimizer_in_backward": True}
NUMBER = "must be a number or a one-element tensor, got"

# --- building it ---

# The base, the options in addition to `lr=0.1`, the exception and its words.
OPTIONS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *((SGD, {"lr": v}, TypeError, f"lr {NUMBER} {k}") for v, k in (("x", "str in parameter group 0"), ([0.1], "list"))),
    *((SGD, {"base_kwargs": {n: None}}, TypeError, f"{n} {NUMBER} NoneType") for n in ("lr", "weight_decay")),
    *((base, {name: "x"}, TypeError, f"{name} {NUMBER} str") for base, name in ((SGD, "momentum"), (ADAMW, "eps"))),
    (ADAMW, {"rho": "x"}, TypeError, f"rho {NUMBER} str"),
    *((SGD, {"rho": v}, ValueError, "rho must be 0 or more") for v in (-0.1, math.nan, torch.tensor(-0.1))),
    (SGD, {"rho": math.inf}, ValueError, "finite"),
    (SGD, {"rho": torch.tensor([0.1, 0.2])}, ValueError, "one element"),
    (SGD, {"eta": -1.0}, ValueError, "eta must be 0 or more"),
    *((SGD, {"lr": v}, ValueError, "[Ii]nvalid learning rate|lr must be 0 or more")
      for v in (-0.1, math.nan, torch.tensor(math.nan))),
    (SGD, {"lr": 10**400}, ValueError, "a float can hold"),
    (SGD, {"momentum": math.nan}, ValueError, "momentum is NaN"),
    (SGD, {"momentum": -1.0}, ValueError, "[Ii]nvalid momentum"),
    (SGD, {"weight_decay": math.nan}, ValueError, "weight_decay is NaN|[Ii]nvalid weight_decay"),
    (SGD, {"nesterov": True}, ValueError, "Nesterov"),
    (SGD, {"differentiable": True}, ValueError, "differentiable"),
    (SGD, {"differentiable": 0.0}, ValueError, "leave out differentiable=0.0, or pass False"),
    (SGD, {"backend": "fast"}, ValueError, "must be one of 'auto', 'native', 'triton', 'foreach', 'reference'"),
    *((SGD, {name: value}, TypeError, f"{name} must be True or False, got {value!r}")
      for name in ("adaptive", "skip_nonfinite", "stochastic_rounding", "assume_no_alias", "optimizer_in_backward")
      for value in ("yes", 3, None)),
    *((SGD, {"max_grad_norm": v}, ValueError, "max_grad_norm must be above 0") for v in (0.0, -1, math.nan)),
    (SGD, {"max_grad_norm": 10**400}, ValueError, "max_grad_norm must be a number that a float can hold"),
    *((SGD, {"max_grad_norm": v}, TypeError, "max_grad_norm must be a number or None") for v in (True, "1", Hostile())),
    # options of the base
    (SGD, {"base_kwargs": {"lr": 0.2}}, TypeError, "lr is given twice"),
    (SGD, {"base_kwargs": {"rho": 0.2}}, TypeError, "rho in base_kwargs is an option of FusedSAM"),
    (SGD, {"base_kwargs": ["lr"]}, TypeError, "base_kwargs must be a dict"),
    (SGD, {"base_kwargs": {"learning_rate": 0.2}}, TypeError, "did you mean lr"),
    (SGD, {"betas": (0.9, 0.99)}, TypeError, "neither FusedSAM nor SGD has such an option .there are lr, momentum"),
    *((base, {name: 0.5}, TypeError, f"unexpected keyword '{name}'.*; did you mean {suggestion}\\?")
      for base in (SGD, partial(SGD, momentum=0.9), RMSPROP)
      for name, suggestion in (("learning_rate", "lr"), ("LR", "lr"), ("wd", "weight_decay"), ("momentun", "momentum"),
                          ("weightdecay", "weight_decay"), ("mom", "momentum"), ("adaptve", "adaptive"), ("rh0", "rho"),
                          ("base_optimiser", "base_optimizer"), ("assume_no_alia", "assume_no_alias"))),
    # bases
    (SGD([nn.Parameter(torch.ones(1))]), {}, TypeError, "a class such as torch.optim.SGD"),
    (torch.optim.Adadelta, {}, ValueError, "Adadelta has its own options called rho"),
    (torch.optim.LBFGS, {}, ValueError, "LBFGS calls a closure several times"),
    (lambda groups, **options: object(), {}, TypeError, "must make a torch.optim.Optimizer"),
    # variants
    *((SGD, {"variant": GSAM(), name: 1}, ValueError, "combined with") for name in ("rho", "adaptive")),
    *((SGD, {"variant": wrong_variant}, TypeError, "variant must be an instance") for wrong_variant in (GSAM, "gsam")),
    (SGD, {"variant": GSAM(rho=-1.0)}, ValueError, "rho must be 0 or more"),
    *((base, {"variant": MSAM()}, ValueError, words)
      for base, words in ((SGD, "parameter group 0 has none; give one: momentum=0.9"),
                          (RMSPROP, "parameter group 0 has none"), (torch.optim.NAdam, "got NAdam"),
                          (torch.optim.Adagrad, "has to be torch.optim.SGD or RMSprop .* got Adagrad"))),
    *((ADAM, {"variant": kind(), "amsgrad": True}, ValueError, "without amsgrad")
      for kind in (MSAM, PreconditionedSAM)),
    *((base, {"variant": PreconditionedSAM()}, ValueError, "has to be torch.optim.Adam or AdamW")
      for base in (SGD, RMSPROP, torch.optim.NAdam)),
    (SGD, {"variant": MSAM(), "momentum": 0.9, "assume_no_alias": True}, ValueError, "assume_no_alias=True with MSAM"),
    (SGD, {"variant": LastGradient(), "assume_no_alias": True}, ValueError, "assume_no_alias=True with LastGradient"),
    *((SGD, {"variant": kind(rho=-1.0), "momentum": 0.9}, ValueError, "rho must be") for kind in (MSAM, LastGradient)),
    # updates in the backward pass
    (SGD, {"optimizer_in_backward": True}, ValueError, "optimizer_in_backward=True without assume_no_alias=True"),
    (SGD, {**EARLY, "skip_nonfinite": True}, ValueError, "optimizer_in_backward=True with skip_nonfinite=True"),
    (SGD, {**EARLY, "max_grad_norm": 1.0}, ValueError, "with max_grad_norm, which needs all gradients"),
    (SGD, {**EARLY, "variant": GSAM(0.1)}, ValueError, "optimizer_in_backward=True with GSAM"),
    (torch.optim.NAdam, EARLY, ValueError, "optimizer_in_backward=True .* makes its own step"),
    (ADAM, {**EARLY, "amsgrad": True}, ValueError, "optimizer_in_backward=True .* makes its own step"),
    # tensors without a value, or of another shape
    (torch.optim.NAdam, {"betas": torch.empty(2, device="meta")}, ValueError, "betas is a tensor on the meta device"),
    (ADAM, {"eps": torch.ones(1)}, TypeError, r"eps must be a number or a tensor without dimensions, got .* \[1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "options", "error", "words"), OPTIONS, ids=[str(row[1]) for row in OPTIONS])
def test_options_that_are_refused(base: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    lr = {} if "lr" in options.get("base_kwargs", {}) and words.startswith("lr must") else {"lr": 0.1}
    with pytest.raises(error, match=words):
        FusedSAM(make_parameters([(3,)], torch.float32), base, **{**lr, **options})


VARIANTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *((kind, {"interval": 2}, ValueError, "interval must be left at 1") for kind in (MSAM, LastGradient, LookSAM)),
    *((kind, {"start": 2}, ValueError, "start must be left at 0") for kind in (MSAM, LastGradient)),
    *((kind, {"rho_fn": LESAM(sigma=1.0)}, ValueError, "rho_fn must be") for kind in (MSAM, LastGradient)),
    *((kind, {"interval": v}, ValueError, "interval must be .* steps?, got")
      for kind in (SAM, GSAM, VaSSO) for v in (0, -2)),
    *((SAM, {"interval": v}, TypeError, "interval must be .* steps?, got") for v in (1.5, True, Hostile())),
    *((GSAM, {"alpha": v}, ValueError, "must be") for v in (-1.0, math.nan, math.inf)),
    *((WSAM, {"gamma": v}, ValueError, "gamma must be") for v in (1.0, -0.1, math.nan)),
    (WSAM, {"decouple": "no"}, TypeError, "decouple must be"),
    *((FriendlySAM, {"sigma": v}, ValueError, "sigma must be") for v in (-1.0, math.inf)),
    (FriendlySAM, {"lmbda": 1.0}, ValueError, "lmbda must be"),
    *((GradientPenalty, {"alpha": v}, ValueError, "must be") for v in (-1.0, math.nan, math.inf)),
    (LInfSAM, {"adaptive": True}, ValueError, "adaptive must be left at False"),
    *((PreconditionedSAM, {"eps": v}, ValueError, "eps must be above 0") for v in (0.0, -1.0, math.inf, math.nan)),
    *((VaSSO, {"theta": v}, ValueError, "theta must be") for v in (0.0, 1.5)),
    *((LESAM, {"sigma": v}, ValueError, "sigma must be") for v in (0.0, math.nan)),
    (LESAM, {"sigma": Decimal("NaN")}, TypeError, "sigma must be a number"),
    *((kind, {"rh0": 0.1}, TypeError, "has no option 'rh0'; did you mean rho") for kind in (SAM, GSAM)),
    *((kind, {"rho_fn": 0.1}, TypeError, "rho_fn must be a function") for kind in (SAM, LookSAM)),
    (SAM, {"rho_fn": torch.nn.Linear(1, 1)}, TypeError, "rho_fn must be a function"),
    (LookSAM, {"k": 0}, ValueError, "k must be 1 or more"),
    (LookSAM, {"k": 2.0}, TypeError, "k must be a whole number"),
    (LookSAM, {"alpha": -1.0}, ValueError, "alpha must be 0 or more"),
    (LookSAM, {"alpha": math.inf}, ValueError, "finite"),
    (LookSAM, {"alpha": Decimal("NaN")}, TypeError, "alpha must be a number, got Decimal"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "error", "words"), VARIANTS, ids=[f"{r[0]}-{r[1]}" for r in VARIANTS])
def test_a_variant_out_of_its_range(kind: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kind(**options)


def test_a_base_optimizer_without_a_learning_rate_serves_no_decoupled_sharpness() -> None:
    class OptimizerWithoutRate(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None: ...

    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(ValueError, match="WSAM needs a base optimizer with a learning rate"):
        FusedSAM(params, OptimizerWithoutRate, variant=WSAM())
    FusedSAM(params, OptimizerWithoutRate, variant=WSAM(decouple=False))


def test_parameters_that_are_refused() -> None:
    a, b = make_parameters([(6,), (4,)], torch.float32)
    matrix = torch.randn(4, 6)
    view, disjoint, overlap = (nn.Parameter(t) for t in (matrix[:, :3], matrix[:, 3:], matrix[1:, 2:5]))
    flat = nn.Parameter(torch.ones(4))
    flat._is_flat_param = True  # type: ignore[attr-defined]  # what FullyShardedDataParallel marks its parameters with
    collection = "params must be parameters or parameter groups, got"
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty parameter list"),
        ([a, b, a], ValueError, "duplicate parameters"),
        ([{"params": [a]}, {"params": [b, a]}], ValueError, "more than one parameter group"),
        ([nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)], ValueError, "torch.int64"),
        ([nn.Parameter(torch.ones(3, dtype=torch.complex64))], ValueError, "view_as_real"),
        ([nn.Parameter(torch.ones(1).expand(5))], ValueError, "expanded"),
        ([a, nn.Parameter(a.data)], ValueError, "shares memory"),
        ([a, nn.Parameter(a.data[2:4])], ValueError, "shares memory"),
        ([view, overlap], ValueError, "shares memory"),
        ([a, nn.Parameter(torch.ones(3, device="meta"))], ValueError, "several devices"),
        ([nn.Parameter(torch.ones(3, device="meta"))], RuntimeError, "meta"),
        (a, TypeError, "iterable"),
        ([torch.ones(3).to_sparse().requires_grad_()], ValueError, "sparse"),
        ([a * 2], ValueError, "non-leaf"),
        (nn.Linear(2, 2), TypeError, rf"{collection} Linear; pass model\.parameters\(\)"),
        (nn.Sequential(nn.Linear(2, 2)), TypeError, rf"{collection} Sequential; pass model\.parameters\(\)"),
        (None, TypeError, f"{collection} NoneType$"),
        (3, TypeError, f"{collection} int$"),
        ([flat], TypeError, r"FullyShardedDataParallel \(FSDP1\).*use torch.distributed.fsdp.fully_shard"),
        ([{"params": [a], "lr": "x"}], TypeError, f"lr {NUMBER} str in parameter group 0"),
    ]
    for params, error, message in cases:
        with pytest.raises(error, match=message):
            FusedSAM(params, SGD, lr=0.1)
    FusedSAM([view, disjoint], SGD, lr=0.1)  # columns of one matrix: interleaved, and no element in common


def test_a_group_that_is_refused_is_not_added(backend: Backend) -> None:
    params = make_parameters([(5, 3), (8,)], torch.float32, backend.device)
    fresh = make_parameters([(3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, variant=MSAM(), lr=0.1, momentum=0.9, backend=backend.name)
    bad_states: list[tuple[Any, type[Exception], str]] = [
        ({"params": params[:1]}, ValueError, "more than one parameter group"),
        ({"params": fresh * 2}, ValueError, "duplicate"),
        ({"params": [nn.Parameter(params[0].data)]}, ValueError, "shares memory"),
        ({"params": [nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)]}, ValueError, "int32"),
        ({"params": fresh, "rho": -1.0}, ValueError, "rho"),
        ({"params": [nn.Parameter(torch.ones(3, device="meta"))]}, ValueError, "several devices"),
        (fresh, TypeError, "must be a dict"),
        ({"params": set(fresh)}, TypeError, "ordered collections"),
        ({"params": fresh, "momentum": 0.0}, ValueError, "parameter group 1 has none"),
        *(({"params": fresh, n: "x"}, TypeError, f"{n} {NUMBER} str in parameter group 1") for n in ("lr", "momentum")),
    ]  # fmt: skip
    for group, error, message in bad_states:
        with pytest.raises(error, match=message):
            opt.add_param_group(group)
        assert len(opt.param_groups) == 1 and opt.base_optimizer.param_groups is opt.param_groups
    backward(params, 0)
    opt.step()


@pytest.mark.filterwarnings("ignore")
def test_sharded_parameters(tmp_path: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        summand, shard = (nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [p])) for p in (Partial(), Shard(0)))
        with pytest.raises(TypeError, match=r"parameter 1 is a DTensor placed as .*Partial.*call redistribute\(\)"):
            FusedSAM([nn.Parameter(torch.ones(2)), summand], SGD, lr=0.1)
        FusedSAM([shard], SGD, lr=0.1)
        with pytest.raises(ValueError, match="several devices"):
            FusedSAM([shard, nn.Parameter(torch.ones(2, device="meta"))], SGD, lr=0.1)
        for name, text in (("stochastic_rounding", "random bits"), ("assume_no_alias", "memory is managed elsewhere")):
            with pytest.raises(ValueError, match=text):
                FusedSAM([shard], SGD, lr=0.1, **{name: True})
            opt = FusedSAM([nn.Parameter(torch.ones(2))], SGD, lr=0.1, **{name: True})
            with pytest.raises(ValueError, match=text):
                opt.add_param_group({"params": [shard]})
            assert len(opt.param_groups) == 1
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_accepted() -> None:
    """Numbers of numpy, functions that make the base, and options in a dict or by name."""
    variants = [GSAM(alpha=0.0), WSAM(gamma=0.0), FriendlySAM(sigma=0.0, lmbda=0.0), GradientPenalty(alpha=0.0)]
    assert all(isinstance(sam, SAM) for sam in [*variants, VaSSO(theta=1.0), LookSAM(k=1)]), "ends of their ranges"
    params = make_parameters([(3,)], torch.float32)
    FusedSAM(params, SGD, rho=np.float32(0.5), lr=np.float32(0.25), momentum=np.float64(0.5)).step(closure_of(params))
    assert FusedSAM(params, partial(SGD, momentum=0.9, nesterov=True), lr=0.1).param_groups[0]["nesterov"] is True

    def base_factory(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return SGD(groups, lr=options["learning_rate"])

    assert FusedSAM(params, base_factory, learning_rate=0.5).param_groups[0]["lr"] == 0.5, "it decides itself"
    options: dict[str, Any] = {"lr": 0.3, "momentum": 0.8, "dampening": 0.5}
    by_name = FusedSAM(params, SGD, **options).defaults
    assert FusedSAM(params, SGD, base_kwargs=options).defaults == by_name and by_name["dampening"] == 0.5
    assert FusedSAM(params, ADAMW, lr=0.3).defaults["weight_decay"] == 0.01, "None leaves the base its own"
    assert FusedSAM(params, ADAMW, betas=(0.8, 0.9)).defaults["betas"] == (0.8, 0.9)


# --- in a step ---


@pytest.mark.parametrize("half", ["first_step", "second_step"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("base", "name", "value", "words"),
    [
        *((base, name, None, rf"parameter group {{}} has no {name}, .*param_groups.{{}}..'{name}'. again")
          for base, name in ((SGD, "lr"), (SGD, "rho"), (ADAMW, "amsgrad"), (RMSPROP, "eta"))),
        *((SGD, name, math.nan, "NaN|must be 0 or more") for name in ("rho", "lr", "eta", "momentum")),
        *((SGD, name, 10**400, "an option of parameter group {} is larger than every float")
          for name in ("weight_decay", "momentum", "dampening", "nesterov")),
    ],
)  # fmt: skip
def test_a_bad_option(base: Any, name: str, value: Any, words: str, number: int, half: str, backend: Backend) -> None:
    params = make_parameters([(3,), (4,)], torch.float32, backend.device)
    opt = FusedSAM([{"params": [p]} for p in params], base, lr=0.1, backend=backend.name)
    opt.step(closure_of(params))
    old_weights, good = copies(params), opt.param_groups[number].pop(name)
    backward(params, 0)
    if half == "second_step":
        opt.param_groups[number][name] = good
        opt.first_step()
        del opt.param_groups[number][name]
    if value is not None:
        opt.param_groups[number][name] = value
    with pytest.raises(ValueError, match=words.format(number, number)):
        getattr(opt, half)()
    assert same_bits(old_weights, params)
    opt.param_groups[number][name] = good
    opt.step(closure_of(params))
    assert not same_bits(old_weights, params)


def test_calls_out_of_order(backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    old_weights, number = copies(params), 5
    idle: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (opt.second_step, RuntimeError, "second_step\\(\\) without first_step\\(\\)"),
        (opt.step, RuntimeError, "no closure.*step\\(closure\\)"),
        (opt.restore, RuntimeError, "nothing to restore"),
        (lambda: opt.step(number), TypeError, "closure must be a function that computes the loss .*, got 5"),
    ]
    for call, error, words in idle:
        with pytest.raises(error, match=words):
            call()
    assert same_bits(old_weights, params)
    backward(params, 0)
    opt.first_step()
    perturbed_weights = copies(params)
    for call in (
        opt.first_step, lambda: opt.step(closure_of(params)), lambda: opt.perturbed().__enter__(),
        lambda: opt.load_state_dict(opt.state_dict()),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="restore\\(\\)"):
            call()
        assert same_bits(perturbed_weights, params), "a call out of order changes nothing"
    opt.restore()
    assert same_bits(old_weights, params)


def test_halves_out_of_order_in_a_step_that_does_not_perturb() -> None:
    params = make_parameters([(5, 3)], torch.float32)
    opt = FusedSAM(params, lr=0.1, variant=SAM(interval=2))
    with pytest.raises(RuntimeError, match="without first_step"):
        opt.second_step()
    backward(params, 0)
    opt.first_step()
    opt.second_step()
    assert not opt.perturbs
    opt.first_step()
    for call, words in ((opt.first_step, "called already"), (lambda: opt.step(lambda: None), "between first_step")):
        with pytest.raises(RuntimeError, match=words):
            call()
    opt.restore()
    with pytest.raises(RuntimeError, match="nothing to restore"):
        opt.restore()
    assert not opt.perturbs, "a step that was taken back does not count"
    opt.step()
    assert opt.perturbs


@pytest.mark.parametrize("base", [SGD, RMSPROP])
@pytest.mark.parametrize(("call", "method"), [(1, "first_step"), (2, "second_step"), (2, "restore")])
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_closure_that_steps(exclusive: bool, call: int, method: str, base: Any, backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, base, lr=0.1, rho=0.3, backend=backend.name, assume_no_alias=exclusive)
    opt.step(closure_of(params))
    calls: list[list[torch.Tensor]] = []

    def closure() -> None:
        backward(params, 0)
        calls.append(copies(params))
        if len(calls) == call:
            getattr(opt, method)()
            calls.append(copies(params))

    with pytest.raises(RuntimeError, match="closure made a part of the step itself; leave first_step"):
        opt.step(closure)
    # Wholly made, where the closure made it; otherwise not made.
    assert same_bits(params, calls[-1] if method == "second_step" else calls[0])
    opt.step(closure_of(params))


@pytest.mark.parametrize("first_variant", [SAM(), SAM(interval=2), MSAM()], ids=["SAM", "interval", "MSAM"])
def test_two_optimizers_between_their_halves_over_one_parameter(first_variant: SAM, backend: Backend) -> None:
    params = make_parameters([(3,), (4,), (5,)], torch.float32, backend.device)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "backend": backend.name}
    first = FusedSAM(params[:2], SGD, variant=first_variant, **options)
    shares, separate_opt = FusedSAM(params[1:], SGD, **options), FusedSAM(params[2:], SGD, **options)
    begin, end = (first.step, first.eval) if isinstance(first_variant, MSAM) else (first.first_step, first.second_step)
    for _ in range(2):
        old_weights = copies(params[1:2])
        backward(params, 0)
        begin()
        separate_opt.first_step()
        separate_opt.second_step()
        with pytest.raises(RuntimeError, match="another FusedSAM has perturbed some of these parameters"):
            shares.first_step()
        end()
        assert not same_bits(old_weights, params[1:2]), "its update is made"
        shares.first_step()
        calls = [first.train if isinstance(first_variant, MSAM) else begin]
        if begin == first.first_step and not first.perturbs:
            calls.append(first.step)  # a step without a perturbation needs no first half
        for call in calls:
            with pytest.raises(RuntimeError, match=r"Call its second_step\(\) or restore\(\) first"):
                call()
        shares.restore()
        first.train()
    first.eval()
    shares.first_step()
    del shares
    FusedSAM(params[1:], SGD, **options).first_step()  # an optimizer that is gone does not count
