"""Products of stacked matrices against float64, element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsam import ops
from fastsam_kernels import native, small_bmm

pytestmark = pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")

SIZES = st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 65])


def matrix(rows: int, down: int, columns: int, mode: str) -> Tensor:
    """`[rows, down, across]`: dense, transposed, with gaps on all sides, or one row for all."""
    if mode == "transposed":
        return torch.randn(rows, columns, down).mT
    if mode == "gaps":
        return torch.randn(2 * rows, 3 * down, columns + 5)[::2, ::3, 2 : columns + 2]
    if mode == "one":
        return torch.randn(down, columns).expand(rows, -1, -1)
    return torch.randn(rows, down, columns)


LAYOUTS = st.sampled_from(["dense", "transposed", "gaps", "one"])


@settings(deadline=None)  # the first example loads the library, and a busy machine is slow
@given(
    st.integers(1, 4), SIZES, SIZES, SIZES, LAYOUTS, LAYOUTS, st.sampled_from([None, "full", "m", "n", "turned", "all"])
)
def test_products_equal_float64s(
    rows: int, m: int, k: int, n: int, left_layout: str, right_layout: str, bias: str | None
) -> None:
    small_bmm._product()
    a, b = matrix(rows, m, k, left_layout), matrix(rows, k, n, right_layout)
    shapes = {"full": (rows, m, n), "m": (rows, m, 1), "n": (rows, 1, n), "all": (1, 1, 1)}
    add = None if bias is None else torch.randn(rows, n, m).mT if bias == "turned" else torch.randn(shapes[bias])
    out = torch.ops.fastsam.product.default(a, b, add)
    zero = torch.zeros((), dtype=torch.float64)
    exact = a.double() @ b.double() + (zero if add is None else add.double())
    # Recursive summation: at most (k + 1) roundings of partial sums no larger than the sum of magnitudes.
    bound = (a.double().abs() @ b.double().abs() + (zero if add is None else add.double().abs())) * (k + 2) * 2**-24
    assert out.is_contiguous() and out.shape == exact.shape and bool(((out - exact).abs() <= bound).all())
    dense = torch.ops.fastsam.product.default(a.contiguous(), b.contiguous(), add)
    assert torch.equal(out, dense), "the order of memory changes no bit"
    single_product = torch.ops.fastsam.product.default(a[:1], b[:1], None if add is None else add[:1])
    assert torch.equal(out[:1], single_product), "nor do other rows"


def test_nothing_to_add_up() -> None:
    result = torch.ops.fastsam.product.default(torch.ones(2, 3, 0), torch.ones(2, 0, 4), None)
    assert torch.equal(result, torch.zeros(2, 3, 4))
    bias = torch.randn(2, 1, 4)
    out = torch.ops.fastsam.product.default(torch.ones(2, 3, 0), torch.ones(2, 0, 4), bias)
    assert torch.equal(out, bias.expand(2, 3, 4))


def test_no_memory_beside_the_operands_is_read() -> None:
    """Panels are padded with zeros: NaN after the last column, or in a reused panel, must not enter the product."""
    a, b = torch.full((2, 9, 40), torch.nan), torch.full((2, 40, 40), torch.nan)
    torch.ops.fastsam.product.default(a, b, None)
    a[:, :5, :20], b[:, :20, :17] = 1.0, 2.0
    out = torch.ops.fastsam.product.default(a[:, :5, :20], b[:, :20, :17], None)
    assert torch.equal(out, torch.full((2, 5, 17), 40.0))


@pytest.mark.parametrize(
    ("a", "b", "bias", "words"),
    [
        ((3, 4), (4, 5), None, "a and b must be"),
        ((2, 3, 4), (2, 5, 6), None, "b must be"),
        ((2, 3, 4), (3, 4, 6), None, "b must be"),
        ((2, 3, 4), (2, 4, 6), (2, 2, 6), "bias must be"),
    ],
)
def test_shapes_that_differ(a: tuple[int, ...], b: tuple[int, ...], bias: tuple[int, ...] | None, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        torch.ops.fastsam.product.default(torch.ones(a), torch.ones(b), None if bias is None else torch.ones(bias))
    with pytest.raises(RuntimeError, match="float32"):
        torch.ops.fastsam.product.default(torch.ones(1, 1, 1).double(), torch.ones(1, 1, 1), None)


def test_opcheck() -> None:
    small_bmm._product()
    operands = torch.ones(2, 3, 4), torch.ones(2, 5, 4).mT, torch.ones(2, 1, 5)
    torch.library.opcheck(torch.ops.fastsam.product.default, operands)


def test_which_products_it_takes() -> None:
    a, b = torch.ones(20, 16, 64), torch.ones(20, 64, 32)
    assert ops.product_of(a, b) is torch.ops.fastsam.product.default
    assert ops.product_of(a, b, backend="reference") is None
    assert ops.product_of(a.double(), b.double()) is None
    assert ops.product_of(a[:1, :4, :4], b[:1, :4, :4]) is None, "too little work to pay for the call"
    assert ops.product_of(torch.ones(1, 512, 512), torch.ones(1, 512, 512)) is None, "torch's is made for large ones"
