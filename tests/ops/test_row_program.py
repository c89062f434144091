"""Row programs as an op: each instruction against float64, and words of other writers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsam import ops
from fastsam_kernels import native
from fastsam_kernels.rowprograms.instructions import FIRST_INPUT, OUT, Code, Input, Instruction, NoFormError, RowOperand

pytestmark = pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")

Formula = Callable[..., Tensor]
# Number of operands; formula of a, b, c and the number x in float64; range of the operands; roundings of the result,
# relative to it and to the operands' sum.
ELEMENTWISE: dict[Code, tuple[int, Formula, float, float]] = {
    Code.COPY: (1, lambda a, x: a, -2.0, 2.0),
    Code.RELU: (1, lambda a, x: a.relu(), -2.0, 2.0),
    Code.NEGATE: (1, lambda a, x: -a, -2.0, 2.0),
    Code.EXPONENTIAL: (1, lambda a, x: a.exp(), -80.0, 80.0),
    Code.LOGARITHM: (1, lambda a, x: a.log(), 1e-3, 50.0),
    Code.ROOT: (1, lambda a, x: a.sqrt(), 0.0, 50.0),
    Code.INVERSE_ROOT: (1, lambda a, x: a.rsqrt(), 1e-3, 50.0),
    Code.MAGNITUDE: (1, lambda a, x: a.abs(), -2.0, 2.0),
    Code.TANH: (1, lambda a, x: a.tanh(), -5.0, 5.0),
    Code.SIGMOID: (1, lambda a, x: a.sigmoid(), -30.0, 30.0),
    Code.ERROR_FUNCTION: (1, lambda a, x: a.erf(), -6.0, 6.0),
    Code.SHIFT: (1, lambda a, x: a + x, -2.0, 2.0),
    Code.SCALE: (1, lambda a, x: a * x, -2.0, 2.0),
    Code.POWER: (1, lambda a, x: a**x, 0.1, 3.0),
    Code.ADD: (2, lambda a, b, x: a + x * b, -2.0, 2.0),
    Code.MULTIPLY: (2, lambda a, b, x: a * b, -2.0, 2.0),
    Code.DIVIDE: (2, lambda a, b, x: a / b, 0.5, 2.0),
    Code.THRESHOLD_BACKWARD: (2, lambda a, b, x: torch.where(b <= x, 0.0, a), -2.0, 2.0),
    Code.TANH_BACKWARD: (2, lambda a, b, x: a * (1 - b * b), -1.0, 1.0),
    Code.SIGMOID_BACKWARD: (2, lambda a, b, x: a * (1 - b) * b, 0.0, 1.0),
    Code.MULTIPLY_ADD: (3, lambda a, b, c, x: a + x * b * c, -2.0, 2.0),
}
ROUNDING = 8 * 2**-24


def program(instructions: list[Instruction], inputs: list[Tensor], width: int) -> Tensor:
    descriptions = [Input(tuple(t.shape[1:]), tuple(t.stride()[1:]), t.dtype == torch.int64) for t in inputs]
    return ops.row_program(instructions, descriptions, 0, width)(inputs)


def operand(i: int, t: Tensor, shape: tuple[int, ...]) -> RowOperand:
    return RowOperand(FIRST_INPUT + i, 0, t.expand(shape).stride()[1:])


@st.composite
def tensors(draw, rows: int, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    """`[rows, *shape]`, or broadcast to it in some dimensions; in any order of memory."""
    sizes = [1 if draw(st.booleans()) else n for n in shape]
    order = draw(st.permutations(range(len(shape))))
    result = torch.empty(rows, *(sizes[d] for d in order)).uniform_(low, high)
    step_back = [order.index(d) for d in range(len(shape))]
    return result.permute(0, *(1 + d for d in step_back))


SHAPES = st.lists(st.sampled_from([1, 2, 3, 7, 16, 17, 33]), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(ELEMENTWISE)), st.integers(1, 3), SHAPES, st.data())
def test_elementwise(code: Code, rows: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    count, formula, low, high = ELEMENTWISE[code]
    operands = [data.draw(tensors(rows, shape, low, high)) for _ in range(count)]
    x = data.draw(st.sampled_from([2.0, -0.5, 1.5])) if code is not Code.THRESHOLD_BACKWARD else 0.0
    full = (rows, *shape)
    reads = [operand(i, t, full) for i, t in enumerate(operands)]
    out = torch.empty(full)
    result = Instruction(code, shape, RowOperand(OUT, 0, out.stride()[1:]), *reads, number=x)
    results = program([result.flatten()], operands, out[0].numel()).view(full)
    exact = formula(*(t.double() for t in operands), x).expand(full)
    size = sum(t.double().abs() for t in operands) + exact.abs()
    assert bool(((results - exact).abs() <= ROUNDING * size.expand(full)).all())


def test_elementwise_where_numbers_end() -> None:
    ends = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-42, 3e38, -3e38, 88.7, -103.0]])
    for code in (
        Code.EXPONENTIAL,
        Code.LOGARITHM,
        Code.RELU,
        Code.SIGMOID,
        Code.TANH,
        Code.MAGNITUDE,
        Code.ROOT,
        Code.ERROR_FUNCTION,
    ):
        formula, n = ELEMENTWISE[code][1], ends.numel()
        copy = Instruction(code, (n,), RowOperand(OUT, 0, (1,)), RowOperand(FIRST_INPUT, 0, (1,)))
        result = program([copy], [ends], n)
        normal_numbers = torch.where(
            ends.abs() < 2.0**-126, 0.0, ends
        )  # no denormals: trained classifiers would be slow
        assert torch.allclose(result, formula(normal_numbers, 0.0), rtol=1e-6, atol=1e-37, equal_nan=True), code.name


def test_the_error_function_is_right_to_two_units() -> None:
    x = torch.linspace(-4.5, 4.5, 200_001)[None]
    copy = Instruction(Code.ERROR_FUNCTION, (x.numel(),), RowOperand(OUT, 0, (1,)), RowOperand(FIRST_INPUT, 0, (1,)))
    exact = x.double().erf()
    unit = torch.nextafter(exact.abs().float(), torch.tensor(torch.inf)).double() - exact.abs().float().double()
    error = (program([copy], [x], x.numel()).double() - exact).abs()
    assert bool((error <= 2 * unit).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), SHAPES, st.data())
def test_sums(rows: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    a = data.draw(tensors(rows, shape, -1.0, 1.0))
    reduced_dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    shape_of_sum = [1 if d in reduced_dims else n for d, n in enumerate(shape)]
    out = torch.empty(rows, *shape_of_sum)
    strides = tuple(0 if d in reduced_dims else s for d, s in enumerate(out.stride()[1:]))
    result = Instruction(Code.SUM, shape, RowOperand(OUT, 0, strides), operand(0, a, (rows, *shape)))
    results = program([result.flatten()], [a], out[0].numel()).view(out.shape)
    exact = a.double().expand(rows, *shape)
    dims = [1 + d for d in reduced_dims]
    bound = exact.abs().sum(dims, keepdim=True) * (exact[0].numel() + 1) * 2**-24
    assert bool(((results - exact.sum(dims, keepdim=True)).abs() <= bound).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), SHAPES.filter(lambda s: len(s) < 4), st.integers(0, 2), st.data())
def test_log_softmax_and_its_gradient(rows: int, shape: tuple[int, ...], dim: int, data: st.DataObject) -> None:
    dim = min(dim, len(shape) - 1)
    a = data.draw(tensors(rows, shape, -20.0, 20.0)).expand(rows, *shape)
    g = data.draw(tensors(rows, shape, -1.0, 1.0)).expand(rows, *shape)
    exact = a.double().requires_grad_()
    outputs = exact.log_softmax(1 + dim)
    (gradient,) = torch.autograd.grad(outputs, exact, g.double())
    place = RowOperand(OUT, 0, torch.empty(rows, *shape).stride()[1:])
    reads = [operand(i, t, (rows, *shape)) for i, t in enumerate((a, g, outputs.detach().float()))]
    if (dim, len(shape)) in ((0, 3), (2, 3)):
        with pytest.raises(NoFormError, match="more than one dimension"):
            Instruction(Code.LOG_SOFTMAX, shape, place, reads[0]).by_classes(dim)
        return
    forward = Instruction(Code.LOG_SOFTMAX, shape, place, reads[0]).by_classes(dim)
    result = program([forward], [a], a[0].numel()).view(a.shape)
    assert torch.allclose(result.double(), outputs, rtol=1e-6, atol=3e-6)
    backward = Instruction(Code.LOG_SOFTMAX_BACKWARD, shape, place, reads[1], reads[2]).by_classes(dim)
    result = program([backward], [a, g, outputs.detach().float()], a[0].numel()).view(a.shape)
    assert torch.allclose(result.double(), gradient, rtol=1e-5, atol=3e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    SHAPES.filter(lambda s: len(s) < 3),
    st.integers(1, 6),
    st.sampled_from([1, 5, 16, 33]),
    st.integers(-1, 5),
    st.booleans(),
)
def test_lookups_and_their_gradient(
    rows: int, places: tuple[int, ...], count: int, size: int, padding: int, is_dense: bool
) -> None:
    """The gradient adds up in the order of the indices, from the first to the last."""
    step = 1 if is_dense else 2
    table = torch.randn(rows, count, size * step)[..., ::step]
    indices = torch.randint(count, (rows, *places))
    g = torch.randn(rows, *places, size * step)[..., ::step]
    inputs = [table, indices, g]
    outer, middle = (0, *indices.stride()[1:])[-2:]
    a, b = RowOperand(FIRST_INPUT, 0, (0, 0, size * step, step)), RowOperand(FIRST_INPUT + 1, 0, (outer, middle, 0, 0))
    sizes, by_place = (*(1, *places)[-2:], count, size), RowOperand(OUT, 0, (outer * size, middle * size, 0, 1))
    result = program([Instruction(Code.LOOK_UP, sizes, by_place, a, b)], inputs, indices[0].numel() * size)
    expected = torch.stack([one[i] for one, i in zip(table, indices, strict=True)])
    assert torch.equal(result.view(expected.shape), expected)
    by_entry, a = RowOperand(OUT, 0, (0, 0, size, 1)), RowOperand(FIRST_INPUT + 2, 0, (*g.stride()[-3:-1], 0, step))
    a = a if len(places) == 2 else replace(a, strides=(0, *a.strides[1:]))
    backward = Instruction(Code.LOOK_UP_BACKWARD, sizes, by_entry, a, b, number=padding)
    result = program([backward], inputs, count * size).view(table.shape)
    expected = torch.zeros_like(result)
    for row in range(rows):
        for index, part in zip(indices[row].flatten(), g[row].reshape(-1, size), strict=True):
            expected[row, index] += part if index != padding else 0
    assert torch.equal(result, expected)


# --- words of other writers ---

N = 20  # elements of every tensor below


def words_of(change: Callable[[dict[str, list[int]]], object] = lambda parts: None) -> list[int]:
    """A program of one instruction, `out = a * x` of an input `[rows, N]`, where `change` changes its parts."""
    scale = Instruction(Code.SCALE, (N,), RowOperand(OUT, 0, (1,)), RowOperand(FIRST_INPUT, 0, (1,)), number=2.0)
    inputs = [*Input((N,), (1,)).words(), *Input((N,), (1,), labels=True).words()]
    parts = {"head": [0, N, N, 2], "inputs": inputs, "instruction": scale.words()}
    change(parts)
    return [*parts["head"], *parts["inputs"], *parts["instruction"]]


def put_word(part: str, index: int, word: int) -> Callable[[dict[str, list[int]]], object]:
    return lambda parts: parts[part].__setitem__(index, word)


def put_beyond(position: int) -> Callable[[dict[str, list[int]]], object]:
    """Change the operand at `position` to one element, which is the first beyond its memory."""
    return lambda parts: [parts["instruction"].__setitem__(*pair) for pair in ((SIZE, 1), (position + 1, N))]


def add(words: list[int]) -> int:
    return torch.ops.fastsam.row_program(torch.tensor(words))


# words of an instruction: the innermost size; base, offset and four strides of each operand
SIZE, OUT_AT, A_AT, B_AT = 4, 5, 11, 17
EACH = 30  # words of an instruction
MANY = 2**62
# Words of the operation, its size, operands' offsets, strides and bases; words of the memory, and of the inputs.
OUTSIDE = [
    *[put_word("instruction", 0, word) for word in (-1, len(Code), MANY)],
    *[put_word("instruction", SIZE, word) for word in (N + 1, 0, -1, MANY)],
    *[put_word("instruction", position + 1, word) for position in (OUT_AT, A_AT) for word in (1, -1, MANY)],
    *[put_word("instruction", position + 5, word) for position in (OUT_AT, A_AT, B_AT) for word in (2, -1, MANY)],
    *[put_beyond(position) for position in (OUT_AT, A_AT)],
    *[put_word("instruction", OUT_AT, word) for word in (-1, 0, 2, MANY)],
    *[put_word("instruction", A_AT, word) for word in (-2, 0, 3, 4, MANY)],
    *[put_word("head", 1, word) for word in (N - 1, -1)],
    *[put_word("head", position, -1) for position in (0, 2)],
    *[put_word("inputs", position, word) for position in (3, 4) for word in (0, -1, MANY)],
]


def test_words_that_leave_their_memory_are_refused() -> None:
    assert add(words_of()) >= 0
    for change in OUTSIDE:
        with pytest.raises(RuntimeError, match="row program"):
            add(words_of(change))
    words = words_of()
    for length in range(len(words)):
        if length != len(words) - EACH:  # a program of no instructions
            with pytest.raises(RuntimeError, match="row program"):
                add(words[:length])


def test_operations_with_labels_stay_within_their_memory() -> None:
    scores, labels = Input((4, 3), (3, 1)), Input((3,), (1,), labels=True)
    place, operand = RowOperand(FIRST_INPUT, 0, (0, 3, 1)), RowOperand(FIRST_INPUT + 1, 0, (0, 0, 1))
    fine = Instruction(Code.NLL, (1, 4, 3), RowOperand(OUT, 0, (0, 0, 1)), place, operand)
    ops.row_program([fine], [scores, labels], 0, 3)
    for change in (
        {"a": replace(place, strides=(0, 4, 1))}, {"b": replace(operand, strides=(0, 0, 2))}, {"b": RowOperand()},
        {"b": replace(operand, base=FIRST_INPUT)}, {"a": replace(place, base=FIRST_INPUT + 1)},
        {"out": replace(fine.out, offset=1)},
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="outside of its memory"):
            ops.row_program([replace(fine, **change)], [scores, labels], 0, 3)
    table, entries = Input((4, 3), (3, 1)), RowOperand(OUT, 0, (0, 3, 0, 1))
    fine = Instruction(Code.LOOK_UP, (1, 3, 4, 3), entries, replace(place, strides=(0, 0, 3, 1)),
        replace(operand, strides=(0, 1, 0, 0)))  # fmt: skip
    ops.row_program([fine], [table, labels], 0, 9)
    for change in (
        {"sizes": (1, 3, 5, 3)}, {"sizes": (1, 4, 4, 3)}, {"b": replace(fine.b, strides=(0, 2, 0, 0))},
        {"out": replace(entries, strides=(0, 3, 1, 1))}, {"b": replace(fine.b, base=FIRST_INPUT)},
        {"a": replace(fine.a, base=FIRST_INPUT + 1)},
    ):  # fmt: skip
        for code in (Code.LOOK_UP, Code.LOOK_UP_BACKWARD):
            with pytest.raises(RuntimeError, match="outside of its memory"):
                ops.row_program([replace(fine, code=code, **change)], [table, labels], 0, 9)
    dense = Instruction(Code.PRODUCT, (4, 3, 4), RowOperand(OUT, 0, (4, 1)), replace(place, strides=(3, 1)))
    dense = replace(dense, b=replace(place, strides=(1, 3)))
    ops.row_program([dense], [scores], 0, 16)
    with pytest.raises(RuntimeError, match="outside of its memory"):
        ops.row_program([dense], [scores], 0, 15)


def test_a_softmax_that_is_the_same_along_a_dimension() -> None:
    g, outputs = torch.randn(2, 3, 5), torch.randn(2, 3, 1).log_softmax(1)
    inputs = [Input((3, 5), (5, 1)), Input((3, 1), (1, 1))]
    reads = RowOperand(FIRST_INPUT, 0, (5, 1)), RowOperand(FIRST_INPUT + 1, 0, (1, 0))
    result = Instruction(Code.LOG_SOFTMAX_BACKWARD, (3, 5), RowOperand(OUT, 0, (5, 1)), *reads).by_classes(0)
    results = ops.row_program([result], inputs, 0, 15)([g, outputs]).view(2, 3, 5)
    assert torch.allclose(results, g - outputs.exp() * g.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)
