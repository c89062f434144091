"""Aggregate that do not depend on the order: bits under permutation and grouping, and how exact they are."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastsam import fed
from fastsam.fed.stages.client_weights import ClientWeightedAggregate, apply_weights
from fastsam.fed.sums.fixed_point import LIMIT, FixedPointAggregate, FixedPointSum
from tests.helpers import oracle, rank_cases
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import digest, run, same_bits
from tests.helpers.rank_group import on_ranks
from tests.helpers.sums import add_client_

numbers = st.floats(-1e6, 1e6, allow_subnormal=True)


def total(vectors, terms=64):
    out = FixedPointSum(torch.zeros(len(vectors[0])), terms)
    for v in vectors:
        assert out.problem(v, 1.0) is None
        out.add_(v, 1.0)
    return out.value()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_permutation_gives_the_same_bits_and_the_exact_sum(data):
    n, size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    vectors = [
        torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype=torch.float64).to(dtype)
        for _ in range(n)
    ]
    total_sum = total(vectors)
    assert torch.equal(total_sum, total(data.draw(st.permutations(vectors))))
    for j in range(size):
        exact = math.fsum(v[j].item() for v in vectors)
        # Each term is rounded down to 2^-80 once; the sum is rounded to a double twice.
        assert abs(total_sum[j].item() - exact) <= 2.0**-52 * abs(exact) + n * 2.0**-80


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20))
def test_any_grouping_gives_the_same_bits(seed, group_size):
    """Partial sums of two machines, added limb by limb, are the sum of one."""
    generator = torch.Generator().manual_seed(seed)
    exponents = [float(torch.randint(-9, 5, (), generator=generator)) for _ in range(21)]
    vectors = [torch.randn(33, generator=generator) * 10.0**e for e in exponents]
    total_sum, left_sum, right_sum = (FixedPointSum(torch.zeros(33), 21) for _ in range(3))
    for i, v in enumerate(vectors):
        total_sum.add_(v, 0.3)
        (left_sum if i < group_size else right_sum).add_(v, 0.3)
    left_sum.add_limbs(*right_sum.limbs())
    assert torch.equal(total_sum.value(), left_sum.value())


def test_many_small_terms_carry_into_the_high_limb():
    value = torch.tensor([-(2.0**-29), 1 / 3, -1 / 3, 1e-9], dtype=torch.float64)
    out = FixedPointSum(value, 5000)
    for _ in range(5000):
        out.add_(value, 1.0)
    torch.testing.assert_close(out.value(), 5000 * value, rtol=3e-16, atol=5000 * 2.0**-80)


@pytest.mark.parametrize("bad_value", [math.nan, math.inf, -math.inf, 1e12, -1e12])
def test_what_cannot_be_summed_is_refused_whole(bad_value):
    aggregate = FixedPointAggregate(terms=4, heaviest=1)
    good_vectors = {"delta": torch.ones(3)}
    assert add_client_(aggregate, 1, good_vectors, {"count": torch.ones(2)}, {"loss": 1.0}) is None
    poison = torch.tensor([1.0, bad_value, 2.0])
    assert "delta" in add_client_(aggregate, 1, {"delta": poison}, {"count": torch.ones(2)}, {"loss": 1.0})
    assert "count" in add_client_(aggregate, 1, good_vectors, {"count": torch.tensor([0.0, bad_value])}, {"loss": 1.0})
    if not math.isfinite(bad_value):
        assert "loss" in add_client_(aggregate, 1, good_vectors, {"count": torch.ones(2)}, {"loss": bad_value})
    assert aggregate.num_clients == 1
    assert aggregate.mean("delta").tolist() == [1, 1, 1]
    assert aggregate.sum("count").tolist() == [1, 1]
    assert aggregate.scalar("loss") == 1.0


def test_the_bound_keeps_the_limbs_from_wrapping():
    for terms in (1, 3, 1000):
        out = FixedPointSum(torch.zeros(1), terms)
        edge = torch.tensor([out.limit], dtype=torch.float64)
        assert out.problem(edge, 1.0) is None and out.problem(edge * 1.001, 1.0) is not None
        for _ in range(terms):
            out.add_(-edge, 1.0)
        assert out.value().item() == -terms * out.limit >= -LIMIT


def test_weights_are_exact():
    aggregate = FixedPointAggregate(terms=3, heaviest=1000)
    weights, values = [1, 1000, 37], [0.1, -3.7, 1e-5]
    for w, v in zip(weights, values):
        mean, total = {"x": torch.tensor([v], dtype=torch.float32)}, {"x": torch.tensor([v])}
        assert add_client_(aggregate, w, mean, total, {"loss": v}) is None
    stored_values = [Fraction(torch.tensor(v).item()) for v in values]
    mean = sum(w * v for w, v in zip(weights, stored_values)) / sum(weights)
    assert aggregate.mean("x").item() == pytest.approx(float(mean), rel=3e-16)
    assert aggregate.sum("x").item() == pytest.approx(float(sum(stored_values)), rel=3e-16)
    assert aggregate.scalar("loss") == math.fsum(values)
    assert aggregate.scalar("nothing") == 0


def test_shapes_must_agree():
    aggregate = FixedPointAggregate(2, 1)
    add_client_(aggregate, 1, {"x": torch.ones(3)}, {}, {})
    with pytest.raises(ValueError, match=r"'x'.*\[4\] after \[3\]"):
        add_client_(aggregate, 1, {"x": torch.ones(4)}, {}, {})


# --- Weights that clients send: means over them, exact as all sums.


SHORT: dict[str, Any] = {"rounds": 2, "sizes": (7, 12, 1, 5, 9)}


@dataclass(frozen=True)
class Weighed(fed.FedAvg):
    """Weighs clients by their samples: the run's weighting="samples" by another way."""

    sends_weights: ClassVar[bool] = True
    scale: float = 1.0

    def finish(self, server, client, results, round):
        weight = [self.scale * n for n in results.num_samples]
        return client, fed.Upload({"delta": results.delta}, weight=weight)


def make_weighing(result, sends_weights=True):
    """FedAvg whose clients send `made(ends)`."""

    class Sent(fed.FedAvg):
        def finish(self, server, client, results, round):
            return client, fed.Upload({"delta": results.delta}, weight=result(results))

    Sent.sends_weights = sends_weights
    return Sent()


@pytest.mark.parametrize("executor", ["sequential", pytest.param("vmap", marks=pytest.mark.slow)])
def test_samples_as_own_weights_are_the_weighting_by_samples(executor):
    weighed_run = run(Weighed(scale=0.37), executor, **SHORT)
    assert oracle.movement(weighed_run.model, run(fed.FedAvg(), executor, weighting="samples", **SHORT).model) < 1e-6
    assert oracle.movement(weighed_run.model, run(fed.FedAvg(), executor, **SHORT).model) > 1e-3


def test_they_multiply_the_weights_of_the_run():
    squares = run(Weighed(), "sequential", weighting="samples", **SHORT)
    by_hand = run(fed.FedAvg(), "sequential", weighting=[n * n for n in SHORT["sizes"]], **SHORT)
    assert oracle.movement(squares.model, by_hand.model) < 1e-6


def test_no_order_and_no_grouping_changes_a_bit():
    rows, weights = torch.randn(5, 7), torch.rand(5, dtype=torch.float64)
    aggregate = []
    for groups in ([[0, 1, 2, 3, 4]], [[3], [1, 4], [2, 0]]):
        plain = FixedPointAggregate(5, 3)
        for group in groups:
            numbers = {"loss": [0.0] * len(group)}
            plain.add_rows(
                [1 + i % 3 for i in group], apply_weights({"delta": rows[group]}, weights[group]), {}, numbers
            )
        aggregate.append(ClientWeightedAggregate(plain))
    factors = weights * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    expected = (factors[:, None] * rows.double()).sum(0) / factors.sum()
    assert torch.equal(aggregate[0].mean("delta"), aggregate[1].mean("delta"))
    torch.testing.assert_close(aggregate[0].mean("delta"), expected, rtol=1e-14, atol=0)
    with pytest.raises(KeyError, match="no client sent 'gradient' for a mean"):
        aggregate[0].mean("gradient")
    assert digest(run(Weighed(), "sequential", **SHORT)) == digest(run(Weighed(), "threads", 2, **SHORT))


def test_where_all_are_zero_the_model_stays():
    model = oracle.smooth_model(torch.float32)
    assert same_bits(run(make_weighing(lambda e: [0.0] * len(e.client_ids)), "sequential", **SHORT).model, model)


def test_averaged_buffers_follow_them():
    def run_algorithm(algorithm, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        options = {"buffers": "average", "sizes": (7, 12, 9), "rounds": 2} | options
        return run(algorithm, "sequential", model=model, **options).model[1].running_mean

    weighed_run = run_algorithm(Weighed())
    torch.testing.assert_close(weighed_run, run_algorithm(fed.FedAvg(), weighting="samples"), rtol=1e-5, atol=1e-6)
    assert (weighed_run - run_algorithm(fed.FedAvg())).abs().max() > 1e-4


def test_personal_parameters_keep_the_weights():
    weighed_run, plain = (run(a, "sequential", local_parameters=["0.*"], **SHORT | o)
                  for a, o in ((Weighed(), {}), (fed.FedAvg(), {"weighting": "samples"})))  # fmt: skip
    assert oracle.movement(weighed_run.model, plain.model) < 1e-6


def run_weights(algorithm, **options):
    run(algorithm, "sequential", **SHORT | options)


test_refused = refusals(
    (lambda: run_weights(make_weighing(lambda e: [-1.0] * len(e.client_ids))),
     r"a number >= 0 for each of the 1 clients, \[1\]; got \[-1.0"),
    (lambda: run_weights(make_weighing(lambda e: [1.0, 2.0])), r"each of the 1 clients, \[1\]; got \[2\]"),
    (lambda: run_weights(make_weighing(lambda e: None)), "got none with sends_weights = True"),
    (
        lambda: run_weights(make_weighing(lambda e: [1.0] * len(e.client_ids), False)),
        "got one without sends_weights = True",
    ),
    (lambda: run_weights(Weighed(), aggregation="median"), "send weights of their own. Use aggregation='mean'"),
    (lambda: run_weights(Weighed(), privacy={"noise_multiplier": 1.0, "clip": 1.0}),
     "the clients of Weighed send or keep more"),
)  # fmt: skip


# --- What ranks add up at the end of a round: exact, whatever names their clients upload.


@given(st.lists(st.floats(-1e-9, 1e-9), min_size=1, max_size=6))
def test_numbers_are_added_exactly_and_rounded_once(values: list[float]) -> None:
    aggregate = FixedPointAggregate(6, 1)
    aggregate.add_rows([1] * len(values), {}, {}, {"x": values})
    assert aggregate.scalar("x") == float(sum(map(Fraction, values)))


@pytest.mark.parametrize(
    ("bad_value", "words"),
    [(math.nan, "is not finite"), (-math.inf, "is not finite"), (-1e19, r"is out of range \(-1e\+19, at")],
)
def test_numbers_that_cannot_be_summed_leave_their_client_out(bad_value: float, words: str) -> None:
    aggregate = FixedPointAggregate(4, 1)
    problems = aggregate.add_rows([1] * 3, {}, {}, {"x": [1.0, bad_value, 4e17], "y": [1.0, 1.0, 1.0]})
    assert list(problems) == [1] and re.search(f"the x {words}", problems[1])
    assert aggregate.scalar("x") == 1.0 + 4e17 and aggregate.scalar("y") == aggregate.num_clients == 2


@pytest.fixture(scope="module")
def rounds() -> list[Any]:
    return on_ranks(2, rank_cases.exchange_states)


def test_all_ranks_have_the_sums_of_one_in_every_round(rounds: list[Any]) -> None:
    """Names that only one rank has, that come later, and that stay away."""
    expected = rank_cases.exchange_states(0)
    assert [[r["sums"] for r in run_1] for run_1 in rounds] == [[r["sums"] for r in expected]] * 2
    assert {name for r in expected for name in r["sums"]} >= {"mean a", "total late", "number late"}


def test_a_round_is_one_all_reduce(rounds: list[Any]) -> None:
    for record in rounds:
        assert [r["calls"] for r in record] == [{"all_reduce": 1, "all_gather_object": 1}] * 6


def test_one_name_with_two_shapes_is_an_error_on_all_ranks() -> None:
    first, second = on_ranks(2, rank_cases.of_other_shape)
    words = "ValueError: the upload 'a' must have one shape for all clients, got"
    assert first.startswith(words) and second.startswith(words)


def test_the_rounds_of_a_run_exchange_one_buffer() -> None:
    """Every round is one all-reduce, and the records are exchanged once, at the end."""
    (short, _), (long, _) = (on_ranks(2, rank_cases.collectives, n) for n in (2, 5))
    extra_calls = {"all_reduce": 3, "all_gather_object": 6}
    assert long == short | {name: short[name] + number for name, number in extra_calls.items()}
