"""Fine-tuning at the end of a run, beside what a run of one client alone comes to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_input import start as start_small
from tests.helpers.fed_rundir import records, start
from tests.helpers.fed_runs import same_bits

OPTIONS: dict[str, Any] = {
    "test": oracle.ragged_clients(sizes=(60,), seed=5)[0],
    "validation": "shared",
    "lr": 0.3,
    "batch_size": 5,
    "shuffle": False,
}


def test_each_client_trains_the_global_model_on_alone(tmp_path):
    """As one round of federated averaging of this client and nobody else, from the final model."""
    clients = oracle.ragged_clients()
    result = start(tmp_path / "run", clients=clients, personalise=4, **OPTIONS)
    assert [one["client"] for one in result.personal] == [0, 1, 2, 3, 4]
    for one, client in zip(result.personal, clients, strict=True):
        alone = fed.run(result.model, [client], fed.FedAvg(), rounds=1, local_epochs=4, **OPTIONS)
        assert one["before"] == result.history[-1]["test_accuracy"] and one["samples"] == len(client[1])
        assert one["after"] == alone.history[-1]["test_accuracy"]
    after = [one["after"] for one in result.personal]
    assert len({*after}) > 1, "nobody learnt anything: this shows nothing"
    found = result.summary()["personal"]
    assert found["after_mean"] == pytest.approx(np.mean(after)) and found["after_std"] == pytest.approx(np.std(after))
    assert (found["after_min"], found["after_max"], found["before_std"]) == (min(after), max(after), 0)
    assert json.loads((tmp_path / "run" / "personal.json").read_text()) == result.personal


@pytest.mark.parametrize("executor", ["threads", pytest.param("vmap", marks=pytest.mark.slow)])
def test_the_run_itself_stays_as_it_is(executor, tmp_path):
    plain = start(tmp_path / "plain", executor=executor, slots=3)
    tuned = start(tmp_path / "tuned", executor=executor, slots=3, personalise=2)
    assert same_bits(plain.model, tuned.model) and records(tmp_path / "plain") == records(tmp_path / "tuned")
    assert plain.personal is None and plain.summary()["personal"] is None
    assert not (tmp_path / "plain" / "personal.json").exists() and len(tuned.personal) == 5
    again = start(tmp_path / "plain", executor=executor, slots=3, personalise=2, resume=True)
    assert again.personal == tuned.personal


def test_each_is_told_on_its_own_samples():
    """With its own class prior: a client of one class is right in all of its samples when it has learnt to say nothing
    else."""
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    clients = [(x[y == k], y[y == k]) for k in range(3)]
    result = start_small(clients=clients, test=(x, y), personalise=60, lr=0.5, participation=1.0, local_epochs=1)
    assert [one["after"] for one in result.personal] == [1.0, 1.0, 1.0]
    assert all(one["before"] < 1 for one in result.personal)


def test_buffers_of_ones_own():
    """BatchNorm with averaged statistics: a client's own model has its own ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    x, y = torch.randn(40, 6) + 20, torch.randint(0, 3, (40,))
    options = {"buffers": "average", "batch_size": 40, "lr": 0.5, "validation": "shared", "test": (x, y)}
    result = fed.run(model, [(x, y)], fed.FedAvg(), rounds=1, personalise=30, **options)
    alone = fed.run(result.model, [(x, y)], fed.FedAvg(), rounds=1, local_epochs=30, shuffle=True, **options)
    (one,) = result.personal
    assert one["after"] == pytest.approx(alone.history[-1]["test_accuracy"], abs=0.03) and one["after"] > one["before"]


def test_a_client_that_cannot_be_trained_has_no_accuracy():
    x, y = torch.randn(6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    clients = [(x, y), (x * 1e30, y)]
    result = start_small(
        nn.Linear(6, 3),
        clients,
        test=(x, y),
        personalise=1,
        lr=1e10,
        sampler=lambda t, g: [0],
        loss=lambda out, y: nn.functional.cross_entropy(out, y),
    )
    assert result.personal[1]["after"] is None and result.personal[0]["after"] is not None
    assert result.summary()["personal"]["before_mean"] == result.personal[0]["before"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"personalise": 0}, "personalise .* must be an integer >= 1, got 0"),
        ({"personalise": 1}, "personalise=1 tells each client's accuracy before and after: it needs a test set"),
        ({"personalise": 1, "algorithm": fed.Centralised_SGD()}, "is for clients, and Centralised_SGD has none"),
    ],
)
def test_what_cannot_be_told(options, words):
    with pytest.raises(ValueError, match=words):
        start_small(**options)
