"""`FusedSAM(..., model=...)`: the second pass stays out of running statistics; and which pass it is."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from tests.helpers.sam_oracle import same_bits

SGD = torch.optim.SGD


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True))


class Loop:
    def __init__(self, model: nn.Module, opt: FusedSAM) -> None:
        self.model, self.opt, self.phases = model, opt, []  # type: ignore[var-annotated]
        self.x = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(1))

    def loss(self) -> Tensor:
        self.phases.append((self.opt.phase, self.opt.is_perturbed))
        loss = self.model(self.x).square().sum() + self.model[0].weight.sin().sum()
        loss.backward()
        return loss


def with_a_closure(loop: Loop) -> None:
    loop.opt.step(loop.loss)


def in_halves(loop: Loop) -> None:
    loop.opt.zero_grad()
    loop.loss()
    loop.opt.first_step(zero_grad=True)
    loop.loss()
    loop.opt.second_step()


def in_a_context(loop: Loop) -> None:
    loop.opt.zero_grad()
    loop.loss()
    with loop.opt.perturbed():
        loop.opt.zero_grad()
        loop.loss()
        loop.opt.step()


HOOKS = torch.nn.modules.module._global_forward_pre_hooks
STYLES = (with_a_closure, in_halves, in_a_context)


def passes_of(model: nn.Module) -> list[int]:
    """Return the number of batches that each layer with statistics has counted."""
    return [int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]


@pytest.mark.parametrize("form", ["model", "list"])
@pytest.mark.parametrize("style", STYLES)
def test_the_second_pass_stays_out_of_running_statistics(style: Callable[[Loop], None], form: str) -> None:
    model, twin = Net(), Net()
    loop = Loop(
        model,
        FusedSAM(model.parameters(), SGD, lr=0.1, rho=0.5, model=model if form == "model" else [model[1], model[2]]),
    )
    for step in range(2):
        with torch.no_grad():
            for p, q in zip(twin.parameters(), model.parameters()):
                p.copy_(q)
        style(loop)
        twin(loop.x)  # a plain training step's one forward pass at these weights
        # (InstanceNorm does not count what it has seen.)
        assert passes_of(model)[0] == step + 1
        assert same_bits(list(model.buffers()), list(twin.buffers()))
        assert model[1].track_running_stats
    assert loop.phases == [("first", False), ("second", True)] * 2
    assert loop.opt.phase == "first" and not loop.opt.is_perturbed


def test_without_a_model_both_passes_count() -> None:
    model = Net()
    loop = Loop(model, FusedSAM(model.parameters(), SGD, lr=0.1))
    with_a_closure(loop)
    assert passes_of(model)[0] == 2


@pytest.mark.parametrize("how", ["restore", "closure", "context", "hook"])
def test_a_step_that_ends_otherwise_leaves_the_layers_as_they_were(how: str) -> None:
    model = Net()
    buffers = [id(b) for b in model.buffers()]
    loop = Loop(model, FusedSAM(model.parameters(), SGD, lr=0.1, model=model))

    def failing_closure() -> Tensor:
        loss = loop.loss()
        if loop.opt.is_perturbed:
            raise KeyError
        return loss

    if how == "closure":
        with pytest.raises(KeyError):
            loop.opt.step(failing_closure)
    else:
        loop.loss()
        if how == "context":
            with pytest.raises(KeyError), loop.opt.perturbed():
                raise KeyError
        else:
            loop.opt.first_step()
            assert not model[1].track_running_stats
            if how == "restore":
                loop.opt.restore()
            else:
                handle = loop.opt.register_step_pre_hook(lambda *a: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loop.opt.second_step()
                handle.remove()
    assert model[1].track_running_stats and [id(b) for b in model.buffers()] == buffers
    with_a_closure(loop)
    assert model[1].track_running_stats


@pytest.mark.parametrize("copy_method", ["deepcopy", "pickle", "state dict"])
def test_a_copy_made_between_the_passes_goes_on_alike(copy_method: str) -> None:
    model = Net()
    loop = Loop(model, FusedSAM(model.parameters(), SGD, lr=0.1, model=model))
    loop.loss()
    loop.opt.first_step(zero_grad=True)
    pair = model, loop.opt
    if copy_method == "state dict":
        other_net = Net()
        opt = FusedSAM(other_net.parameters(), SGD, lr=0.1, model=other_net)
        other_net.load_state_dict(model.state_dict())
        opt.load_state_dict(loop.opt.state_dict())
    else:
        other_net, opt = copy.deepcopy(pair) if copy_method == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for case in (loop, Loop(other_net, opt)):
        case.loss()
        case.opt.second_step()
        in_halves(case)
    assert same_bits(list(model.parameters()), list(other_net.parameters()))
    assert same_bits(list(model.buffers()), list(other_net.buffers())) and passes_of(other_net)[0] == 2
    assert other_net[1].track_running_stats


def test_what_is_no_model() -> None:
    p = nn.Parameter(torch.ones(2))
    for wrong_model, words in ((3, "3"), ([nn.ReLU(), 3], "3"), ("resnet", "'resnet'")):
        with pytest.raises(TypeError, match=f"model must be a torch.nn.Module or several, got {words}"):
            FusedSAM([p], SGD, lr=0.1, model=wrong_model)  # type: ignore[arg-type]


def test_the_optimizer_does_not_keep_the_model() -> None:
    """Else a model that is gone would seem to be trained."""
    model = Net()
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, model=model)
    reference = weakref.ref(model)
    del model
    assert reference() is None and opt.param_groups


def warnings_of(net: nn.Module, style: Callable[[Loop], None], **options: object) -> list[str]:
    """Return the warnings about BatchNorm of three steps. Their places are in this file or in torch."""
    opt = FusedSAM(net.parameters(), SGD, lr=0.01, **options)  # type: ignore[arg-type]
    loop = Loop(net, opt)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(3):
            style(loop)
    return [str(w.message) for w in records]


@pytest.mark.parametrize("style", STYLES)
def test_batchnorm_without_the_model_is_told_once(style: Callable[[Loop], None]) -> None:
    old_hooks = set(HOOKS)
    (message,) = warnings_of(Net(), style)
    assert "model=model" in message
    assert set(HOOKS) <= old_hooks


def frozen_by_hand(model: nn.Module) -> nn.Module:
    model[1].momentum = 0  # type: ignore[index, operator]
    return model


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_told_where_statistics_are_left_alone(style: Callable[[Loop], None]) -> None:
    net = Net()
    assert warnings_of(net, style, model=net) == []
    assert warnings_of(Net().eval(), style) == []
    assert warnings_of(frozen_by_hand(Net()), style) == []
    assert warnings_of(nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4)), style) == []


def test_a_batchnorm_of_another_model_is_not_told() -> None:
    teacher, loop = Net(), Loop(net := nn.Sequential(nn.Conv1d(2, 4, 3)), FusedSAM(net.parameters(), SGD, lr=0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.loss()
        loop.opt.first_step(zero_grad=True)
        teacher(loop.x)
        loop.loss()
        loop.opt.second_step()


@pytest.mark.parametrize("end", ["restore", "drop"])
def test_a_step_that_is_given_up_leaves_no_hook(end: str) -> None:
    gc.collect()
    old_hooks = set(HOOKS)
    model = Net()
    loop = Loop(model, FusedSAM(model.parameters(), SGD, lr=0.01))
    loop.loss()
    loop.opt.first_step()
    assert set(HOOKS) - old_hooks
    if end == "restore":
        loop.opt.restore()
    else:
        del loop
        gc.collect()
    assert set(HOOKS) == old_hooks
