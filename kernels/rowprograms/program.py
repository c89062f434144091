"""Row programs: recorded passes of stacked clients, and their local steps, client by client in one native call;
float32, on the CPU or CUDA.

The intermediate values of a row stay in the processor's first-level cache, or in the shared memory of the row's block,
and no operation is dispatched. Every row is computed by itself, so its bits do not depend on the other rows. On the CPU
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
_WIDTHS: dict[tuple[str, int], int] = {}  # width of the result, by device type and program
FAILURES = ("", "Target", "Sample", "Index")  # why a row did not take all its steps: csrc/rowprograms/program.h
MOST_ON_CUDA = 64  # inputs, and parameters, of a launch: csrc/cuda/rowprograms.h


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why row programs cannot run with this dtype and device, or None."""
    if device.type not in ("cpu", "cuda") or dtype != torch.float32:
        return "row programs are float32, on the CPU or CUDA"
    return native.why_not(device.type)


class RowProgram:
    """A list of instructions that the compiled library runs. Create one only if `why_not` returns None.

    Args:
        instructions: the operations of a pass, in order.
        inputs: forms of a pass's inputs: the weights, then x and y, then other tensors of the model.
        scratch: elements of a row's intermediate values.
        width: elements of a row of the result: the gradients, as in an arena's row, then `SHARED` elements, the loss
            first.
        device: the CPU or a CUDA device.

    Raises:
        NoFormError: a launch on CUDA cannot take this many inputs.
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
        for tensor in inputs:
            words += tensor.words()
        for instruction in instructions:
            words += instruction.words()
        self._run, self.take_steps, add = _ops()
        self.device = device
        self.number = int(add(torch.frombuffer(array("q", words), dtype=torch.int64).to(device)))
        _WIDTHS[device.type, self.number] = width

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute a pass of every row. Returns float32 `[rows, width]`; elements between the gradients are undefined.

        Raises RuntimeError if an input has the wrong shape, memory order or dtype, or if a label is not a class or an
        index is outside of its table. On CUDA, which is not synchronized, such a label makes the row's loss and
        gradients NaN, and such an index its loss.
        """
        result: Tensor = self._run(self.number, inputs)
        return result


def steps_(
    programs: Sequence[RowProgram],
    batch: int,
    weights: Sequence[Tensor],
    constants: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    sample_indices: Tensor,
    work: Tensor,
    params: Tensor,
    w: Tensor | None,
    table: Tensor,
    hparams: Tensor,
    losses: Tensor,
    failures: Tensor,
    *,
    rule: str = "sgd",
    state: Sequence[Tensor | None] = (),
    counts: Tensor | None = None,
    q: Tensor | None = None,
    shift: Tensor | None = None,
    sumsq: Tensor | None = None,
    sumsq_v: Tensor | None = None,
    adaptive: bool = False,
    keeps_first: bool = False,
    results: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Take local steps of some rows, each row by itself, in place.

    A step reads the row's next batch of `sample_indices` and makes a pass with the program of this size. With `w` it
    then perturbs, by `norm_` (into sumsq) and `perturb_`, and makes another pass. Then it makes `update_` of `rule`,
    with sumsq_v after `update_norm_`. The other arguments are the arguments of these ops. The gradients' table has all
    parameters. The bits are the same as with separate calls of these ops. On CUDA this is one launch.

    Args:
        programs: passes, one for each size of a batch that occurs.
        batch: samples of a whole batch.
        weights: views of params.
        constants: inputs of the programs after x and y, program by program.
        x: samples, float32, or int64 that only tables read.
        y: labels of the samples.
        sample_indices: int64 `[.]`, indices of samples in x and y.
        work: int64 `[n, 4]`: a row of params, the beginning of its samples in `sample_indices`, the number of samples
            of an epoch, and the number of steps. Epochs follow each other. Each row comes once.
        losses: float64 `[rows]`, to which the loss times the samples of every step is added.
        failures: int64 `[n, 3]`, written: a number of `FAILURES`, the label or index that is wrong, and the row's last
            step, from 0 on. CUDA also makes the row's numbers NaN.
        rule: "sgd", "adam", and on the CPU any other rule of `update_`.
        state, counts: fields of the rule, and float32 `[rows, slots]` if it counts steps.
        results: the start `[rows, row size]`, the deltas `[n, row size]` and their squared norms, float64 `[n]`. Deltas
            and norms are written, in the order of `work`.

    Raises:
        RuntimeError: the arguments do not fit.
    """
    start, deltas, squares = results or (None, None, None)
    fields = [*state, None, None, None][:3]
    programs[0].take_steps(
        [program.number for program in programs], batch, weights, constants, x, y, sample_indices, work, params, w,
        table, hparams, rule, *fields, counts, q, shift, sumsq, sumsq_v, adaptive, keeps_first, losses, failures, start,
        deltas, squares,
    )  # fmt: skip


@cache
def _ops() -> tuple[Callable[..., Tensor], Callable[..., None], Callable[[Tensor], int]]:
    @torch.library.register_fake("fastsam::rowwise")
    def _(program: int, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[0].new_empty(inputs[0].shape[0], _WIDTHS[inputs[0].device.type, program])

    ops = torch.ops.fastsam
    return ops.rowwise.default, ops.rowwise_steps_.default, ops.row_program.default
