"""The robust rules on rows of numbers: compared with the papers' equations in a different form, and with an outlier."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fastsam.fed.aggregation import names, registry, rule_of
from fastsam.fed.aggregation.base import RobustAggregator

N, P = 9, 31


def rows(n: int = N, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(n, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def make_rule(text: str) -> RobustAggregator:
    rule = rule_of(text)
    assert rule is not None
    return rule


def aggregate(text: str, inputs: list[Tensor], weights: list[int] | None = None) -> Tensor:
    """Return the change of the model in a round with these deltas."""
    rule, weights = make_rule(text), [1] * len(inputs) if weights is None else weights
    selection = rule.select(inputs)
    return rule.mean([inputs[i] for i in selection], [weights[i] for i in selection])


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9])
def test_the_median_is_numpys(n: int) -> None:
    inputs = rows(n)
    assert np.allclose(aggregate("median", inputs), np.median(torch.stack(inputs).double(), axis=0), atol=1e-15)


@pytest.mark.parametrize(("share", "n", "k"),
    [(0.2, 9, 2), (0.1, 30, 3), (0.0, 9, 0), (0.5, 9, 4), (0.4, 2, 0), (0.01, 5, 1)])  # fmt: skip
def test_the_trimmed_mean_leaves_out_the_share_at_both_ends(share: float, n: int, k: int) -> None:
    inputs = rows(n)
    sorted_inputs = np.sort(torch.stack(inputs).double().numpy(), axis=0)
    assert np.allclose(aggregate(f"trimmed_mean:{share}", inputs), sorted_inputs[k : n - k].mean(axis=0), atol=1e-15)


def test_blocks_of_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregates = [aggregate(text, rows()) for text in ("median", "trimmed_mean")]
    monkeypatch.setattr("fastsam.fed.aggregation.base._BLOCK", 7)
    assert all(
        torch.equal(aggregate(t, rows()), x) for t, x in zip(("median", "trimmed_mean"), aggregates, strict=True)
    )


def krum_by_hand(inputs: list[Tensor], f: int) -> list[int]:
    """The clients in the order of their scores, by the sentence in the paper."""
    n, scores = len(inputs), []
    for i in range(n):
        distances = sorted(float((inputs[i].double() - inputs[j].double()).square().sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - f - 2]))
    return sorted(range(n), key=scores.__getitem__)


@pytest.mark.parametrize(
    ("text", "f", "m"), [("krum", 2, 1), ("krum:0.3", 3, 1), ("multi_krum:0.3", 3, 4), ("krum:0.5", 3, 1)]
)
def test_krum_takes_those_of_the_least_scores(text: str, f: int, m: int) -> None:
    for seed in range(5):
        inputs = rows(seed=seed)
        selection = sorted(krum_by_hand(inputs, f)[:m])
        assert make_rule(text).select(inputs) == selection
        assert torch.allclose(aggregate(text, inputs), torch.stack([inputs[i].double() for i in selection]).mean(0))


def test_krum_of_one_or_two_clients_is_their_mean_and_of_equal_ones_the_first() -> None:
    assert [make_rule("krum").select(rows(n)) for n in (1, 2)] == [[0], [0, 1]]
    assert make_rule("krum").select([torch.ones(4)] * 5) == [0]


def test_the_norm_filter_is_the_weighted_mean_of_those_within_the_limit() -> None:
    inputs = [x / x.norm() for x in rows(5)]
    inputs[1], inputs[3] = 9.9 * inputs[1], 10.1 * inputs[3]
    assert make_rule("norm_filter").select(inputs) == [0, 1, 2, 4]
    assert make_rule("norm_filter:11").select(inputs) == [0, 1, 2, 3, 4]
    expected = sum(w * inputs[i].double() for i, w in ((0, 3), (1, 1), (2, 7), (4, 2))) / 13
    assert torch.allclose(aggregate("norm_filter", inputs, [3, 1, 7, 5, 2]), expected)
    assert make_rule("norm_filter").select([torch.zeros(4)] * 3) == [
        0,
        1,
        2,
    ]  # a cohort that does not move has no outlier


@pytest.mark.parametrize("text", [name for name in names() if name != "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_client_of_nine_cannot_take_the_others_away(text: str, dtype: torch.dtype) -> None:
    """The result stays in the box of the other clients for any outlier at any position; the mean does not."""
    for place, size in itertools.product((0, 4, 8), (1e8, -1e30)):
        good_rows = rows(dtype=dtype)
        all_rows = [*good_rows]
        all_rows[place] = torch.full((P,), size, dtype=dtype)
        good_matrix = torch.stack(good_rows[:place] + good_rows[place + 1 :]).double()
        mean = aggregate(text, all_rows)
        assert mean.dtype == torch.float64
        assert (mean >= good_matrix.amin(0) - 1e-12).all() and (mean <= good_matrix.amax(0) + 1e-12).all()
        assert abs(float(torch.stack(all_rows).double().mean(0).mean())) > 1e6


@pytest.mark.parametrize("text", [name for name in names() if name != "mean"])
def test_nobody_is_written_into_and_shapes_stay(text: str) -> None:
    inputs = [x.view(1, P) for x in rows()]
    original = [x.clone() for x in inputs]
    assert aggregate(text, inputs).shape == (1, P)
    assert all(torch.equal(a, b) for a, b in zip(inputs, original, strict=True))


def test_every_rule_is_there_by_its_file() -> None:
    assert names() == ["mean", "krum", "median", "multi_krum", "norm_filter", "trimmed_mean"]
    assert rule_of("mean") is None and all(type(rule_of(name)) is cls for name, cls in registry.items())
