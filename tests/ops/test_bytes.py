"""Count of the bytes that a step moves: operands of each op by experiment, accesses of the kernels by recording them.

An op that reads an operand gives different results if that operand is NaN; an op that writes it changes its bits. The
Triton kernels run in their interpreter, where every load and store passes through one function each.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.kernel_cases import LAYOUTS, OPS, KernelCase, Op, Operands
from bench.kernel_data import Operator
from bench.workload import Size
from fastsam import FusedSAM, backends
from fastsam.arena import Layout
from fastsam_kernels import build
from tests.helpers.op_cases import bits
from tests.helpers.traffic import TRITON, needs_interpreter, record_traffic

SIZE = Size("tiny", "tiny", ((70, 60), (33,), (5, 3), (16,)), rows=2)  # a full chunk of Triton's and a remainder
SUMS = ("sumsq", "products")
CPU = torch.device("cpu")
SERVING = [b for b in backends.table() if b.device == "cpu" and b.name != "triton" and b.available]


def operator(op: Op, layout: str = "scattered") -> Operator:
    return Operator(KernelCase(op, SIZE, layout), CPU, cache_bytes=1)


def kernels_of(backend: backends.Backend, op: Op) -> Any:
    kernels = backend.load()
    if not hasattr(kernels, op.function):
        pytest.skip(f"{backend.name} has no {op.function}")
    return kernels


def tensors(operand: Any) -> list[Tensor]:
    return [operand] if isinstance(operand, Tensor) else list(operand)


# ---- by experiment: what an op depends on, and what it changes
# ---------------------------------------------------------


def outputs(op: Op, kernels: Any, poisoned_name: str | None) -> dict[str, list[Tensor]]:
    """Bits of all operands and sums after a call, in which one operand, if any, was NaN."""
    result = operator(op)
    operands = Operands(result.sets[0])
    if "params" not in op.operands:  # it is in the call for its dtype only: reading it would show everywhere
        operands["params"] = [torch.full_like(t, torch.nan) for t in tensors(operands["params"])]
    if poisoned_name is not None:
        for tensor in tensors(operands[poisoned_name]):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 12345)
    op.call(kernels, operands)
    return {name: pieces(result, operands[name]) for name in (*op.operands, *SUMS)}


def pieces(results: Operator, operand: Any) -> list[Tensor]:
    """Copies of the bits of an operand's segments, without the paddings."""
    return [bits(t.contiguous()).clone() for t in results.pieces(operand)]


def differ(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", SERVING, ids=lambda b: b.name)
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_operands_read_and_written(op: Op, backend: backends.Backend) -> None:
    """The registry, from which all figures get their bytes, says what the op does; no more, no less."""
    kernels = kernels_of(backend, op)
    operand_names = operator(op)
    old_pieces = {name: pieces(operand_names, operand_names.sets[0][name]) for name in op.operands}
    plain = outputs(op, kernels, None)
    written_names = {name for name in op.operands if differ(old_pieces[name], plain[name])}
    results = (*op.writes, *SUMS)
    read_names = set()
    for name in op.operands:
        poisoned_outputs = outputs(op, kernels, name)
        if any(differ(plain[result], poisoned_outputs[result]) for result in results):
            read_names.add(name)
    assert written_names == set(op.writes)
    assert read_names == set(op.reads)


def test_every_list_operand_of_the_schemas_is_in_the_registry() -> None:
    """Each op of csrc/ops.cpp whose operands have the parameters' size is measured in some form."""
    text = (build.csrc() / "ops.cpp").read_text()
    functions = {op.function for op in OPS.values()}
    assert {"norm_", "perturb_", "restore_", "update_norm_", "update_"} <= functions
    assert all(f'"{name}(' in text for name in functions), "an op of the registry has no schema"


# ---- by recording: what the Triton kernels access
# ----------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize(
    ("op", "layout"),
    [
        pytest.param(op, layout, id=f"{op.name}-{layout}", marks=[] if (i + j) % 2 else pytest.mark.slow)
        for i, op in enumerate(OPS.values())
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_every_element_is_accessed_once(op: Op, layout: str) -> None:
    """Each operand that is read is read once per element, each that is written is written once; paddings and the others
    never."""
    kernels, case = kernels_of(TRITON, op), operator(op, layout)
    operands = case.sets[0]
    buffers = {name: tensors(operands[name]) for name in op.operands}
    with record_traffic(buffers) as traffic:
        op.call(kernels, operands)
    for name in op.operands:
        for kind, expected_value in (("load", name in op.reads), ("store", name in op.writes)):
            for tensor, counts in zip(buffers[name], traffic.of(kind, name), strict=True):
                assert np.array_equal(counts, in_segments(tensor, case.layout, op.whole) * expected_value), (kind, name)
    elements = SIZE.rows * case.layout.row_size if op.whole else SIZE.parameters
    overhead = traffic.bytes / elements - op.bytes_per_parameter
    assert 0 < overhead < 0.7, "tables and scalars, per chunk; the segments here are short"


@needs_interpreter
def test_rows_of_a_sum_are_read_once_and_its_limbs_too() -> None:
    rows, n = 6, 1500
    x, base, largest = torch.randn(rows, n), torch.randn(n), torch.empty(rows, dtype=torch.float64)
    high, low = torch.zeros(2, n, dtype=torch.int64).unbind()
    with record_traffic({"x": [x], "base": [base], "high": [high], "low": [low]}) as traffic:
        TRITON.load().accumulate_(high, low, x, 0.5, base=base, largest_=largest)
    for name in ("x", "base", "high", "low"):
        assert (traffic.of("load", name)[0] == 1).all()
        assert (traffic.of("store", name)[0] == (name in ("high", "low"))).all()
    assert 4 * rows + 4 + 32 < traffic.bytes / n < 1.02 * (4 * rows + 4 + 32)


def in_segments(tensor: Tensor, layout: Layout, is_whole: bool) -> np.ndarray:
    """Return 1 for each element of a field in a segment and 0 for padding; all 1 for a user's tensor and for
    `whole`."""
    mask = torch.ones(tensor.shape, dtype=torch.int64)
    if tensor.shape[-1] == layout.row_size and not is_whole:
        mask.zero_()
        for offset, length, _, _ in layout.table.tolist():
            mask[:, offset : offset + length] = 1
    return mask.numpy().reshape(-1)


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "base", "bytes_"),
    [
        (torch.float32, torch.optim.SGD, 40),
        # norm 2; perturb 14: weights, master and gradient, master and weights; update 20. Reading the weights and
        # writing the master (6 of them) detects weights that a user wrote between the steps.
        (torch.bfloat16, torch.optim.SGD, 36),
        (torch.float32, torch.optim.AdamW, 48),
    ],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_bytes_of_a_step_of_the_optimizer(dtype: torch.dtype, base: type, bytes_: int) -> None:
    """All that the kernels access in one step, tables and scalars included: at most two per cent beyond the
    operands."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((128, 64), (4096,))]
    options = {"momentum": 0.9} if base is torch.optim.SGD else {}
    opt = FusedSAM(params, base, rho=0.05, lr=0.1, backend="triton", **options)

    def step() -> None:
        for half in (opt.first_step, opt.second_step):
            for p in params:
                p.grad = torch.randn(p.shape).to(dtype)
            half()

    step()  # the first step finds no momentum
    with record_traffic({}) as traffic:
        step()
    parameters = sum(p.numel() for p in params)
    assert bytes_ < traffic.bytes / parameters < 1.02 * bytes_


@needs_interpreter
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize(("base", "options"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})])
def test_launches_of_triton_do_not_depend_on_the_number_of_tensors(
    count: int, base: type[torch.optim.Optimizer], options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for the norm, one for the perturbation, one for the update."""
    from fastsam_kernels import triton_op

    launches: list[str] = []
    launch_call = triton_op.launch_call

    def counted_call(kernel: Any, *arguments: Any) -> partial[None]:
        call = launch_call(kernel, *arguments)
        return partial(lambda: launches.append(str(kernel)) or call())

    monkeypatch.setattr(triton_op, "launch_call", counted_call)
    params = [torch.nn.Parameter(torch.randn(3 + i)) for i in range(count)]
    opt = FusedSAM(params, base, rho=0.05, lr=0.1, backend="triton", **options)
    for steps in (1, 2):
        for half in (opt.first_step, opt.second_step):
            for p in params:
                p.grad = torch.randn(p.shape)
            half()
        assert len(launches) == 3 * steps, launches
