"""Several ranks: sharded parameters (fully_shard, tensor parallelism), whose step equals the whole model's step,
DistributedDataParallel, and ZeroRedundancyOptimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsam import FusedSAM, backends
from tests.helpers.rank_group import on_ranks
from tests.helpers.sam_oracle import same_bits

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
PATIENCE = 240.0


STYLES = ("plain", "views", "no_sync")


@pytest.fixture(scope="module")
def two_ranks() -> list[list[Any]]:
    """Return, per rank, the answers to all that two ranks are asked here: to import DTensor takes them seconds."""
    from tests.helpers import ddp_ranks, sharded_norm, zero_ranks
    from tests.helpers import sharded_ranks as ranks
    from tests.helpers import sharded_states as states

    works: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (ddp_ranks.train, (STYLES,)), (zero_ranks.train_both, ()), (ranks.steps_beside_unsharded, (False,)),
        (ranks.one_sum_a_step, ()), (ranks.not_finite, ()), (ranks.no_stale_copy, ()), (ranks.unequal_meshes, ()),
        (sharded_norm.whole_norm, ()), (states.resumed_in_memory, (False,)),
    ]  # fmt: skip
    answers = on_ranks(2, ranks.all_of, works, patience=PATIENCE)
    assert [len(answer) for answer in answers] == [len(works)] * 2, answers
    return answers


def test_two_ranks_make_the_unsharded_step(two_ranks: list[list[Any]]) -> None:
    assert [set(answer[2:]) for answer in two_ranks] == [{"kept"}] * 2


@pytest.mark.parametrize("style", STYLES)
def test_distributed_data_parallel(style: str, two_ranks: list[list[Any]]) -> None:
    """Two ranks stay together; without `no_sync` they take the step of one process on the whole batch."""
    first, second = (torch.frombuffer(bytearray(answer[0][style]), dtype=torch.float64) for answer in two_ranks)
    assert same_bits([first], [second])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = torch.randn(8, 6).double(), torch.randn(8, 1).double()
    opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, rho=0.3)

    def closure() -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    if style == "no_sync":
        assert not torch.allclose(first, expected, rtol=1e-9), "each rank perturbs with its own gradient"
    else:
        torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)


def test_zero_is_the_base_and_never_around(two_ranks: list[list[Any]]) -> None:
    """Around FusedSAM each rank would perturb its parameters by a norm of them."""
    (weights, zero_weights, count, message), (_, other_weights, other_count, _) = (answer[1] for answer in two_ranks)
    for p, q, r in zip(weights, zero_weights, other_weights):
        np.testing.assert_array_equal(q, r, "the ranks stay together")
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-6)
    assert count and other_count and count + other_count == len(weights), "each rank has a part of the state"
    assert "FusedSAM(model.parameters(), ZeroRedundancyOptimizer, optimizer_class=" in message


@pytest.mark.parametrize(("name", "limit"), [("native", 1e-7), ("foreach", 1e-6), ("reference", 1e-6)])
@pytest.mark.parametrize("numel", [10_000, 300_000])
def test_by_how_much_the_norm_differs(numel: int, name: str, limit: float) -> None:
    """Compare norms of whole and sharded gradients; docs/sharded.md has these limits."""
    if name == "native" and backends.select("auto", torch.device("cpu"), torch.float32).name != name:
        pytest.skip("no compiled CPU kernels here")
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)) ** 3
    norms = []
    for shards in (1, 2, 3, 4):
        params = [nn.Parameter(part.clone()) for part in gradient.chunk(shards)]
        for p in params:
            p.grad = p.detach().clone()
        opt = FusedSAM(params, torch.optim.SGD, lr=0.1, backend=name)
        opt.first_step()
        norms.append(float(opt.grad_norm or 0.0))
    assert max(abs(norm / norms[0] - 1) for norm in norms) < limit


def keep(size: int, *works: tuple[Callable[..., str], tuple[Any, ...]]) -> None:
    from tests.helpers import sharded_ranks  # a second, for DTensor

    answers = on_ranks(size, sharded_ranks.all_of, works, patience=PATIENCE)
    assert answers == [["kept"] * len(works)] * size, answers


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_variant_and_base(size: int) -> None:
    from tests.helpers import sharded_ranks as ranks

    fsdp = [(ranks.fsdp_steps, (base, name)) for base in ("sgd", "adamw", "nadam") for name in ("sam", "gsam", "vasso")]
    fsdp += [(ranks.fsdp_steps, ("sgd", name)) for name in ("asam", "looksam", "friendly", "msam", "last", "wsam")]
    keep(size, (ranks.steps_beside_unsharded, (True,)), *fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_training_with_a_scheduler_learns(size: int) -> None:
    from tests.helpers import sharded_ranks as ranks

    works: list[Callable[..., str]] = [ranks.learns, ranks.check_clipping, ranks.no_stale_copy, ranks.not_finite]
    keep(size, *((work, ()) for work in [*works, ranks.check_lora, ranks.check_interrupts, ranks.check_refusals]))


@pytest.mark.slow
def test_meshes_of_two_dimensions() -> None:
    from tests.helpers import sharded_ranks as ranks

    keep(4, (ranks.tensor_parallel, ()))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_four(tmp_path: Path) -> None:
    from tests.helpers import sharded_states as states

    keep(2, (states.resumed_in_memory, ()), (states.save_sharded, (str(tmp_path),)))
    keep(4, (states.load_sharded, (str(tmp_path),)))
