"""Passes of a few stacked clients, replayed and plain."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam.arena import Arena, Layout
from fastsam.fed.executors.record import PassResult
from fastsam.fed.executors.rowprograms import RowPass
from fastsam.fed.executors.stacked import StackedPasses
from fastsam.fed.update.model_copy import Replica, trainable
from fastsam.fed.update.rows import Rows
from tests.helpers.setups import setup_of

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13}


def make_passes(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, rows: int = 5
) -> tuple[StackedPasses, Rows]:
    """Return passes of `rows` rows with different weights, and the slice of all rows."""
    layout = Layout.from_tensors(trainable(model))
    setup = setup_of(model, loss=loss, backend="auto")
    replica = Replica(model, layout, Arena(layout).field("w", setup.dtype)[0])
    stacked_rows = Rows(setup, rows, copies=True)
    stacked_rows.z.copy_(torch.stack([(1 - 0.1 * i) * replica.row for i in range(rows)]))
    return StackedPasses(replica, layout, setup), stacked_rows


def same(passes: StackedPasses, stacked_rows: Rows, x: Tensor, y: Tensor) -> PassResult:
    """Compare a replayed pass with the plain pass."""
    result = passes.replays.run(stacked_rows.leaves, x, y)
    assert result is not None, "nothing is replayed"
    losses, grads, slots = result
    plain, expected = passes.plain(stacked_rows, x, y)
    tolerance = TOLERANCE[plain.dtype]
    assert slots == expected.slots
    assert torch.allclose(losses, plain, rtol=tolerance, atol=tolerance)
    for i, g, e in zip(slots, grads, expected.tensors, strict=True):
        segment = passes.layout.segments[i]
        assert g.stride()[1:] == segment.stride
        assert not e.numel() or (g - e).abs().max() <= tolerance * max(1, float(e.abs().max()))
    return result


def row_pass_of(passes: StackedPasses, size: int, *samples: Tensor) -> RowPass | None:
    """Return the compared row program of passes with `size` samples, each `[n, ...]`, in a batch, or None."""
    replay = passes.replays.find(1, size, *samples)
    return replay.function if replay is not None and isinstance(replay.function, RowPass) else None
