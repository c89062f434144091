"""Row programs: recorded passes of stacked clients, and their local steps, client by client in one native call;
float32, on the CPU or CUDA.

What a row needs on its way stays in the processor's first-level cache, or in the shared memory of the row's block, and
no operation is dispatched. Every row is computed by itself, so its bits do not depend on the other rows. On the CPU
numbers below 2^-126 are zero in a pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from fastsam_kernels import native
from fastsam_kernels.rowprograms.instructions import Input, Instruction, NoFormError

CPU = torch.device("cpu")
_WIDTHS: dict[tuple[str, int], int] = {}  # by device type and program
MOST_ON_CUDA = 64  # inputs, and parameters, that a launch's argument holds: csrc/cuda/rowprograms.h


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no row program can run there; None when they can."""
    if device.type not in ("cpu", "cuda") or dtype != torch.float32:
        return "row programs are float32, on the CPU or CUDA"
    return native.why_not(device.type)


class RowProgram:
    """A compiled-in list of instructions. To be made only where `why_not` is None.

    inputs: those of a pass, the weights first, then x and y, then what the model has besides. scratch: elements that a
    row's operations have between them. width: of a row of the result: gradients, as in an arena's row, and behind them
    `SHARED` elements, the loss first. Raises NoFormError for more inputs than a launch on CUDA takes.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        inputs: Sequence[Input],
        scratch: int,
        width: int,
        device: torch.device = CPU,
    ) -> None:
        if device.type == "cuda" and len(inputs) > MOST_ON_CUDA:
            raise NoFormError(f"{len(inputs)} inputs, on CUDA at most {MOST_ON_CUDA} are possible")
        words = [scratch, width, sum(i.work for i in instructions), len(inputs)]
        for given in inputs:
            words += given.words()
        for instruction in instructions:
            words += instruction.words()
        self._run, self._steps, add = _ops()
        self.device = device
        self.number = int(add(torch.frombuffer(array("q", words), dtype=torch.int64).to(device)))
        _WIDTHS[device.type, self.number] = width

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """A pass of every row: float32 `[rows, width]`; what lies between the gradients is of any value.

        Raises RuntimeError for inputs of another shape, order of memory or dtype, and for a label that is none of the
        classes; on CUDA, where nothing waits for the device, such a label makes the row's loss and gradients NaN.
        """
        made: Tensor = self._run(self.number, inputs)
        return made

    def steps_(
        self,
        weights: Sequence[Tensor],
        others: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
        wanted: Tensor,
        batch: int,
        params: Tensor,
        w: Tensor | None,
        table: Tensor,
        hparams: Tensor,
        losses: Tensor,
        *,
        momentum: Tensor | None = None,
        q: Tensor | None = None,
        shift: Tensor | None = None,
        steps: Tensor | None = None,
        sumsq: Tensor | None = None,
        sumsq_v: Tensor | None = None,
        adaptive: bool = False,
        keeps_first: bool = False,
    ) -> None:
        """Local steps of every row, one after the other: its next `batch` samples of `wanted` (int64
        `[rows, n * batch]`, places in x and y), a pass, and with `w` a perturbation by `norm_` (into sumsq) and
        `perturb_` and another pass, then `update_` of SGD, with sumsq_v after `update_norm_`; the arguments are those
        of these ops, the gradients' table has all parameters. The same bits as by these calls.

        weights: views of params. steps: int64 `[rows]`, how many each row takes where they differ, at most n: places
        behind them are not looked at. losses: float64 `[rows]`, takes batch * loss of every step. Raises RuntimeError
        as a pass does. On CUDA one launch.
        """
        self._steps(
            self.number, weights, others, x, y, wanted, batch, steps, params, w, table, hparams, momentum, q, shift,
            sumsq, sumsq_v, adaptive, keeps_first, losses,
        )  # fmt: skip


@cache
def _ops() -> tuple[Callable[..., Tensor], Callable[..., None], Callable[[Tensor], int]]:
    @torch.library.register_fake("fastsam::rowwise")
    def _(program: int, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[0].new_empty(inputs[0].shape[0], _WIDTHS[inputs[0].device.type, program])

    ops = torch.ops.fastsam
    return ops.rowwise.default, ops.rowwise_steps_.default, ops.row_program.default
