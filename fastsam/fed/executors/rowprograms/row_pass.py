"""A pass by a row program, and whole local epochs by it: the bits of the same steps one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from fastsam import ops
from fastsam.arena import Layout
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.batch_gatherer import SampleIndices
from fastsam.fed.executors.client_block import ClientBlock
from fastsam.fed.executors.local_rows import LocalRows
from fastsam.fed.executors.rowprograms.writer import Writer
from fastsam.fed.update.local_update import Direction
from fastsam_kernels.rowprograms.instructions import SHARED, NoFormError

_SUPPORTED = frozenset(
    {
        *("gradient", "adaptive gradient", "constant", "has_q", "has_phi", "keeps_first", "has_schedule", "has_pilot"),
        *("has_full_gradient", "has_start"),
    }
)


class RowPass:
    """A pass `f(*inputs) -> (losses, *gradients)` of any number of rows. The gradients are views of one field `[rows,
    row_size]`.

    Args:
        program: the row program.
        constants: tensors of the model that the program reads.
        layout: layout of a row.
        slots: indices of the parameters that have a gradient.
    """

    def __init__(
        self, program: ops.RowProgram, constants: Sequence[Tensor], layout: Layout, slots: Sequence[int]
    ) -> None:
        self.program, self.constants, self.row_size = program, constants, layout.row_size
        self.segments = [layout.segments[i] for i in slots]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.program([*inputs, *self.constants])
        rows, width = out.shape
        grads = (out.as_strided((rows, *s.shape), (width, *s.stride), s.offset) for s in self.segments)
        return (out.select(1, self.row_size), *grads)

    def serves(self, block: ClientBlock) -> bool:
        """Return True if all steps of the block can be taken natively.

        They consist of `norm_`, `perturb_`, `update_norm_` and `update_`, on samples that can be gathered natively,
        and no row is copied before a step.
        """
        x, y = block.samples
        rule = block.tasks[0].setup.rule
        if block.gatherer is None or rule is None or not rule.is_heavy_ball:
            return False
        if any(task.snapshots for task in block.tasks):
            return False
        is_native = x.dtype == torch.float32 and y.dtype == torch.int64 and y.dim() == 1
        return is_native and block.variant.needs <= _SUPPORTED

    @property
    def side_by_side(self) -> bool:
        """True if one call for blocks with different numbers of steps is faster. On CUDA each row has a thread block,
        and no row can raise."""
        return self.program.device.type == "cuda"

    def train(self, blocks: Sequence[ClientBlock], rows: LocalRows) -> None:
        """Take the next steps of each block while their shape is the same, and add up the losses.

        Args:
            blocks: the clients. Several blocks come from one store, and their batches have one size.
            rows: their rows, with the variant set.
        """
        counts, batch = [block.equal_shape_steps[0] for block in blocks], blocks[0].equal_shape_steps[1]
        (x, y, places), steps = _spans(blocks, counts)
        two_passes = rows.variant.two_passes
        self.program.steps_(
            rows.leaves, self.constants, x, y, places, batch, rows.z, rows.w, rows.layout.table,
            rows.hparams, rows.losses, momentum=rows.state[0], q=rows.q, shift=rows.shift,
            steps=steps, sumsq=rows.sumsq if two_passes else None, sumsq_v=rows.sumsq_v,
            adaptive=rows.variant.direction is Direction.ADAPTIVE_GRADIENT,
            keeps_first=two_passes and rows.variant.keeps_first,
        )  # fmt: skip
        for block, count in zip(blocks, counts, strict=True):
            block.k += count


def _spans(blocks: Sequence[ClientBlock], counts: Sequence[int]) -> tuple[SampleIndices, Tensor | None]:
    """Return the samples of each block's next `counts` batches, padded to the largest count, and the number of batches
    of each row. None means that all rows have the same number."""
    feeds = [block.gatherer for block in blocks if block.gatherer is not None]
    if len(blocks) == 1:
        return feeds[0].sample_indices(blocks[0].k, counts[0]), None
    orders = [gatherer.orders(block.k, count) for gatherer, block, count in zip(feeds, blocks, counts, strict=True)]
    rows = [len(order) for order in orders]
    places = torch.zeros(sum(rows), max(order.shape[1] for order in orders), dtype=torch.int64)
    for part, order in zip(places.split(rows), orders, strict=True):
        part[:, : order.shape[1]] = order
    x, y = blocks[0].samples
    steps = torch.tensor([count for count, n in zip(counts, rows, strict=True) for _ in range(n)])
    return SampleIndices(x, y, to_device(places, y.device)), to_device(steps, y.device)


def row_pass(layout: Layout, device: torch.device, module: GraphModule, slots: Sequence[int]) -> RowPass | None:
    """Return the row program of a graph whose outputs are losses and the gradients of the parameters `slots`, or None.

    The graph was evaluated on `ROWS` rows (see `graph_passes`). It has no row program if an operation has no form.
    """
    try:
        writer = Writer(module.graph, [layout.segments[i] for i in slots], layout.row_size)
        places, width = writer.places, layout.row_size + SHARED
        program = ops.row_program(writer.instructions, places.inputs, places.scratch, width, device)
    except NoFormError:
        return None
    return RowPass(program, places.constants, layout, slots)
