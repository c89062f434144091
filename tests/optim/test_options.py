"""Options that are unknown, missing or no numbers: a clear error, and nothing lost."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import SGD, closure_of
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


NO_NUMBERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = [
    (SGD, {"lr": "x"}, "lr must be a number or a one-element tensor, got str in parameter group 0"),
    (SGD, {"lr": None}, "lr must be a number .*got NoneType"),
    (SGD, {"lr": [0.1]}, "lr must be a number .*got list"),
    (SGD, {"momentum": "x"}, "momentum must be a number .*got str"),
    (SGD, {"weight_decay": None}, "weight_decay must be a number .*got NoneType"),
    (torch.optim.AdamW, {"eps": "x"}, "eps must be a number .*got str"),
    (torch.optim.AdamW, {"rho": "x"}, "rho must be a number .*got str"),
]


@pytest.mark.parametrize(("base", "options", "message"), NO_NUMBERS)
def test_options_that_are_no_numbers(
    base: type[torch.optim.Optimizer], options: dict[str, Any], message: str, backend: Backend
) -> None:
    params = make_parameters([(3,)], torch.float32, backend.device)
    # a keyword that is None leaves the option to the base
    given = {"base_kwargs": options} if None in options.values() else options
    with pytest.raises(TypeError, match=message):
        FusedSAM(params, base, backend=backend.name, **given)
    with pytest.raises(TypeError, match=message):
        FusedSAM([{"params": params, **options}], base, backend=backend.name, lr=0.1)


MISSPELT = [
    ("learning_rate", "lr"), ("LR", "lr"), ("wd", "weight_decay"), ("weightdecay", "weight_decay"), ("mom", "momentum"),
    ("momentun", "momentum"), ("adaptve", "adaptive"), ("base_optimiser", "base_optimizer"), ("exclusiv", "exclusive"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), MISSPELT)
@pytest.mark.parametrize("base", [SGD, partial(SGD, momentum=0.9), torch.optim.RMSprop])
def test_options_that_are_misspelt(base: Any, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword '{name}'.*; did you mean {meant}\\?"):
        FusedSAM(make_parameters([(3,)], torch.float32), base, **{"lr": 0.1, name: 0.5})


def test_an_option_unlike_any_has_no_suggestion() -> None:
    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(
        TypeError, match="neither FusedSAM nor SGD has such an option .there are lr, momentum,.* rho, adaptive"
    ) as error:
        FusedSAM(params, SGD, lr=0.1, betas=(0.9, 0.99))
    assert "did you mean" not in str(error.value)

    def anything(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return SGD(groups, lr=options["learning_rate"])

    assert FusedSAM(params, anything, learning_rate=0.5).param_groups[0]["lr"] == 0.5, (
        "what takes any option decides itself"
    )


@pytest.mark.parametrize("half", ["first_step", "second_step"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("base", "name"), [(SGD, "lr"), (SGD, "rho"), (torch.optim.AdamW, "amsgrad"), (torch.optim.RMSprop, "eta")]
)
def test_an_option_that_somebody_took_away(base: Any, name: str, number: int, half: str, backend: Backend) -> None:
    params = make_parameters([(3,), (4,)], torch.float32, backend.device)
    opt = FusedSAM([{"params": [p]} for p in params], base, lr=0.1, backend=backend.name)
    opt.step(closure_of(params))
    before = copies(params)
    backward(params, 0)
    if half == "second_step":
        opt.first_step()
    value = opt.param_groups[number].pop(name)
    with pytest.raises(
        ValueError, match=f"parameter group {number} has no {name}, .*param_groups.{number}..'{name}'. again"
    ):
        getattr(opt, half)()
    assert same_bits(before, params)
    opt.param_groups[number][name] = value
    opt.step(closure_of(params))
    assert not same_bits(before, params)


def test_numbers_of_numpy_are_numbers() -> None:
    params = make_parameters([(3,)], torch.float32)
    opt = FusedSAM(params, SGD, rho=np.float32(0.5), lr=np.float32(0.25), momentum=np.float64(0.5))
    opt.step(closure_of(params))


def test_a_group_with_a_word_for_a_number_is_not_added(backend: Backend) -> None:
    params = make_parameters([(3,), (2,)], torch.float32, backend.device)
    opt = FusedSAM(params[:1], torch.optim.RMSprop, lr=0.1, backend=backend.name)
    for name in ("lr", "momentum", "weight_decay"):
        with pytest.raises(TypeError, match=f"{name} must be a number .*got str in parameter group 1"):
            opt.add_param_group({"params": params[1:], name: "x"})
    assert len(opt.param_groups) == 1


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
    ({"differentiable": 0.0}, "leave out differentiable=0.0, or pass False"),
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


@pytest.mark.parametrize("name", ["adaptive", "check_finite", "stochastic_rounding", "exclusive", "in_backward"])
@pytest.mark.parametrize("value", ["yes", 3, None])
def test_flags_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        FusedSAM([nn.Parameter(torch.ones(2))], SGD, lr=0.1, **{name: value})


def test_options_of_the_base_in_a_dict_and_by_name_are_the_same() -> None:
    p = make_parameters([(3,)], torch.float32)
    in_a_dict = FusedSAM(p, SGD, base_kwargs={"lr": 0.3, "momentum": 0.8, "dampening": 0.5})
    by_name = FusedSAM(p, SGD, lr=0.3, momentum=0.8, dampening=0.5)
    assert in_a_dict.defaults == by_name.defaults
    assert in_a_dict.defaults["momentum"] == 0.8 and in_a_dict.defaults["dampening"] == 0.5
    assert FusedSAM(p, torch.optim.AdamW, lr=0.3).defaults["weight_decay"] == 0.01, "None leaves the base its own"
    assert FusedSAM(p, torch.optim.AdamW, betas=(0.8, 0.9)).defaults["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0.1, "base_kwargs": {"lr": 0.2}}, "lr is given twice"),
        ({"base_kwargs": {"rho": 0.2}}, "rho in base_kwargs is an option of FusedSAM"),
        ({"base_kwargs": ["lr"]}, "base_kwargs must be a dict"),
        ({"base_kwargs": {"learning_rate": 0.2}}, "did you mean lr"),
        ({"betas": (0.9, 0.99)}, "neither FusedSAM nor SGD has such an option"),
    ],
)
def test_options_of_the_base_in_a_dict_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FusedSAM(make_parameters([(3,)], torch.float32), SGD, **given)


@pytest.mark.parametrize("option", ["weight_decay", "momentum", "dampening", "nesterov"])
def test_an_option_beyond_all_floats_is_told_before_a_step_changes_anything(option: str) -> None:
    params = make_parameters([(4,)], torch.float32)
    opt = FusedSAM(params, torch.optim.SGD, lr=0.1)
    backward(params, 0)
    opt.param_groups[0][option] = 10**400
    before = copies(params)
    with pytest.raises(ValueError, match="an option of parameter group 0 is larger than every float"):
        opt.first_step()
    assert same_bits(before, params)
