"""Row programs: local training client by client in one native call, where every operation of a recorded pass has a
form.

docs/row_programs.md explains them. `maker` is the one way in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph

from fastsam import ops
from fastsam.arena import Layout
from fastsam.fed.executors.base import Setup
from fastsam.fed.executors.rowprograms.writer import Writer
from fastsam_kernels.rowprograms.instructions import SHARED, NoFormError, block_memory


class RowPass:
    """A pass `f(*inputs) -> (losses, *gradients)` of any number of rows. The gradients are views of one field `[rows,
    row_size]`.

    Args:
        program: the row program.
        constants: tensors of the model that the program reads.
        layout: layout of a row.
        slots: indices of the parameters that have a gradient.

    Attributes:
        has_all_gradients: every parameter has a gradient.
    """

    def __init__(
        self, program: ops.RowProgram, constants: Sequence[Tensor], layout: Layout, slots: Sequence[int]
    ) -> None:
        self.program, self.constants, self.row_size = program, constants, layout.row_size
        self.segments = [layout.segments[i] for i in slots]
        self.has_all_gradients = len(slots) == len(layout.segments)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.program([*inputs, *self.constants])
        rows, width = out.shape
        grads = (out.as_strided((rows, *s.shape), (width, *s.stride), s.offset) for s in self.segments)
        return (out.select(1, self.row_size), *grads)


def row_pass(layout: Layout, device: torch.device, graph: Graph, slots: Sequence[int]) -> RowPass | None:
    """Return the row program of a graph whose outputs are losses and the gradients of the parameters `slots`, or None.

    The graph was evaluated on `ROWS` rows. It has no row program if an operation has no form. On
    CUDA it has none if a row does not fit the shared memory of a block. In other memory a block takes longer for its
    row than batched products take for all rows: 4.85 ms a round of an MLP 64-1024-10 on an H200.
    """
    try:
        writer = Writer(graph, [layout.segments[i] for i in slots], layout.row_size)
        places, width = writer.places, layout.row_size + SHARED
        memory = block_memory(writer.instructions, places.inputs, places.scratch.size, width)
        if device.type == "cuda" and memory > shared_memory(device):
            return None
        program = ops.row_program(writer.instructions, places.inputs, places.scratch.size, width, device)
    except NoFormError:
        return None
    return RowPass(program, places.constants, layout, slots)


def shared_memory(device: torch.device) -> int:
    """Return the largest number of bytes of shared memory of a block of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def maker(setup: Setup) -> Callable[[Graph, Sequence[int]], RowPass | None] | None:
    """Return a function that makes a row program of a recorded pass and the parameters of its gradients (see
    `row_pass`), or None if there are no row programs. They draw no random numbers."""
    if setup.draws is not None or not ops.has_row_programs(setup.device, setup.dtype, backend=setup.backend):
        return None
    return partial(row_pass, setup.layout, setup.device)


def numbers(setup: Setup) -> str:
    """Return the condition that row programs add to the bits of a run. On CUDA the memory of a block decides which
    models have them."""
    if setup.device.type != "cuda" or maker(setup) is None:
        return ""
    return f", rows of {shared_memory(setup.device)} bytes"
