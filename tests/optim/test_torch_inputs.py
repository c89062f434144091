"""torch's own inputs for testing optimizers, with an entry for FusedSAM around each of torch's optimizers that can be a
base."""

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import FusedSAM
from tests.helpers.sam_oracle import Oracle, backward, gradients, make_parameters, same_bits

REFUSED = {
    "Adadelta": "its option rho",
    "LBFGS": "it calls a closure many times",
    "SparseAdam": "it takes sparse gradients only",
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")


BASES = [
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", *REFUSED)
]


@functools.cache
def torchs_own() -> Any:
    """Import torch's module of test inputs, but not with this file, because it takes six seconds in every worker."""
    return pytest.importorskip(
        "torch.testing._internal.common_optimizers",
        reason="torch's test inputs need the package expecttest, of the extra `test`",
    )


def entry(name: str) -> Any:
    """Turn torch's entry for a base into one for FusedSAM around it. Differentiable steps are not supported."""
    common = torchs_own()
    (base,) = (info for info in common.optim_db if info.optim_cls.__name__ == name)

    def inputs(device: str, dtype: torch.dtype | None = None) -> list[Any]:
        return [
            common.OptimizerInput(i.params, {**i.kwargs, "base_optimizer": base.optim_cls}, i.desc)
            for i in base.optim_inputs_func(device)
        ]

    def errors(device: str, dtype: torch.dtype) -> list[Any]:
        error_inputs = base.optim_error_inputs_func(device, dtype)
        for error in error_inputs:
            optimizer_input = error.optimizer_error_input
            optimizer_input.kwargs = {**optimizer_input.kwargs, "base_optimizer": base.optim_cls}
            if error.error_type is UserWarning:
                # torch warns that duplicate parameters will be an error one day; here they are
                error.error_type, error.error_regex = ValueError, "a parameter group with duplicate parameters"
        return error_inputs

    return common.OptimizerInfo(
        FusedSAM,
        optim_inputs_func=inputs,
        optim_error_inputs_func=errors,
        supported_impls=tuple(i for i in base.supported_impls if i != "differentiable"),
        supports_fused_on=base.supports_fused_on,
        supports_complex=False,
        supports_multiple_devices=False,
        has_capturable_arg=base.has_capturable_arg,
    )


def inputs_of(name: str) -> Iterator[Any]:
    """Yield every input of a base; the last printed one has failed."""
    optim_inputs = torchs_own()._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float64, entry(name))
    assert optim_inputs
    for optim_input in optim_inputs:
        print(f"{name}: {optim_input.desc} {optim_input.kwargs}")
        yield optim_input


def shapes(name: str) -> list[tuple[int, ...]]:
    return [(5, 3), (4, 6)] if name == "Muon" else [(5, 3), (7,), ()]  # Muon optimizes matrices only


def kwargs_of(optim_input: Any) -> dict[str, Any]:
    return copy.deepcopy(optim_input.kwargs)


def step_both(opt: FusedSAM, oracle: Oracle | None, params: list[nn.Parameter], step: int) -> None:
    for finish in (False, True):
        backward(params, step)
        if oracle is not None:
            (oracle.update if finish else oracle.perturb)(gradients(params))
        (opt.second_step if finish else opt.first_step)()


@pytest.mark.parametrize("name", BASES)
def test_follows_the_base_optimizer(name: str) -> None:
    """From every input: the step that torch's optimizer takes from the unperturbed weights with the perturbed
    gradient."""
    for optim_input in inputs_of(name):
        follow_the_base(name, optim_input)


def follow_the_base(name: str, optim_input: Any) -> None:
    options = kwargs_of(optim_input)
    base = options.pop("base_optimizer")
    params = make_parameters(shapes(name), torch.float64)
    opt = FusedSAM(params, base, rho=0.2, **options)
    oracle = Oracle([{"params": params}], base, {"rho": 0.2, **copy.deepcopy(options)})
    assert (opt._engine.rule is not None) == (name in FUSED and not options.get("amsgrad"))
    for step in range(6):
        if step == 3:  # the state goes to a fresh optimizer, and to a copy
            other_params = [nn.Parameter(p.detach().clone()) for p in params]
            other_opt = FusedSAM(other_params, base, rho=0.2, **copy.deepcopy(options))
            other_opt.load_state_dict(opt.state_dict())
            twin_params, twin = copy.deepcopy((params, opt))
        step_both(opt, oracle, params, step)
        if step >= 3:
            step_both(other_opt, None, other_params, step)
            step_both(twin, None, twin_params, step)
    assert same_bits(params, twin_params)
    if name == "NAdam":  # torch's own loading casts its float32 mu_product to the parameter's dtype
        torch.testing.assert_close(params, other_params, rtol=1e-6, atol=0)
    else:
        assert same_bits(params, other_params)
    for p, q in zip(params, oracle.params):
        # eps divides roundings, see test_optim_trajectory
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", BASES)
def test_errors_are_errors_here_too(name: str) -> None:
    error_inputs = entry(name).optim_error_inputs_func("cpu", torch.float32)
    assert error_inputs
    for error in error_inputs:
        print(error.optimizer_error_input.desc)
        be_an_error(error)


def be_an_error(error: Any) -> None:
    optim_input = error.optimizer_error_input
    params = optim_input.params
    if params is None:
        params = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 2))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if error.error_on == torchs_own().OptimizerErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type, match=error.error_regex):
                FusedSAM(params, **optim_input.kwargs)
        else:  # an error of the first step, of complex parameters: refused at construction already
            with pytest.raises((ValueError, error.error_type)):
                FusedSAM(params, **optim_input.kwargs).first_step()


def test_every_entry_of_torchs_is_a_base_or_refused() -> None:
    assert {info.optim_cls.__name__ for info in torchs_own().optim_db} == {*BASES, *REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_a_base_say_so(name: str) -> None:
    params = make_parameters([(3,)], torch.float32)
    if name == "SparseAdam":
        opt = FusedSAM(params, torch.optim.SparseAdam)
        params[0].grad = torch.ones(3).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            opt.first_step()
    else:
        with pytest.raises(ValueError, match=name):
            FusedSAM(params, getattr(torch.optim, name))
