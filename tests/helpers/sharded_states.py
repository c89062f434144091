"""Checkpoints of sharded parameters, on one of several ranks, as `sharded_ranks`."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard

from fastsam import MSAM, SAM, FusedSAM
from fastsam.optim.variants import VaSSO
from tests.helpers.sharded_ranks import BASES, Net, assert_same, data, whole


def train_sharded(base: str, steps: range, sam: SAM, dtype: torch.dtype) -> tuple[nn.Module, FusedSAM]:
    net = Net().to(dtype)
    fully_shard(net.second)
    fully_shard(net)
    opt = FusedSAM(net.parameters(), BASES[base][0], variant=sam, **BASES[base][1])
    for number in steps:
        step_in(net, opt, number, dtype)
    return net, opt


def step_in(net: nn.Module, opt: FusedSAM, number: int, dtype: torch.dtype) -> None:
    def closure() -> Tensor:
        x, y = (t.to(dtype) for t in data(number))
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


CHECKPOINTS: list[tuple[str, SAM, torch.dtype]] = [
    ("sgd", SAM(0.3), torch.float32), ("plain sgd", SAM(0.3), torch.bfloat16), ("adamw", VaSSO(0.3), torch.float32),
    ("adamw", SAM(0.3), torch.bfloat16), ("nadam", SAM(0.3), torch.float32), ("sgd", MSAM(0.3), torch.float32),
]  # fmt: skip


def resumed_in_memory(rank: int, wide: bool = True) -> str:
    """Resume by torch's functions in an optimizer that has made no step, and by the optimizer's own state dict."""
    for base, sam, dtype in CHECKPOINTS if wide else CHECKPOINTS[:1]:
        for uses_own_state in (False, True):
            net, opt = train_sharded(base, range(3), sam, dtype)
            new_net, new_opt = train_sharded(base, range(0), sam, dtype)
            old_weights = [whole(p).clone() for p in new_net.parameters()]
            if uses_own_state:
                state = opt.state_dict()
            else:
                opt.eval()  # the weights of a one-pass variant
                state = dcp.get_optimizer_state_dict(net, opt)
                dcp.get_optimizer_state_dict(new_net, new_opt)
                assert_same(
                    list(new_net.parameters()), old_weights, True, "reading a fresh optimizer's state writes nothing"
                )
            with torch.no_grad():
                for p, q in zip(new_net.parameters(), net.parameters(), strict=True):
                    p.copy_(q)
            if uses_own_state:
                new_opt.load_state_dict(state)
            else:
                dcp.set_optimizer_state_dict(new_net, new_opt, state)
                opt.train()
                new_opt.train()
            for number in range(3, 6):
                step_in(net, opt, number, dtype)
                step_in(new_net, new_opt, number, dtype)
            assert_same(list(new_net.parameters()), list(net.parameters()), True, (base, sam, dtype, uses_own_state))
    return "kept"


def save_sharded(rank: int, folder: str) -> str:
    for i, (base, sam, dtype) in enumerate(CHECKPOINTS):
        net, opt = train_sharded(base, range(3), sam, dtype)
        opt.eval()
        model, optimizer = dcp.get_state_dict(net, opt)
        save({"model": model, "opt": optimizer}, checkpoint_id=f"{folder}/{i}")
        opt.train()
        for number in range(3, 5):
            step_in(net, opt, number, dtype)
        ends = [whole(p) for p in net.parameters()]
        if rank == 0:
            torch.save(ends, Path(folder, f"{i}.pt"))
    return "kept"


def load_sharded(rank: int, folder: str) -> str:
    """Load on a different number of ranks, and compare."""
    for i, (base, sam, dtype) in enumerate(CHECKPOINTS):
        net, opt = train_sharded(base, range(0), sam, dtype)
        model, optimizer = dcp.get_state_dict(net, opt)
        state = {"model": model, "opt": optimizer}
        load(state, checkpoint_id=f"{folder}/{i}")
        states = {"model_state_dict": state["model"], "optim_state_dict": state["opt"]}
        dcp.set_state_dict(net, opt, **states)  # type: ignore[arg-type]
        opt.train()
        for number in range(3, 5):
            step_in(net, opt, number, dtype)
        if dtype == torch.float32:
            assert_same(list(net.parameters()), torch.load(Path(folder, f"{i}.pt")), False, (base, sam))
        else:
            for p, q in zip(net.parameters(), torch.load(Path(folder, f"{i}.pt")), strict=True):
                torch.testing.assert_close(whole(p), q, rtol=2**-6, atol=1e-3)
    return "kept"
