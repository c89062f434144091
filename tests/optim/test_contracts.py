"""Contracts of every training, one contract a test: saved and moved, in every style, with and without gradients."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam.optim.variants import LookSAM
from tests.helpers.sam_cases import places
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.trainings import OPTIONS, VARIANTS, Spec, awkward, by_hand, every_training, loss_of, outcome, state
from tests.helpers.variant_cases import Training

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_exchanges")


# --- saved, copied, moved ---


def through_a_file(training: Training, spec: Spec) -> Training:
    """Load the state from a file into an optimizer with other options, which the state replaces."""
    file = io.BytesIO()
    torch.save(training.opt.state_dict(), file)
    file.seek(0)
    other_training = spec.make()
    other_training.opt.param_groups[0].update(lr=9.0, rho=0.7)
    with torch.no_grad():
        for p, q in zip(other_training.params, training.params, strict=True):
            p.copy_(q)
    other_training.opt.load_state_dict(torch.load(file, weights_only=True))
    return other_training


def through_dcp(training: Training, spec: Spec) -> Training:
    """Copy the state by torch.distributed.checkpoint's functions, which take a model."""
    dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    other_training = spec.make()
    fresh = copies(other_training.params)
    models = [nn.ParameterList(case.params) for case in (training, other_training)]
    dcp.get_optimizer_state_dict(models[1], other_training.opt)
    assert same_bits(fresh, other_training.params), "to ask for the state writes no weights"
    optimizer_state = copy.deepcopy(dcp.get_optimizer_state_dict(models[0], training.opt))
    models[1].load_state_dict(models[0].state_dict())
    dcp.set_optimizer_state_dict(models[1], other_training.opt, optimizer_state)
    return other_training


def move_storages(training: Training, spec: Spec) -> Training:
    """Move all parameters but one to new memory, and fill their old memory."""
    for p in training.params[1:]:
        old, p.data = p.data, p.data.clone()
        old.fill_(torch.nan)
    return training


WAYS: dict[str, Callable[[Training, Spec], Training]] = {
    "state dict": through_a_file, "pickle": lambda training, spec: pickle.loads(pickle.dumps(training)),
    "deepcopy": lambda training, spec: copy.deepcopy(training), "moved": move_storages, "distributed": through_dcp,
}  # fmt: skip


@every_training
@pytest.mark.parametrize("way", WAYS)
def test_a_training_goes_on_where_it_was_saved(spec: Spec, way: str) -> None:
    """New, between two steps, between the two passes of one, and evaluated; the training itself is not touched."""
    if way == "state dict" and spec.base == "nadam" and spec.dtype != torch.float32:
        pytest.skip("torch's loading casts the float32 mu_product of NAdam to the parameters' dtype")
    if way == "distributed" and not (spec.has_kernels and spec.options != "stochastic"):
        pytest.skip("torch makes the state by a step, which only fused bases leave out; it carries no count of noise")
    full_training = spec.make(6)
    for moment in ("new", "idle", "evaluated" if spec.one_pass else "between"):
        if way == "distributed" and moment != ("evaluated" if spec.one_pass else "idle"):
            continue  # torch's functions save no perturbed weights
        start = 0 if moment == "new" else 3
        training = spec.make(start)
        if moment == "evaluated":
            training.opt.eval()
        if moment == "between":
            training.backward(3)
            training.opt.first_step(zero_grad=True)
        other_training, old_weights = WAYS[way](training, spec), copies(training.params)
        if moment == "evaluated":
            other_training.opt.train()
        if moment == "between":
            loss_of(other_training, 3).backward()
            other_training.opt.second_step()
        other_training.steps(range(start + (moment == "between"), 6))
        assert same_bits(other_training.params, full_training.params), moment
        assert way == "moved" or same_bits(old_weights, training.params), moment


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "float64": lambda model: model.double(),
    "float32": lambda model: model.float(),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
}


@every_training
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_converted_training_is_that_of_its_state(spec: Spec, conversion: str) -> None:
    """By assigning `.data` or by swapping tensors, as torch converts; between two steps, and between two passes, where
    the weights that come back are converted too."""
    if not spec.has_kernels:
        pytest.skip("torch's own steps keep the state in the dtype that they found")
    for moment in ("evaluated",) if spec.one_pass else ("idle", "between"):
        training, plain = spec.make(3), spec.make(3)
        if moment == "between":
            training.backward(3)
            training.opt.first_step()
        for case in (training, plain):
            case.opt.eval()
            case.opt.zero_grad()
        plain_state = plain.opt.state_dict()
        torch.__future__.set_swap_module_params_on_conversion(moment == "idle")
        try:
            for case in (training, plain):
                CONVERSIONS[conversion](nn.ParameterList(case.params))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        if moment == "between":
            training.opt.restore()
            assert same_bits(training.params, plain.params), "the unperturbed weights are converted too"
        other_training = spec._replace(dtype=training.params[0].dtype).make()
        with torch.no_grad():
            for p, q in zip(other_training.params, plain.params, strict=True):
                p.copy_(q)
        other_training.opt.load_state_dict(plain_state)
        for case in (training, other_training):
            case.opt.train()
            case.steps(range(3, 5))
        if moment != "between" or spec.options != "stochastic":
            assert same_bits(training.params, other_training.params), moment


# --- one step in every style ---


@every_training
def test_a_closure_is_the_two_halves(spec: Spec) -> None:
    full_training, calls = spec.make(4), []
    closure, halves, kept_grads, cleared_grads, context = (spec.make() for _ in range(5))
    for t in range(4):
        perturbs = halves.opt.perturbs

        def closure_of_step(t: int = t) -> Tensor:
            calls.append(closure.opt.is_perturbed)
            value = loss_of(closure, t)
            value.backward()
            return value

        first_loss = loss_of(closure, t).item()
        assert closure.opt.step(closure_of_step).item() == first_loss, "the loss at the weights"
        assert calls[-1 - perturbs :] == [False, True][: 1 + perturbs]
        by_hand(halves, t)
        assert halves.opt.phase == "first" and not halves.opt.is_perturbed
        assert all(p.grad is None for p in halves.params)
        by_hand(kept_grads, t, zero_grad=False, spoil=lambda _: None)
        while cleared_grads.opt.phase == "first" and not spec.one_pass:  # asked in every step, cleared in place
            cleared_grads.opt.zero_grad(set_to_none=False)
            loss_of(cleared_grads, t).backward()
            grads = [p.grad for p in cleared_grads.params]
            values = copies(grads)
            cleared_grads.opt.first_step()
            assert same_bits(grads, values) and all(p.grad is g for p, g in zip(cleared_grads.params, grads))
        cleared_grads.opt.zero_grad(set_to_none=False)
        loss_of(cleared_grads, t).backward()
        cleared_grads.opt.step()
        context.backward(t)
        with context.opt.perturbed() if not spec.one_pass else nullcontext():
            context.backward(t)
            context.opt.step()
    assert len(calls) == sum(1 + (not spec.one_pass and p) for p in perturbations(spec, 4))
    for training in (closure, halves, kept_grads, cleared_grads, context):
        assert same_bits(training.params, full_training.params)


def perturbations(spec: Spec, steps: int) -> list[bool]:
    variant = VARIANTS[spec.variant]
    interval = variant.k if isinstance(variant, LookSAM) else variant.interval
    return [t >= variant.start and (t - variant.start) % interval == 0 for t in range(steps)]


# --- backends, dtypes, layouts ---


def assert_follows(result: Training, expected: Training, start: Training, part: float) -> None:
    """Assert that `result` is off by at most `part` of the distance that the training went."""
    for training in (result, expected):
        training.opt.eval()
    f, e, s = (torch.cat([p.detach().double().flatten() for p in case.params]) for case in (result, expected, start))
    assert (f - e).norm() <= part * (e - s).norm()


@every_training
def test_backends_agree(spec: Spec) -> None:
    """With the reference in float64."""
    part = {8: 1e-9, 4: 1e-4, 2: 0.2 if spec.has_kernels else 0.4}[spec.dtype.itemsize]
    expected = spec._replace(dtype=torch.float64, options="reference").make(2)
    for options in (OPTIONS[spec.options], {"backend": "reference"}, {"backend": "foreach"}, {"backend": "auto"}):
        assert_follows(spec._replace(options="plain").make(2, **options), expected, spec.make(), part)


@every_training
def test_places_in_memory_change_nothing(spec: Spec) -> None:
    """Transposed, not aligned, with gaps, which stay as they were; gradients whose elements are in any order."""
    dense, other_training = spec.make(), spec.make(layouts=awkward)
    for t in range(3):
        by_hand(dense, t)

        def reorder(_: int, t: int = t) -> None:
            p = other_training.params[0]
            p.grad = p.grad.contiguous() if t % 2 else p.grad.t().contiguous().t()

        by_hand(other_training, t, spoil=None if spec.options == "in backward" else reorder)
    assert_follows(other_training, dense, spec.make(), {8: 1e-9, 4: 1e-3, 2: 0.05}[spec.dtype.itemsize])
    if spec.options not in ("exclusive", "in backward"):
        p = other_training.params[2]
        room = p.as_strided((*p.shape[:-1], 2 * p.shape[-1]), p.stride())
        assert room[..., p.shape[-1] :].isnan().all(), "wrote into the gaps"


# --- gradients ---


@every_training
def test_parameters_without_a_gradient_stay(spec: Spec) -> None:
    """In the pass without their gradient. A parameter that needs no gradient joins with its first one."""
    absent = [({1}, {2}), ({0, 1, 2}, {1}), ({2}, {0, 1, 2}), (set(), {0})]
    training = spec.make(1)

    def drop(missing_slots: set[int]) -> list[Tensor]:
        for i in missing_slots:
            training.params[i].grad = None
        return copies([training.params[i] for i in missing_slots])

    for t, (first, second) in enumerate(absent, 1):
        with training.opt.evaluating():
            old_weights = copies([training.params[i] for i in second])
        training.backward(t)
        if training.opt.perturbs:
            first_weights = drop(first)
            training.opt.first_step(zero_grad=True)
            assert same_bits(first_weights, [training.params[i] for i in first]), "not perturbed"
            for p, g in zip(training.params, torch.autograd.grad(loss_of(training, t), training.params)):
                p.grad = g
        drop(second)
        training.opt.second_step()
        with training.opt.evaluating():
            assert same_bits(old_weights, [training.params[i] for i in second]), "not updated"
    late_training, present = spec.make(), spec.make()
    late_training.params[1].requires_grad_(False)
    for t in range(4):
        late_training.params[1].requires_grad_(t > 1)
        for case in (late_training, present):
            by_hand(case, t, spoil=lambda _, case=case, t=t: t > 1 or setattr(case.params[1], "grad", None))
    if spec.options not in ("in backward", "stochastic"):  # updated already; noise depends on the layout
        assert same_bits(outcome(late_training), outcome(present))


@every_training
@pytest.mark.parametrize("unscales", [False, True], ids=["the step unscales", "unscaled before it"])
def test_a_scaler_changes_nothing(spec: Spec, unscales: bool) -> None:
    """Scaled gradients in both passes, with another scale in every step."""
    if spec.variant == "lesam" or spec.options == "in backward":
        pytest.skip("LESAM needs the scale before the first step; optimizer_in_backward=True takes no scaler")
    if unscales and spec.dtype == torch.float16:
        pytest.skip("a GradScaler unscales no float16 gradients")
    training, scaler = spec.make(), torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
    for t in range(3):
        training.opt.zero_grad()
        while training.opt.perturbs and training.opt.phase == "first":
            scaler.scale(loss_of(training, t)).backward()
            training.opt.first_step(zero_grad=True)
        scaler.scale(loss_of(training, t)).backward()
        if unscales:
            scaler.unscale_(training.opt)
        scaler.step(training.opt)
        scaler.update()
        assert not hasattr(training.opt, "grad_scale") and not hasattr(training.opt, "found_inf")
    assert_follows(training, spec.make(3), spec.make(), {8: 1e-6, 4: 1e-4, 2: 0.1}[spec.dtype.itemsize])


@every_training
def test_gradients_that_are_not_finite_leave_everything(spec: Spec) -> None:
    """In the second pass or in both, found by a scaler or by `skip_nonfinite`: the step was never made."""
    if spec.options in ("in backward", "stochastic"):
        pytest.skip("optimizer_in_backward=True refuses both; another perturbation has another noise")
    for kind, passes, start in itertools.product(("scaler", "skip_nonfinite"), ((1,), (0, 1)), (0, 3)):
        training, other_training = spec.make(start, skip_nonfinite=kind == "skip_nonfinite"), spec.make(start)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))  # makes its scale
        old_weights, old, addresses = copies(training.params), state(training.opt), places(training.params)
        for number in range(2) if training.opt.perturbs else (1,):
            training.backward(start)
            if number in passes:
                training.params[1].grad[2] = torch.nan if start else torch.inf
            if number:
                scaler.step(training.opt) if kind == "scaler" else training.opt.second_step()
            else:
                training.opt.first_step(zero_grad=True)
        assert same_bits(old_weights, training.params) and places(training.params) == addresses, (kind, passes, start)
        assert not start or same_bits(old, state(training.opt)), (kind, passes)  # the first look makes its entries
        other_training.opt._engine.steps = training.opt._engine.steps  # a step that was skipped counts
        for case in (training, other_training):
            case.steps(range(start + 1, start + 3))
        assert same_bits(training.params, other_training.params), (kind, passes, start)
