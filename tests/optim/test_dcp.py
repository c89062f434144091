"""torch.distributed.checkpoint's functions for an optimizer's state, on one process and plain parameters
(`test_sharded.py` has several)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from fastsam import GSAM, MSAM, SAM, FusedSAM
from fastsam.optim.variants import LookSAM
from tests.helpers.sam_oracle import same_bits

state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict", reason="torch without torch.distributed")
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),  # makes its own step
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


def step(net: nn.Module, opt: FusedSAM, number: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number)).to(next(net.parameters()).dtype)

    def closure() -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


@pytest.mark.parametrize("sam", [SAM(0.2), GSAM(0.2), SAM(0.2, interval=2), SAM(0.2, start=2), MSAM(0.2)], ids=str)
def test_a_state_that_is_made_for_it_is_that_of_no_step(sam: SAM) -> None:
    nets = [Net(), Net()]
    for number, net in enumerate(nets):
        opt = FusedSAM(net.parameters(), torch.optim.AdamW, variant=sam, lr=0.05)
        if number:
            state_dict.get_optimizer_state_dict(net, opt)
            assert len(opt.state) == 4 and all(float(e["step"]) == 0 for e in opt.state.values())
            assert opt._engine.steps == 0
        for t in range(4):
            step(net, opt, t)
    assert same_bits(*[list(net.parameters()) for net in nets])


@pytest.mark.parametrize(
    ("sam", "flat"),
    [(SAM(0.2, interval=3), False), (SAM(0.2, interval=3, start=1), True), (LookSAM(0.2, k=3), False)],
    ids=str,
)
@pytest.mark.parametrize("base", ["sgd", "nadam"])
def test_the_count_of_steps_goes_on_in_a_fresh_optimizer(base: str, sam: SAM, flat: bool, tmp_path: Path) -> None:
    cls, options = BASES[base]
    net, other_net = Net(), Net()
    opt, fresh = (FusedSAM(m.parameters(), cls, variant=sam, **options) for m in (net, other_net))
    for number in range(4):
        step(net, opt, number)
    form = state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)
    source_state = state_dict.get_optimizer_state_dict(net, opt, options=form)
    torch.distributed.checkpoint.save(source_state, checkpoint_id=tmp_path, no_dist=True)
    target_state = state_dict.get_optimizer_state_dict(other_net, fresh, options=form)
    torch.distributed.checkpoint.load(target_state, checkpoint_id=tmp_path, no_dist=True)
    state_dict.set_optimizer_state_dict(other_net, fresh, target_state, options=form)
    other_net.load_state_dict(net.state_dict())
    for number in range(4, 8):
        assert fresh.perturbs == opt.perturbs
        step(net, opt, number)
        step(other_net, fresh, number)
    assert same_bits(list(net.parameters()), list(other_net.parameters()))


def test_perturbed_weights_are_not_saved_for_others() -> None:
    net = Net()
    opt = FusedSAM(net.parameters(), torch.optim.SGD, lr=0.1)  # without state, so torch makes it by a step
    net(torch.ones(1, 3)).sum().backward()
    opt.first_step(zero_grad=True)
    with pytest.raises(RuntimeError, match=r"call restore\(\) first"):
        state_dict.get_optimizer_state_dict(net, opt)
    opt.zero_grad()
    assert opt.is_perturbed, "and the step is not ended"
    opt.restore()
    assert state_dict.get_optimizer_state_dict(net, opt)["param_groups"]


def test_only_torchs_function_gets_a_step_that_does_nothing() -> None:
    opt = FusedSAM(Net().parameters(), torch.optim.SGD, lr=0.0)
    with pytest.raises(RuntimeError, match="nothing to do"):
        opt.step()
