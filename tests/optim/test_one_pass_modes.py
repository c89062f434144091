"""MSAM and the last gradient: evaluated at the clean weights, saved, interrupted, and following the model's own
modes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fastsam import MSAM, SAM, FusedSAM
from tests.helpers.one_pass_cases import DTYPES, every_base, train_one_pass
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.variant_cases import RHO, make_fused

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
