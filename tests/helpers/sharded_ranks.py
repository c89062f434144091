"""Sharded parameters on one of several ranks, compared with the same training unsharded; for `rank_group.on_ranks`.

Every function raises AssertionError on a rank where a promise is broken, and returns "kept".
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fastsam import GSAM, MSAM, SAM, FusedSAM, backend
from fastsam.optim.variants import WSAM, FriendlySAM, LastGradient, LookSAM, PreconditionedSAM, VaSSO

warnings.simplefilter("ignore")
SHAPES = [(5, 3), (1,), (4, 6), (2, 2), (3,)]
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),  # makes its own step
}
# Variants whose norms and inner products depend only on gradients have the bits of the unsharded step if these sums
# are exact. Compiled kernels add exactly here; torch's functions round each tensor's norm.
EXACT = {
    "sam": SAM(0.3), "gsam": GSAM(0.3, alpha=0.4), "wsam": WSAM(0.3, gamma=0.8), "last": LastGradient(0.3),
}  # fmt: skip
CLOSE = {
    "asam": SAM(0.3, True), "looksam": LookSAM(0.3, k=2), "friendly": FriendlySAM(0.3), "vasso": VaSSO(0.3),
    "msam": MSAM(0.3), "preconditioned": PreconditionedSAM(0.3, eps=0.01),
}  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_same(results: Sequence[Tensor], expected: Sequence[Tensor], exact: bool, label: object) -> None:
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        one, other_tensor = whole(a), whole(b)
        if exact:
            assert torch.equal(one, other_tensor), f"{label}: parameter {i}"
        else:
            difference = (one - other_tensor).abs().max()
            assert torch.allclose(one, other_tensor, rtol=2e-5, atol=1e-6), f"{label}: parameter {i}: {difference}"


# --- parameters alone, with gradients whose squares add up exactly ---

Place = Callable[[int, Tensor], Tensor]


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


class Pair:
    """The same parameters twice, placed and whole, each with its optimizer."""

    def __init__(self, place: Place, base: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        cls, options_of_base = BASES[base]
        start = [integers(shape, 100 + i).to(dtype) / 16 for i, shape in enumerate(SHAPES)]
        self.place, self.dtype = place, dtype
        self.plain = [nn.Parameter(t.clone()) for t in start]
        self.split = [nn.Parameter(place(i, t.clone())) for i, t in enumerate(start)]
        self.plain_opt, self.opt = (FusedSAM(p, cls, **options, **options_of_base) for p in (self.plain, self.split))

    def grads(self, number: int) -> None:
        for i, (p, q) in enumerate(zip(self.plain, self.split, strict=True)):
            g = integers(tuple(p.shape), 10 * number + i).to(self.dtype)
            p.grad, q.grad = g.clone(), self.place(i, g)

    def step(self, number: int, exact: bool, label: object) -> None:
        passes = 2 if self.opt.perturbs else 1
        for half in range(passes):
            self.grads(2 * number + half)
            for opt in (self.plain_opt, self.opt):
                opt.first_step() if half < passes - 1 else opt.step()
            assert_same(self.split, self.plain, exact, (label, number, half))


def make_placer(mesh: DeviceMesh, *placements: Sequence[Placement] | None) -> Place:
    """Return a function that places parameters by these placements in turn. None leaves a parameter unplaced."""

    def place(i: int, t: Tensor) -> Tensor:
        where = placements[i % len(placements)]
        return t.clone() if where is None else distribute_tensor(t, mesh, where, src_data_rank=None)

    return place


def steps_beside_unsharded(rank: int, wide: bool) -> str:
    """Compare also shards that only rank 0 has, repeated parameters, and plain parameters next to them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mixes: dict[str, tuple[Sequence[Placement] | None, ...]] = {
        "mixed": ([Shard(0)], [Replicate()], None),
        "sharded": ([Shard(0)],),
        "repeated": ([Replicate()],),
        "by the last dimension": ([Shard(-1)], [Shard(0)]),
    }
    for mix, placements in (mixes if wide else {"mixed": mixes["mixed"]}).items():
        place = make_placer(mesh, *placements)
        for base in BASES if wide else ("sgd", "adamw"):
            for name, sam in (
                {**EXACT, **CLOSE}.items() if wide else {"sam": EXACT["sam"], "gsam": EXACT["gsam"]}.items()
            ):
                if name == "msam" and base in ("plain sgd", "nadam"):
                    continue
                if name == "preconditioned" and base != "adamw":
                    continue
                for dtype in (torch.float32, torch.bfloat16) if wide and name in EXACT else (torch.float32,):
                    pair = Pair(place, base, dtype, variant=sam)
                    for number in range(4):
                        exact = name in EXACT and base != "nadam"  # torch's arithmetic of nadam differs for DTensors
                        pair.step(number, exact and backend("cpu") == "native", (mix, base, name, dtype))
    return "kept"


def one_sum_a_step(rank: int) -> str:
    """Check that a step has one all-reduce of one number, and two with `skip_nonfinite`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    calls: list[tuple[int, torch.dtype]] = []
    original = dist.all_reduce

    def count_call(tensor: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((tensor.numel(), tensor.dtype))
        return original(tensor, *args, **options)

    for check, expected in ((False, 1), (True, 2)):
        pair = Pair(make_placer(mesh, [Shard(0)], [Replicate()], None), "sgd", skip_nonfinite=check)
        for number in range(2):
            pair.grads(2 * number)
            calls.clear()
            dist.all_reduce = count_call
            try:
                pair.opt.first_step()
                pair.grads(2 * number + 1)
                pair.opt.second_step()
            finally:
                dist.all_reduce = original
            assert calls == [(1, torch.float64)] * expected, calls
    return "kept"


def not_finite(rank: int) -> str:
    """Check that an infinite gradient on one rank has an effect on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for half in range(2):
        pair = Pair(make_placer(mesh, [Shard(0)], [Replicate()]), "sgd", skip_nonfinite=True)
        pair.step(0, True, "before")
        old_weights = [whole(p).clone() for p in pair.split]
        for number, half_step in enumerate((pair.opt.first_step, pair.opt.second_step)):
            pair.grads(2 + number)
            if number == half:
                grad = integers(SHAPES[0], 1)
                grad[-1, -1] = torch.inf  # an element of the last rank that has a part of it
                pair.split[0].grad = pair.place(0, grad)
            half_step()
            assert_same(pair.split, old_weights, True, half) if number == 0 == half else None
        has_moved = [not torch.equal(whole(p), q) for p, q in zip(pair.split, old_weights, strict=True)]
        assert any(has_moved) == (half == 0), "a first gradient with inf perturbs nothing, a second updates nothing"
    return "kept"


# --- fully_shard ---


class Net(nn.Module):
    """A root with parameters in addition to its children's, some with fewer rows than there are ranks."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale * torch.tanh(self.second(torch.tanh(self.first(x)))))


def sharded_net(mesh: DeviceMesh | None = None) -> Net:
    net = Net()
    fully_shard(net.second, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def data(number: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
    return x, torch.sin(x.sum(1, keepdim=True))


def loss_of(net: nn.Module, number: int = 0) -> Tensor:
    x, y = data(number)
    return (net(x) - y).square().mean()


def step(net: nn.Module, opt: FusedSAM, number: int) -> float:
    def closure() -> Tensor:
        loss = loss_of(net, number)
        loss.backward()
        return loss

    return float(opt.step(closure))


def fsdp_steps(rank: int, base: str = "sgd", variant: str = "sam") -> str:
    """Compare steps. Every rank has the same batch, so that the mean gradient is the unsharded gradient."""
    cls, options = BASES[base]
    sam = {**EXACT, **CLOSE}[variant]
    net, plain = sharded_net(), Net()
    opt, plain_opt = (FusedSAM(m.parameters(), cls, variant=sam, **options) for m in (net, plain))
    for number in range(4):
        assert abs(step(net, opt, number) - step(plain, plain_opt, number)) < 1e-5
        assert_same(list(net.parameters()), list(plain.parameters()), False, number)
    state = opt.state_dict()["state"]
    assert all(isinstance(v, DTensor) for e in state.values() for n, v in e.items() if n != "step" and v.dim())
    return "kept"


def no_stale_copy(rank: int) -> str:
    """Check that no pass uses parameters that the root gathered in an earlier forward pass."""
    net, plain = sharded_net(), Net()
    opt, plain_opt = (FusedSAM(m.parameters(), torch.optim.SGD, rho=0.5, lr=0.1) for m in (net, plain))
    losses: list[list[float]] = []
    for model, model_opt in ((net, opt), (plain, plain_opt)):
        losses_of_model = []
        loss_of(model).backward()
        losses_of_model.append(float(loss_of(model)))  # an evaluation, which leaves a copy of the weights
        with model_opt.perturbed():
            losses_of_model.append(float(loss_of(model)))  # leaves a copy of the perturbed ones
        losses_of_model.append(float(loss_of(model)))
        model_opt.first_step(zero_grad=True)
        loss_of(model).backward()
        losses_of_model.append(float(loss_of(model)))
        model_opt.second_step(zero_grad=True)
        losses_of_model.append(float(loss_of(model)))
        losses_of_model.append(step(model, model_opt, 1))
        losses_of_model.append(float(loss_of(model)))
        losses.append(losses_of_model)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-6)
    assert len(set(losses[1])) >= 5
    return "kept"


def learns(rank: int) -> str:
    """Check that the loss falls with FSDP, SAM and a scheduler."""
    net, plain = sharded_net(), Net()
    ends = []
    for model in (net, plain):
        opt = FusedSAM(model.parameters(), torch.optim.AdamW, rho=0.05, lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)
        losses = []
        for _ in range(60):
            losses.append(step(model, opt, 0))
            scheduler.step()
        ends.append((losses[0], losses[-1]))
    assert ends[0][1] < 0.2 * ends[0][0], ends
    assert abs(ends[0][1] - ends[1][1]) < 1e-3 * ends[1][0]
    return "kept"


def check_clipping(rank: int) -> str:
    net, plain = sharded_net(), Net()
    for model in (net, plain):
        opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
        for number in range(3):
            loss_of(model, number).backward()
            opt.first_step(zero_grad=True)
            loss_of(model, number).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert float(whole(norm)) > 0.01
            opt.second_step(zero_grad=True)
    assert_same(list(net.parameters()), list(plain.parameters()), False, "clipped")
    return "kept"


def tensor_parallel(rank: int) -> str:
    """Compare tensor parallelism, also with fully_shard on a two-dimensional mesh and with repeated shards (HSDP)."""
    for layout in ("tp", "fsdp and tp", "hsdp"):
        net, plain = Net(8), Net(8)  # torch's plans need widths that the ranks divide
        if layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("repeated", "split"))
            fully_shard(net.second, mesh=mesh)
            fully_shard(net, mesh=mesh)
        else:
            shape = (2, 2) if layout == "fsdp and tp" else (1, dist.get_world_size())
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            plan: dict[str, ParallelStyle] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(net, mesh["tp"], plan)
            if layout == "fsdp and tp":
                fully_shard(net.second, mesh=mesh["dp"])
                fully_shard(net, mesh=mesh["dp"])
        opt, plain_opt = (FusedSAM(m.parameters(), torch.optim.AdamW, rho=0.2, lr=0.05) for m in (net, plain))
        for number in range(3):
            step(net, opt, number)
            step(plain, plain_opt, number)
            assert_same(list(net.parameters()), list(plain.parameters()), False, (layout, number))
            assert opt.grad_norm is not None and plain_opt.grad_norm is not None
            torch.testing.assert_close(opt.grad_norm, plain_opt.grad_norm, rtol=1e-5, atol=0.0)
    return "kept"


def check_refusals(rank: int) -> str:
    """Check two refused steps, which write nothing."""
    net = sharded_net()
    opt = FusedSAM(net.parameters(), torch.optim.SGD, lr=0.1)
    old_weights = [whole(p).clone() for p in net.parameters()]
    net.set_requires_gradient_sync(False)  # type: ignore[operator]
    loss_of(net).backward()
    try:
        opt.first_step()
        raise AssertionError("the first gradients are with fully_shard")
    except RuntimeError as error:
        assert "set_requires_gradient_sync(False)" in str(error)
    net = sharded_net()
    opt = FusedSAM(net.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net)).backward()
    opt.first_step(zero_grad=True)
    scaler.scale(loss_of(net)).backward()
    try:
        scaler.step(opt)
        raise AssertionError("a GradScaler looks at one rank's gradients")
    except RuntimeError as error:
        assert "GradScaler" in str(error) and "MixedPrecisionPolicy" in str(error)
    assert_same(list(net.parameters()), old_weights, True, "refused")
    return "kept"


def unequal_meshes(rank: int) -> str:
    """Check that ranks outside of a parameter's mesh refuse the parameter."""
    meshes = init_device_mesh("cpu", (dist.get_world_size(),)), DeviceMesh("cpu", [0])
    params = [nn.Parameter(make_placer(mesh, [Shard(0)])(0, integers((8, 2), 1))) for mesh in meshes]
    try:
        FusedSAM(params, torch.optim.SGD, lr=0.1)
    except TypeError as error:
        assert rank > 0 and "which this rank is no part of" in str(error), error
    else:
        assert rank == 0
    return "kept"


def check_interrupts(rank: int) -> str:
    """Check that an exception at the perturbed point restores the weights, also in gathered copies."""
    net = sharded_net()
    opt = FusedSAM(net.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, momentum=0.9)
    step(net, opt, 0)
    old_weights, loss = [whole(p).clone() for p in net.parameters()], float(loss_of(net).detach())

    def closure() -> Tensor:
        value = loss_of(net)
        if opt.is_perturbed:
            raise KeyboardInterrupt
        value.backward()
        return value

    try:
        opt.step(closure)
        raise AssertionError("the closure was not called a second time")
    except KeyboardInterrupt:
        pass
    assert_same(list(net.parameters()), old_weights, True, "interrupted")
    assert float(loss_of(net).detach()) == loss
    return "kept"


def check_lora(rank: int) -> str:
    """Check that frozen parameters have no state until they are unfrozen."""
    net, plain = sharded_net(), Net()
    opts = [FusedSAM(m.parameters(), torch.optim.AdamW, rho=0.2, lr=0.05) for m in (net, plain)]
    for number in range(4):
        for model, opt in zip((net, plain), opts, strict=True):
            for p in model.second.parameters():
                p.requires_grad_(number >= 2)
            step(model, opt, number)
            assert len(opt.state) == (7 if number >= 2 else 5)
        assert_same(list(net.parameters()), list(plain.parameters()), False, number)
    return "kept"


def all_of(rank: int, works: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Run several functions in one group of processes."""
    return [work(rank, *arguments) for work, arguments in works]
