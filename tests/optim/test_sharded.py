"""Sharded parameters (fully_shard, tensor parallelism): the step equals the whole model's step on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsam import FusedSAM, backends
from tests.helpers.rank_group import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
PATIENCE = 240.0


def keep(size: int, *works: tuple[Callable[..., str], tuple[Any, ...]]) -> None:
    from tests.helpers import sharded_ranks  # a second, for DTensor

    answers = on_ranks(size, sharded_ranks.all_of, works, patience=PATIENCE)
    assert answers == [["kept"] * len(works)] * size, answers


def test_two_ranks_make_the_unsharded_step() -> None:
    """One test of several promises, because two processes that import DTensor take their seconds."""
    from tests.helpers import sharded_ranks as ranks
    from tests.helpers import sharded_states as states

    keep(
        2, (ranks.steps_beside_unsharded, (False,)), (ranks.one_sum_a_step, ()), (ranks.not_finite, ()),
        (ranks.no_stale_copy, ()), (ranks.unequal_meshes, ()), (states.resumed_in_memory, (False,)),
    )  # fmt: skip


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
