"""`FusedSAM(assume_no_alias=True, optimizer_in_backward=True)`: the bits of an ordinary step, and refusals.

Each parameter is updated as soon as its gradient is complete.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM, Lion
from fastsam.optim import in_backward
from tests.helpers.interrupting import Interrupt
from tests.helpers.sam_cases import ADAMW, SGD, SHAPES, closure_of, native, places
from tests.helpers.sam_oracle import backward, copies, landscape, make_parameters, same_bits

pytestmark = [native, pytest.mark.usefixtures("poisoned_memory", "small_exchanges")]
Params = list[nn.Parameter]
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (ADAMW, {"lr": 0.05}),
    "lion": (Lion, {"lr": 0.01}),
}


def by_closure(opt: FusedSAM, params: Params) -> None:
    opt.step(closure_of(params))


def make_optimizer(params: Params, base: str = "momentum", **options: Any) -> FusedSAM:
    kind, base_options = BASES[base]
    return FusedSAM(params, kind, rho=0.2, assume_no_alias=True, optimizer_in_backward=True, **base_options, **options)


def hooks(params: Params) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in params)


def test_updates_come_with_their_gradients_which_are_freed() -> None:
    """In the order of the backward pass; a layer that waits for its own is at the perturbed point still."""
    first, last = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    opt = make_optimizer([first, last], "sgd")
    records: list[tuple[bool, bool]] = []
    old_weights = copies([first, last])

    def look(gradient: Tensor) -> None:
        records.append((last.grad is None, first.data_ptr() != home))

    home = first.data_ptr()
    ((first * 2).tanh() * last).sum().backward()
    opt.first_step(zero_grad=True)
    assert first.data_ptr() != home
    hidden = (first * 2).tanh()
    hidden.register_hook(look)
    (hidden * last).sum().backward()
    assert records[-1][1] and first.grad is None and last.grad is None
    assert places([first])[0] == home and not same_bits([first, last], old_weights), "updated before second_step()"
    new_weights = copies([first, last])
    opt.second_step()
    assert same_bits([first, last], new_weights)


@pytest.mark.parametrize("change", ["a gradient by hand", "another rate"])
@pytest.mark.parametrize("base", BASES)
def test_what_changes_between_the_passes(base: str, change: str) -> None:
    """A gradient that no backward pass made is used by the second step."""
    results = []
    for eager in (True, False):
        params = make_parameters([(4,), (3,)], torch.float32)
        opt = FusedSAM(params, BASES[base][0], assume_no_alias=eager, optimizer_in_backward=eager, **BASES[base][1])
        for _ in range(2):
            backward(params, 0)
            opt.first_step(zero_grad=True)
            if change == "another rate":
                opt.param_groups[0]["lr"] /= 2
                landscape(params, 0).backward()
            else:
                landscape(params[:1], 0).backward()
                params[1].grad = torch.ones(3)
            opt.second_step(zero_grad=True)
        results.append(params)
    assert same_bits(*results)


def test_without_cleared_gradients_it_changes_nothing() -> None:
    """Backward passes in `perturbed()` do not train."""
    params = make_parameters(SHAPES, torch.float32)
    opt, old_weights = make_optimizer(params), copies(params)
    backward(params, 0)
    with opt.perturbed():
        landscape(params, 0).backward()
        assert hooks(params) == 0
    assert same_bits(params, old_weights)


def test_an_exception_in_the_second_pass_leaves_whole_updates_and_original_weights() -> None:
    """Each parameter one of both, in its own memory; and the next step is an ordinary one."""
    params, all_params = make_parameters([(4,), (4,)], torch.float32), make_parameters([(4,), (4,)], torch.float32)
    opt, other_opt = make_optimizer(params), make_optimizer(all_params)

    def closure_with(weights: Params, raises: bool) -> Callable[[], Tensor]:
        calls: list[int] = []

        def closure() -> Tensor:
            calls.append(1)
            hidden = (weights[0] * 2).tanh()
            loss: Tensor = (hidden * weights[1]).sum()
            if raises and len(calls) == 2:
                hidden.register_hook(fail)
            loss.backward()
            return loss

        return closure

    def fail(gradient: Tensor) -> None:
        raise Interrupt

    addresses, start = places(params), copies(params)
    with pytest.raises(Interrupt):
        opt.step(closure_with(params, True))
    other_opt.step(closure_with(all_params, False))
    assert places(params) == addresses and hooks(params) == 0
    assert same_bits(params[:1], start[:1]) and (
        same_bits(params[1:], all_params[1:]) or same_bits(params[1:], start[1:])
    )
    opt.step(closure_with(params, False))
    assert not same_bits(params[:1], start[:1])


@pytest.mark.slow
def test_a_compiled_model_is_trained_alike() -> None:
    """Compiled backward passes give their gradients to the same hooks."""
    results = []
    for eager in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        params, compiled_model = list(model.parameters()), torch.compile(model, backend="aot_eager")
        opt = FusedSAM(params, SGD, lr=0.1, assume_no_alias=eager, optimizer_in_backward=eager)
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))

        def closure(compiled_model: Any = compiled_model, x: Tensor = x) -> Tensor:
            loss: Tensor = compiled_model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        assert [p.grad is None for p in params] == [eager] * len(params)
        results.append(params)
    assert same_bits(*results)


def test_a_second_backward_pass_is_refused() -> None:
    params = make_parameters([(4,)], torch.float32)
    opt = make_optimizer(params)
    backward(params, 0)
    opt.first_step(zero_grad=True)
    landscape(params, 0).backward()
    with pytest.raises(RuntimeError, match="a second gradient of parameter 0"):
        landscape(params, 0).backward()


def test_a_scaler_is_refused() -> None:
    params = make_parameters([(4,)], torch.float32)
    opt, scaler = make_optimizer(params), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(landscape(params, 0)).backward()
    opt.first_step(zero_grad=True)
    scaler.scale(landscape(params, 0)).backward()
    params[0].grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="a GradScaler with optimizer_in_backward=True"):
        scaler.step(opt)


def test_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    params = make_parameters([(4,)], torch.float32)
    with pytest.raises(RuntimeError, match="several ranks"):
        in_backward.InBackwardHooks().register(None, (), lambda bucket, slot: True)  # type: ignore[arg-type]
    opt, old_weights = make_optimizer(params), copies(params)
    with pytest.raises(RuntimeError, match="several ranks"):
        by_closure(opt, params)
    assert same_bits(params, old_weights)
