"""Weights that clients send: means over them, exact as all sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.sums.fixed_point import RoundSums
from fastsam.fed.sums.own_weights import OwnWeights, weighed
from tests.helpers import oracle
from tests.helpers.fed_runs import digest, run, same_bits

SHORT: dict[str, Any] = {"rounds": 2, "sizes": (7, 12, 1, 5, 9)}


@dataclass(frozen=True)
class Weighed(fed.FedAvg):
    """Weighs clients by their samples: the run's weighting="samples" by another way."""

    weighs: ClassVar[bool] = True
    scale: float = 1.0

    def close_client(self, server, client, ends, round):
        weight = [self.scale * n for n in ends.samples]
        return client, fed.Upload({"delta": ends.displacement}, weight=weight)


def weighing(made, weighs=True):
    """FedAvg whose clients send `made(ends)`."""

    class Sent(fed.FedAvg):
        def close_client(self, server, client, ends, round):
            return client, fed.Upload({"delta": ends.displacement}, weight=made(ends))

    Sent.weighs = weighs
    return Sent()


def apart(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("executor", ["sequential", pytest.param("vmap", marks=pytest.mark.slow)])
def test_samples_as_own_weights_are_the_weighting_by_samples(executor):
    own = run(Weighed(scale=0.37), executor, **SHORT)
    assert apart(own.model, run(fed.FedAvg(), executor, weighting="samples", **SHORT).model) < 1e-6
    assert apart(own.model, run(fed.FedAvg(), executor, **SHORT).model) > 1e-3


def test_they_multiply_the_weights_of_the_run():
    squares = run(Weighed(), "sequential", weighting="samples", **SHORT)
    by_hand = run(fed.FedAvg(), "sequential", weighting=[n * n for n in SHORT["sizes"]], **SHORT)
    assert apart(squares.model, by_hand.model) < 1e-6


def test_no_order_and_no_grouping_changes_a_bit():
    rows, weights = torch.randn(5, 7), torch.rand(5, dtype=torch.float64)
    sums = []
    for groups in ([[0, 1, 2, 3, 4]], [[3], [1, 4], [2, 0]]):
        plain = RoundSums(5, 3)
        for group in groups:
            numbers = {"loss": [0.0] * len(group)}
            plain.add_rows_([1 + i % 3 for i in group], weighed({"delta": rows[group]}, weights[group]), {}, numbers)
        sums.append(OwnWeights(plain))
    factors = weights * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    expected = (factors[:, None] * rows.double()).sum(0) / factors.sum()
    assert torch.equal(sums[0].mean("delta"), sums[1].mean("delta"))
    torch.testing.assert_close(sums[0].mean("delta"), expected, rtol=1e-14, atol=0)
    with pytest.raises(KeyError, match="no client sent 'gradient' for a mean"):
        sums[0].mean("gradient")
    assert digest(run(Weighed(), "sequential", **SHORT)) == digest(run(Weighed(), "threads", 2, **SHORT))


def test_where_all_are_zero_the_model_stays():
    model = oracle.smooth_model(torch.float32)
    assert same_bits(run(weighing(lambda e: [0.0] * len(e.clients)), "sequential", **SHORT).model, model)


def test_averaged_buffers_follow_them():
    def made(algorithm, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        options = {"buffers": "average", "sizes": (7, 12, 9), "rounds": 2} | options
        return run(algorithm, "sequential", model=model, **options).model[1].running_mean

    own = made(Weighed())
    torch.testing.assert_close(own, made(fed.FedAvg(), weighting="samples"), rtol=1e-5, atol=1e-6)
    assert (own - made(fed.FedAvg())).abs().max() > 1e-4


def test_a_weight_that_is_not_finite_excludes_its_client():
    result = run(weighing(lambda e: [float("nan") if i == 1 else 1.0 for i in e.clients]), "sequential",
                 **SHORT | {"participation": 1.0, "rounds": 1})  # fmt: skip
    assert [(r["client"], "weight of the client" in r["reason"]) for r in result.history[0]["excluded"]] == [(1, True)]


def test_personal_parameters_keep_the_weights():
    own, plain = (run(a, "sequential", personal=["0.*"], **SHORT | o)
                  for a, o in ((Weighed(), {}), (fed.FedAvg(), {"weighting": "samples"})))  # fmt: skip
    assert apart(own.model, plain.model) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        (weighing(lambda e: [-1.0] * len(e.clients)), {},
            r"a number >= 0 for each of the 1 clients, \[1\]; got \[-1.0"),
        (weighing(lambda e: [1.0, 2.0]), {}, r"each of the 1 clients, \[1\]; got \[2\]"),
        (weighing(lambda e: None), {}, "got none with weighs = True"),
        (weighing(lambda e: [1.0] * len(e.clients), False), {}, "got one without weighs = True"),
        (Weighed(), {"aggregation": "median"}, "send weights of their own .* use aggregation='mean'"),
        (Weighed(), {"noise_multiplier": 1.0, "clip_update": 1.0}, "its clients send or keep more than"),
    ],
    ids=["negative", "two for one", "none", "undeclared", "robust rule", "privacy"],
)  # fmt: skip
def test_what_cannot_be_weighed_is_refused(algorithm, options, words):
    with pytest.raises(ValueError, match=words):
        run(algorithm, "sequential", **SHORT | options)
