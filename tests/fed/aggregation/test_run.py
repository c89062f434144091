"""Runs with a robust rule: a poisoned client, every algorithm, every executor, and refusals."""

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.aggregation import names
from fastsam.fed.loop.cohort import Cohort
from tests.helpers import fed_runs
from tests.helpers.fed_runs import FIRST, digest, overflow
from tests.promises import cases

RULES = [name for name in names() if name != "mean"]
OPTIONS: dict[str, Any] = {"participation": 1.0, "rounds": 2}


def blobs(poison: float = 1.0) -> tuple[list[Any], Any]:
    """Ten clients of three classes, a little apart from each other, and a test set; the data of client 4 is multiplied
    by `poison`."""
    g = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(3, 6, generator=g)

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(n) % 3
        return centres[y] + torch.randn(n, 6, generator=g), y

    clients, test = [draw(24) for _ in range(10)], draw(150)
    clients[4] = (poison * clients[4][0], clients[4][1])
    return clients, test


def accuracy(aggregation: str, poison: float, algorithm: fed.Algorithm) -> float:
    """At the end of five rounds, in the second of which client 4 takes part, once."""
    clients, test = blobs(poison)
    torch.manual_seed(0)
    everybody, other_clients = list(range(10)), [i for i in range(10) if i != 4]
    result = fed.run(
        nn.Linear(6, 3), clients, algorithm, rounds=5, eval_every=5, test=test, aggregation=aggregation,
        executor="sequential", lr=0.1,
        sampler=lambda t, generator: everybody if t == 1 else other_clients,
    )  # fmt: skip
    return result.history[-1]["test_accuracy"]


@pytest.mark.parametrize(
    "algorithm", [fed.FedAvg(), fed.FedSAM(rho=0.05), fed.MoFedSAM(rho=0.05, beta=0.5)], ids=lambda a: type(a).__name__
)
def test_a_poisoned_client_ruins_the_mean_and_no_robust_rule(algorithm: fed.Algorithm) -> None:
    clean_accuracy = accuracy("mean", 1.0, algorithm)
    assert clean_accuracy > 0.85
    assert accuracy("mean", 1e8, algorithm) < clean_accuracy - 0.05
    for rule in RULES:
        assert accuracy(rule, 1e8, algorithm) > clean_accuracy - 0.03, rule


def test_the_mean_by_name_is_the_default_to_the_bit() -> None:
    runs = [fed_runs.run(fed.FedSAM(), "sequential", **OPTIONS, **options) for options in ({}, {"aggregation": "mean"})]
    assert digest(runs[0]) == digest(runs[1])
    assert "left_out" not in runs[0].history[0]


WHOLE = [cls for cls in fed.algorithms.registry.values() if cls.own_parameters is fed.Algorithm.own_parameters]
SERVED = sorted(
    cls.__name__
    for name, cls in fed.algorithms.registry.items()
    if not (cls().uses_sums or cls.sends_weights or name.startswith("centralised") or cls in (fed.FedBN, fed.FedRep))
)


@pytest.mark.parametrize("name", sorted(WHOLE, key=lambda cls: cls.__name__), ids=lambda m: m.__name__)
def test_every_algorithm_is_served_or_refused_by_name(name: type[fed.Algorithm]) -> None:
    if name.__name__ in SERVED:
        _, parameters = cases.METHODS[FIRST[name.__name__]] if name.__name__ in FIRST else ("", {})
        result = fed_runs.run(name(**parameters), "sequential", aggregation="median", rounds=1, local_epochs=1)
        assert all(p.isfinite().all() for p in result.model.parameters())
        return
    words = rf"server of {name.__name__} .*one of {', '.join(SERVED)}$"
    if name.__name__.startswith("Centralised"):
        words = "has none"
    elif name.sends_weights:
        words = f"the clients of {name.__name__} send weights of their own"
    with pytest.raises(ValueError, match=words):
        fed_runs.run(name(), "sequential", aggregation="median")


@pytest.mark.parametrize("method", [*FIRST.values(), "fedsmoo-mu-active", "fedsmoo-mu-all", "fedsmoo-alone"])
def test_what_an_algorithm_says_of_totals_is_what_it_uploads(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    kinds, original = set(), Cohort.check

    def check(self: Cohort) -> None:
        kinds.update(kind for kind, _ in self.sums._vectors)
        original(self)

    monkeypatch.setattr(Cohort, "check", check)
    name, parameters = cases.METHODS[method]
    algorithm = getattr(fed, name)(**parameters)
    fed_runs.run(algorithm, "sequential", rounds=1, local_epochs=1, sizes=(3, 3))
    assert algorithm.uses_sums == ("sum" in kinds)


def test_fedsmoo_without_sums_is_served() -> None:
    fed_runs.run(fed.FedSMOO(dyn=False), "sequential", aggregation="median", rounds=1)


def test_records_say_whom_a_rule_left_out() -> None:
    clients, test = blobs(1e8)
    run = {"rounds": 2, "participation": 1.0, "test": test, "executor": "sequential", "lr": 0.05}
    result = {a: fed.run(nn.Linear(6, 3), clients, fed.FedAvg(), aggregation=a, **run).history for a in RULES}
    assert [r["left_out"] for r in result["norm_filter"]] == [[4], [4]]
    assert all(len(r["left_out"]) == 9 and 4 in r["left_out"] for r in result["krum"])
    assert all(len(r["left_out"]) == 4 and 4 in r["left_out"] for r in result["multi_krum"])
    assert all(r["left_out"] == [] for r in result["median"])


def test_clients_that_are_not_finite_are_excluded_before_a_rule_sees_them() -> None:
    clients, _ = blobs()
    clients[2] = (overflow(clients[2][0]), clients[2][1])
    result = fed.run(nn.Linear(6, 3), clients, fed.FedAvg(), rounds=1, participation=1.0, aggregation="krum")
    assert [e["client"] for e in result.history[0]["excluded"]] == [2]
    assert len(result.history[0]["left_out"]) == 8 and 2 not in result.history[0]["left_out"]


def test_averaged_buffers_follow_the_rule() -> None:
    """BatchNorm's statistics of the poisoned client do not enter either."""
    clients, test = blobs(1e3)

    def variance(rule: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        run = {"rounds": 2, "participation": 1.0, "test": test, "buffers": "average", "batch_size": 8}
        norm = fed.run(model, clients, fed.FedAvg(), aggregation=rule, **run).model[0]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_var is not None
        return float(norm.running_var.max())

    assert variance("mean") > 1e4
    assert variance("median") < 100 and variance("trimmed_mean") < 100
