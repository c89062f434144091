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


def test_it_is_sgd_on_everything():
    """One block: a round is `local_epochs` passes over the clients' samples in their order."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    clients = [(torch.randn(n, 3, dtype=torch.float64), torch.arange(n) % 2) for n in (5, 2, 8)]
    options = {"rounds": 2, "local_epochs": 2, "batch_size": 4, "lr": 0.3, "participation": 1.0, "shuffle": False}
    ours = fed.run(model, clients, fed.Centralised_SGD(), **options).model
    x, y = (torch.cat([c[i] for c in clients]) for i in (0, 1))
    for _ in range(4):
        for a, b in zip(x.split(4), y.split(4)):
            grads = torch.autograd.grad(torch.nn.functional.cross_entropy(model(a), b), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads):
                    p -= 0.3 * g
    for p, q in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_run_is_continued(tmp_path):
    model, data = digits()
    options = {"participation": 0.3, "lr": 0.1}
    whole = fed.run(model, data, fed.Centralised_SGD(), rounds=5, **options).model
    fed.run(model, data, fed.Centralised_SGD(), rounds=2, run_dir=tmp_path, **options)
    parts = fed.run(model, data, fed.Centralised_SGD(), rounds=5, run_dir=tmp_path, resume=True, **options).model
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), parts.parameters()))
