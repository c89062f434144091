"""Row programs: local training client by client in one native call, where every operation of a recorded pass has a
form.

docs/row_programs.md explains them. `maker` is the one way in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.fx import Graph

from fastsam import ops
from fastsam.fed.executors.base import Setup
from fastsam.fed.executors.rowprograms.row_pass import RowPass, row_pass, shared_memory

aten = torch.ops.aten

# Operations of forward passes that have no form. A recording for a row program stops at the first one.
FORMLESS = frozenset(
    {
        *(aten.convolution.default, aten.native_group_norm.default),
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


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
