"""State sharded over ranks (ZeroRedundancyOptimizer): it works as the base of SAM, and is refused around SAM."""

import numpy as np
import pytest
import torch.distributed as dist

from tests.helpers.rank_group import on_ranks
from tests.helpers.zero_ranks import train_both

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


def test_zero_is_the_base_and_never_around() -> None:
    """Around FusedSAM each rank would perturb its parameters by a norm of them.

    One test has both cases, because two processes take seconds to import torch.distributed.optim.
    """
    (weights, zero_weights, count, message), (_, other_weights, other_count, _) = on_ranks(2, train_both)
    for p, q, r in zip(weights, zero_weights, other_weights):
        np.testing.assert_array_equal(q, r, "the ranks stay together")
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-6)
    assert count and other_count and count + other_count == len(weights), "each rank has a part of the state"
    assert "FusedSAM(model.parameters(), ZeroRedundancyOptimizer, optimizer_class=" in message
