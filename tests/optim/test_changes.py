"""Changes of a model after its optimizer was built: it is converted, moved, loaded, frozen, or shared by optimizers."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import SGD, Model, train
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_weights_written_by_the_user_are_taken(backend: Backend) -> None:
    """Half-precision weights have a master copy; loading other weights must not be undone by it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, donor = Model(dtype, backend.device), Model(dtype, backend.device, seed=7)
        opt = FusedSAM(model.parameters(), SGD, lr=0.1, backend=backend.name)
        train(model, opt, range(3))
        model.load_state_dict(donor.state_dict())
        backward(model.params, 3)
        with opt.perturbed():
            pass
        assert same_bits(model.params, donor.params)
        opt.first_step()
        backward(model.params, 3)
        grads = gradients(model.params)
        opt.second_step()
        for p, d, g in zip(model.params, donor.params, grads):
            expected = (d.detach().double() - 0.1 * g.double()).to(dtype)
            torch.testing.assert_close(p.detach(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-3, atol=1e-4)


def test_data_that_comes_to_overlap_is_an_error(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    train(model, opt, range(2))
    model.params[1].data = model.params[0].data.flatten()[:8]
    old_weights = copies(model.params)
    with pytest.raises(ValueError, match="shares memory"):
        opt.first_step()
    assert same_bits(old_weights, model.params)


# --- load_state_dict(assign=True) ---


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Let `gc.collect()` look only at objects of the test, and not at half a million older objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("clear_with", ["opt", "model"])
@pytest.mark.parametrize("moment", ["before the first step", "after two steps"])
def test_assigned_parameters_are_noticed(moment: str, clear_with: str, backend: Backend) -> None:
    """The module then has other Parameters, and the optimizer's are dead: an error instead of steps that train
    nothing."""
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    if moment == "after two steps":
        train(model, opt, range(2))
    elif clear_with == "model":
        pytest.skip("there are no gradients to clear before the first step")
    state_dict = {n: t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(state_dict, assign=True)
    gc.collect()
    (opt if clear_with == "opt" else model).zero_grad()
    dead = [p.detach() for p in opt.param_groups[0]["params"]]
    old_weights = copies(dead)
    backward(model.params, 2)
    with pytest.raises(
        RuntimeError, match=r"only this optimizer still refers to its parameters \[0, 1, 2\].*Build a new FusedSAM"
    ):
        opt.first_step()
    assert same_bits(old_weights, dead)

    fresh = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    fresh.load_state_dict(opt.state_dict())
    reference = Model(torch.float32, backend.device)
    reference_opt = FusedSAM(reference.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    if moment == "after two steps":
        train(reference, reference_opt, range(2))
        assert opt.state_dict()["state"]
    train(model, fresh, range(2, 4))
    train(reference, reference_opt, range(2, 4))
    assert same_bits(model.params, reference.params), "the momentum went along"


@pytest.mark.usefixtures("quick_collection")
def test_an_assigned_half_of_the_model_is_noticed(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, backend=backend.name)
    train(model, opt, range(1))
    model.weights[1] = nn.Parameter(torch.zeros(8, device=backend.device))
    gc.collect()
    backward(model.params, 1)
    with pytest.raises(RuntimeError, match=r"its parameters \[1\]"):
        opt.first_step()


def test_parameters_that_are_the_optimizers_own_are_not_dead(backend: Backend) -> None:
    """A short script may keep its parameters only in the optimizer."""
    params = make_parameters([(3,), (4,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=1.0, momentum=0.5, backend=backend.name)
    for _ in range(3):
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        del p
        opt.first_step()
        opt.second_step()
        opt.zero_grad()
    old_weights = copies(opt.param_groups[0]["params"])
    opt.first_step()
    opt.second_step()
    assert same_bits(old_weights, opt.param_groups[0]["params"])


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_parameters_without_gradients_that_live_are_not_dead(backend: Backend) -> None:
    """Frozen and unused parameters, parameters of a TorchScript module, and parameters whose state was cleared."""
    model = Model(torch.float32, backend.device)
    script = torch.jit.trace(nn.Linear(3, 2).to(backend.device), torch.zeros(1, 3, device=backend.device))
    opt = FusedSAM([*model.parameters(), *script.parameters()], SGD, lr=0.1, momentum=0.9, backend=backend.name)
    old_weights = copies([*model.params, *script.parameters()])
    for step in range(3):
        backward(model.params, step)
        model.params[1].grad = None
        opt.first_step()
        opt.second_step()
        opt.state.clear()
    pairs = zip(old_weights, [*model.params, *script.parameters()], strict=True)
    changes = [not same_bits([old], [new]) for old, new in pairs]
    assert changes == [True, False] + [True] * (len(model.params) - 2) + [False] * len(list(script.parameters()))


# --- frozen parameters, several optimizers ---


def test_two_optimizers_on_parts_of_a_model(backend: Backend) -> None:
    """Each has its own norm and perturbs its own part."""
    model = Model(torch.float64, backend.device)
    parts = [model.params[:1], model.params[1:]]
    opts = [
        FusedSAM(parts[0], SGD, lr=0.1, backend=backend.name),
        FusedSAM(parts[1], torch.optim.Adam, rho=0.2, backend=backend.name),
    ]
    oracles = [
        Oracle([{"params": parts[0]}], SGD, {"lr": 0.1}),
        Oracle([{"params": parts[1]}], torch.optim.Adam, {"rho": 0.2}),
    ]
    for step in range(4):
        for finish in (False, True):
            backward(model.params, step)
            for opt, oracle, part in zip(opts, oracles, parts):
                (oracle.update if finish else oracle.perturb)(gradients(part))
                (opt.second_step if finish else opt.first_step)()
    for p, q in zip(model.params, [q for oracle in oracles for q in oracle.params]):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-11, atol=1e-11)


def test_a_base_that_stops_being_fused(backend: Backend) -> None:
    """amsgrad switched on in mid-training: Adam's own step takes over, with the state there is."""
    model, other_model = Model(torch.float64, backend.device), Model(torch.float64, backend.device)
    opt = FusedSAM(model.parameters(), torch.optim.Adam, lr=0.1, backend=backend.name)
    train(model, opt, range(2))
    backward(model.params, 2)
    opt.first_step()
    opt.param_groups[0]["amsgrad"] = True
    for entry in opt.state.values():
        entry["max_exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])
    backward(model.params, 2)
    opt.second_step()
    train(model, opt, range(3, 5))

    reference = FusedSAM(other_model.parameters(), torch.optim.Adam, lr=0.1, backend=backend.name)
    train(other_model, reference, range(2))
    amsgrad = FusedSAM(other_model.parameters(), torch.optim.Adam, lr=0.1, amsgrad=True, backend=backend.name)
    state = reference.state_dict()
    state["param_groups"][0]["amsgrad"] = True
    for entry in state["state"].values():
        entry["max_exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])
    amsgrad.load_state_dict(state)
    train(other_model, amsgrad, range(2, 5))
    for p, q in zip(model.params, other_model.params):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_parameters_taken_out_while_perturbed_get_their_weights_back(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, backend=backend.name)
    old_weights = copies(model.params)
    backward(model.params, 0)
    opt.first_step()
    del opt.param_groups[0]["params"][1]
    opt.restore()
    assert same_bits(old_weights, model.params)


def test_moving_to_another_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    model = Model(torch.float32)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9)
    train(model, opt, range(2))
    state: dict[str, Any] = opt.state_dict()["state"]
    model.cuda()
    for p in model.params:
        p.grad = None
    backward(model.params, 2)
    with opt.perturbed():
        pass
    for i, entry in opt.state_dict()["state"].items():
        assert entry["momentum_buffer"].is_cuda
        assert torch.equal(entry["momentum_buffer"].cpu(), state[i]["momentum_buffer"])
    train(model, opt, range(2, 4))
    train(model.cpu(), opt, range(4, 6))
