"""The baselines on pooled data: their samples, their budget, and that the clients are still those of the evaluation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from fastsam.fed import models
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.loop.pooled_data import in_turn, pooled
from tests.helpers.fed_watch import Watched


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
    made = pooled(population(sizes), participation, seed)
    total = sum(sizes)
    assert len(made.clients) == min(max(1, round(1 / participation)), total)
    assert max(made.sizes) - min(made.sizes) <= 1
    assert sorted(torch.cat([x for x, _ in made.clients])[:, 0].tolist()) == list(range(total))
    assert all(torch.equal(y, x[:, 0].long() % 2) for x, y in made.clients)
    again = pooled(population(sizes), participation, seed)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(made.clients, again.clients))


def test_blocks_mix_the_clients():
    blocks = [x[:, 0] for x, _ in pooled(population((50, 50)), 0.5, 0).clients]
    assert all(15 < (x < 50).sum() < 35 for x in blocks)
    other = pooled(population((50, 50)), 0.5, 1).clients[0][0][:, 0]
    assert not torch.equal(blocks[0], other)


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
    federated = fed.run(model, data, fed.FedAvg(), **options)
    watched = Watched(algorithm)
    central = fed.run(model, data, watched, **{**options, "sampler": "bernoulli"})
    for ours, theirs in zip(central.history, federated.history):
        assert ours["samples"] == pytest.approx(theirs["samples"], rel=0.2)  # client 0 has the remainder of the split
        assert ours["steps"] == 2 * math.ceil(ours["samples"] / 8) and ours["steps"] == pytest.approx(
            theirs["steps"], rel=0.25
        )
        assert ours["backprops"] == ours["steps"] * algorithm.backprops
        assert ours["megabytes_down"] == ours["megabytes_up"] == 0 and ours["clients"] == 1
    # Over the clients of the split, not over the blocks: one block has one accuracy.
    assert central.history[-1]["client_accuracy_std"] > 0
    assert central.summary()["accuracy_final"] > federated.summary()["accuracy_final"] - 0.05
