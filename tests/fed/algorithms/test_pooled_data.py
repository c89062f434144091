"""The centralised baselines: training on pooled data, which is dealt out evenly, with the budget of a federated run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from fastsam.fed import models
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.loop.pooled_data import in_turn, pool_data
from tests.helpers import oracle
from tests.helpers.fed_runs import same_bits
from tests.helpers.fed_watch import Watched


@pytest.mark.parametrize("baseline", [fed.Centralised_SGD(), fed.Centralised_SAM(rho=0.2)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_centralised_baseline_is_training_on_the_pooled_data(baseline, momentum):
    """It has the bits of a run of one client with the samples of all."""
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"rounds": 3, "local_epochs": 2, "participation": 1.0, "lr": 0.05, "momentum": momentum}
    pooled_clients = [tuple(torch.cat(parts) for parts in zip(*clients, strict=True))]
    twin = fed.FedSAM(baseline.rho) if isinstance(baseline, fed.Centralised_SAM) else fed.FedAvg()
    actual, expected = (
        fed.run(model, data, algorithm, **options).model
        for data, algorithm in ((clients, baseline), (pooled_clients, twin))
    )
    assert same_bits(actual, expected)


# --- The baselines on pooled data: their samples, their budget, and that the clients are still those of the evaluation.


def population(sizes=(5, 8, 3, 14)):
    """Every sample is its own number."""
    x = torch.arange(float(sum(sizes)))[:, None]
    return prepare([(p, p[:, 0].long() % 2) for p in x.split(list(sizes))], None, torch.float32, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(
    participation=st.floats(0.01, 1),
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
def test_the_blocks_are_the_data_dealt_out_evenly(participation, seed, sizes):
    result = pool_data(population(sizes), participation, seed)
    total = sum(sizes)
    assert len(result.clients) == min(max(1, round(1 / participation)), total)
    assert max(result.clients.sizes) - min(result.clients.sizes) <= 1
    assert sorted(torch.cat([x for x, _ in result.clients.pairs])[:, 0].tolist()) == list(range(total))
    assert all(torch.equal(y, x[:, 0].long() % 2) for x, y in result.clients.pairs)
    repeat = pool_data(population(sizes), participation, seed)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(result.clients.pairs, repeat.clients.pairs))


def test_blocks_mix_the_clients():
    blocks = [x[:, 0] for x, _ in pool_data(population((50, 50)), 0.5, 0).clients.pairs]
    assert all(15 < (x < 50).sum() < 35 for x in blocks)
    shuffled_pool = pool_data(population((50, 50)), 0.5, 1).clients.pairs[0][0][:, 0]
    assert not torch.equal(blocks[0], shuffled_pool)


def test_blocks_come_in_turn():
    sampler = in_turn(3)
    assert [sampler(t, torch.Generator()) for t in range(5)] == [[0], [1], [2], [0], [1]]


def digits():
    data = fed.digits(clients=20, alpha=0.3)
    return models.build("mlp", data.in_shape, data.classes, seed=0), data


@pytest.mark.parametrize("algorithm", [fed.Centralised_SGD(), fed.Centralised_SAM(rho=0.1)], ids=repr)
def test_the_budget_is_that_of_a_federated_run(algorithm):
    model, data = digits()
    options = {"rounds": 4, "participation": 0.25, "sampler": "fixed", "local_epochs": 2, "batch_size": 8, "lr": 0.1}
    federated_result = fed.run(model, data, fed.FedAvg(), **options)
    watcher = Watched(algorithm)
    central = fed.run(model, data, watcher, **{**options, "sampler": "bernoulli"})
    for actual, expected in zip(central.history, federated_result.history):
        assert actual["samples"] == pytest.approx(
            expected["samples"], rel=0.2
        )  # client 0 has the remainder of the split
        assert actual["steps"] == 2 * math.ceil(actual["samples"] / 8)
        assert actual["steps"] == pytest.approx(expected["steps"], rel=0.25)
        assert actual["backprops"] == actual["steps"] * (2 if isinstance(algorithm, fed.Centralised_SAM) else 1)
        assert actual["megabytes_down"] == actual["megabytes_up"] == 0 and actual["clients"] == 1
    # Over the clients of the split, not over the blocks: one block has one accuracy.
    assert central.history[-1]["client_accuracy_std"] > 0
    assert central.summary()["accuracy_final"] > federated_result.summary()["accuracy_final"] - 0.05
