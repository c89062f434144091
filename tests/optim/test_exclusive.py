"""`FusedSAM(exclusive=True)`: the same bits with less traffic, and every parameter in its own memory when a step is
over, however it ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam.optim import exclusive as exchange
from tests.helpers.sam_cases import (
    ADAM,
    HALF,
    SGD,
    SHAPES,
    first_half,
    halves,
    native,
    places,
)
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory", "worth")


@pytest.fixture
def worth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are exchanged too; with `both_ways` also none."""
    monkeypatch.setattr(exchange, "WORTH", getattr(request, "param", 0))


both_ways = pytest.mark.parametrize("worth", [0, 1 << 40], ids=["exchanged", "in place"], indirect=True)


# --- the same bits as without ---


@native
@pytest.mark.parametrize("groups", [1, 2])
def test_weights_are_exchanged_and_keep_their_memory(groups: int) -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(
        [{"params": params[i::groups]} for i in range(groups)], SGD, lr=0.1, momentum=0.9, rho=0.2, exclusive=True
    )
    kept, memory, before = places(params), [p.detach() for p in params], copies(params)
    first_half(opt, params)
    assert all(p.data_ptr() != at for p, at in zip(params, kept, strict=True) if p.numel())
    assert same_bits(memory, before) and not same_bits(params, before)
    backward(params, 0)
    opt.second_step()
    assert places(params) == kept and same_bits(memory, params) and not same_bits(params, before)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float32, HALF)], ids=str)
def test_several_dtypes_take_the_ordinary_way(dtypes: tuple[torch.dtype, ...], backend: Backend) -> None:
    def trained(exclusive: bool) -> list[nn.Parameter]:
        params = [make_parameters([(5, 3)], dtype, backend.device, seed=i)[0] for i, dtype in enumerate(dtypes)]
        opt = FusedSAM(params, ADAM, lr=0.1, backend=backend.name, exclusive=exclusive)
        for step in range(3):
            halves(opt, params, step)
        return params

    assert same_bits(trained(True), trained(False))


# --- every end of a step ---


# --- what happens between the passes ---


@both_ways
def test_parameters_that_the_model_gave_up_are_noticed() -> None:
    """Whatever the exchange keeps of them, nobody else refers to them."""
    model = nn.Linear(3, 2)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, exclusive=True)
    for step in range(2):
        halves(opt, list(model.parameters()), step)
    model.load_state_dict({name: torch.ones_like(w) for name, w in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"nobody but this optimizer refers to its parameters \[0, 1\]"):
        opt.first_step()


@native
def test_a_graph_of_the_other_point_is_refused() -> None:
    """What autograd saved of the weights is not silently replaced by the exchange."""
    w = nn.Parameter(torch.ones(3))
    opt = FusedSAM([w], SGD, lr=0.1, exclusive=True)
    loss = (w * w.exp()).sum()
    loss.backward(retain_graph=True)
    opt.first_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (w * w.exp()).sum()
    loss.backward(retain_graph=True)
    opt.second_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
