"""Attention of stacked clients: one call for all rows, with the values of a call for each row."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fastsam.fed.executors import stacked_attention
from fastsam.fed.executors.record import record_pass
from fastsam.fed.executors.simplify import calls
from tests.helpers.stacked_passes import make_passes, same

ROWS, BATCH, HEADS, LENGTH, KEYS, WIDTH = 3, 2, 4, 5, 7, 8
Function = Callable[..., Tensor]
attention = F.scaled_dot_product_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


QUERY, KEY = normal(ROWS, BATCH, HEADS, LENGTH, WIDTH), normal(ROWS, BATCH, HEADS, KEYS, WIDTH)
MASKS = {
    "one for all": (normal(LENGTH, KEYS) > 0, None),
    "of numbers": (normal(LENGTH, KEYS), None),
    "of samples": (normal(BATCH, 1, LENGTH, KEYS), None),
    "of heads": (normal(1, HEADS, LENGTH, KEYS), None),
    "of rows": (normal(ROWS, LENGTH, KEYS), 0),
    "of rows and samples": (normal(ROWS, BATCH, 1, LENGTH, KEYS), 0),
    "of rows and heads": (normal(ROWS, 1, HEADS, LENGTH, KEYS), 0),
    "rows last": (normal(BATCH, HEADS, LENGTH, KEYS, ROWS), 4),
}


def loop(function: Function, arguments: Sequence[Tensor], dims: Sequence[int | None]) -> Tensor:
    """Return the results of a call for each row."""
    rows = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
        for i in range(ROWS)
    ]
    return torch.stack(rows)


def check(function: Function, arguments: Sequence[Tensor], dims: Sequence[int | None]) -> None:
    stacked_attention.register()
    assert torch.equal(vmap(function, tuple(dims))(*arguments), loop(function, arguments, dims))


def test_a_users_vmap_has_its_values() -> None:
    check(attention, (QUERY, KEY, KEY.exp()), (0, 0, 0))
    check(attention, (QUERY, KEY[0], KEY.exp()), (0, None, 0))
    check(attention, (QUERY.movedim(0, 2), KEY.movedim(0, 4), KEY), (2, 4, 0))
    short_key = KEY[..., :LENGTH, :]
    check(lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3), (QUERY, short_key, short_key), (0, 0, 0))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, dim = MASKS[name]
    check(lambda q, k, v, m: attention(q, k, v, attn_mask=m), (QUERY, KEY, KEY, mask), (0, 0, 0, dim))


@pytest.mark.parametrize("name", ["one for all", "of numbers", "of heads"])
def test_a_mask_that_serves_all_rows_and_samples_is_not_copied(name: str) -> None:
    mask, dim = MASKS[name]
    assert stacked_attention._mask_of_rows(mask, dim, ROWS, BATCH) is mask


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the backward operation has no rule
def test_gradients_and_levels_of_vmap() -> None:
    check(grad(lambda q, k, v: attention(q, k, v).square().sum()), (QUERY, KEY, KEY), (0, 0, 0))
    two = torch.stack([QUERY, 2 * QUERY])
    joint = vmap(vmap(attention, (0, None, 0)), (1, 0, None))(two, KEY, torch.stack([KEY[0], KEY[1]]))
    for i in range(ROWS):
        for j in range(2):
            assert torch.equal(joint[i, j], attention(two[j, i], KEY[i], KEY[j]))


class Reader(nn.Module):
    """A classifier of sequences, with attention."""

    calls = 0

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.output, self.is_causal = nn.Linear(8, 3), is_causal
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        Reader.calls += 1
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.is_causal else None
        y = self.attention(x, x, x, need_weights=False, attn_mask=mask)[0]
        output: Tensor = self.output(self.norm(x + y).mean(1))
        return output


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_pass_with_attention_is_replayed_without_a_loop_over_rows(is_causal: bool) -> None:
    passes, rows = make_passes(Reader(is_causal))
    num_calls = []
    for _ in range(4):
        before = Reader.calls
        result = passes.replays.run(rows.leaves, normal(5, 6, 4, 8), torch.zeros(5, 6, dtype=torch.int64))
        assert result is not None
        num_calls.append(Reader.calls - before)
    assert num_calls == [3, 1, 0, 0]  # two recordings and a comparison, and another comparison
    for seed in range(2):
        same(passes, rows, normal(5, 6, 4, 8) + seed, torch.zeros(5, 6, dtype=torch.int64))


def test_a_recording_has_one_call_for_all_rows() -> None:
    passes, rows = make_passes(Reader())
    graph, _ = record_pass(passes.gradients, rows.leaves, normal(5, 6, 4, 8), torch.zeros(5, 6, dtype=torch.int64))
    names = [str(node.target) for node in calls(graph)]
    assert sum("attention" in name for name in names) == 2  # forward and backward
