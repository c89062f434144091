"""Fine-tuning after a run, compared with a run of one client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import same_bits

TEST = oracle.ragged_clients(sizes=(60,), seed=5)[0]
OPTIONS: dict[str, Any] = {
    "test": TEST,
    "validation": "shared",
    "lr": 0.3,
    "batch_size": 5,
    "shuffle": False,
}


@pytest.mark.parametrize("options", [{}, {"personal": "2.*"}], ids=["global model", "client models"])
def test_each_client_trains_alone(options: dict[str, Any]) -> None:
    """As one round of federated averaging with only this client, from the model that it has at the end."""
    clients = oracle.ragged_clients()
    result = fed.run(oracle.smooth_model(), clients, fed.FedSAM(), rounds=2, **OPTIONS, **options)
    kept = [p.clone() for p in result.model.parameters()]
    tuned = fed.finetune(result, clients, epochs=4, test=TEST)
    assert [one["client"] for one in tuned] == [0, 1, 2, 3, 4]
    for i, one in enumerate(tuned):
        start = result.client_model(i) if options else result.model
        alone = fed.run(start, clients[i : i + 1], fed.FedAvg(), rounds=1, local_epochs=4, **OPTIONS)
        assert one["before"] == (start(TEST[0]).argmax(1) == TEST[1]).double().mean().item()
        assert one["after"] == alone.history[-1]["test_accuracy"]
    assert len({one["after"] for one in tuned}) > 1, "no client learnt anything: this shows nothing"
    assert all(map(torch.equal, kept, result.model.parameters()))


def test_accuracies_are_measured_on_the_clients_own_samples() -> None:
    """With its own class prior a client of one class is always right once it has learnt to predict only that class."""
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    clients = [(x[y == k], y[y == k]) for k in range(3)]
    options: dict[str, Any] = {"participation": 1.0, "rounds": 1, "batch_size": 5, "lr": 0.1, "test": (x, y)}
    result = fed.run(nn.Linear(6, 3), clients, fed.FedAvg(), **options)
    tuned = fed.finetune(result, clients, epochs=60, lr=0.5, test=(x, y))
    assert [one["after"] for one in tuned] == [1.0, 1.0, 1.0] and all(one["before"] < 1 for one in tuned)


def test_every_kind_of_data() -> None:
    """A FederatedData has its own test set; lazy clients are loaded one by one."""
    data = fed.digits(clients=3, alpha=1.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fed.run(model, data, fed.FedAvg(), rounds=1, participation=1.0)
    tuned = fed.finetune(result, data)
    lazy = fed.Lazy(3, data.__getitem__)
    result = fed.run(model, lazy, fed.FedAvg(), rounds=1, participation=1.0, test=data.test, validation="shared")
    again = fed.finetune(result, lazy, test=data.test)
    assert all(0 < one["after"] <= 1 for one in (*tuned, *again)) and len(again) == 3


def test_two_calls_give_the_same() -> None:
    clients = oracle.ragged_clients()
    options = OPTIONS | {"shuffle": True}
    result, other = (fed.run(oracle.smooth_model(), clients, fed.FedAvg(), rounds=1, **options) for _ in range(2))
    assert same_bits(result.model, other.model)
    assert fed.finetune(result, clients, test=TEST) == fed.finetune(other, clients, test=TEST)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"epochs": 0}, "epochs must be an integer >= 1, got 0"), ({"test": None}, "needs a test set")],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    clients = oracle.ragged_clients()
    result = fed.run(oracle.smooth_model(), clients, fed.FedAvg(), rounds=1, **OPTIONS)
    with pytest.raises(ValueError, match=words):
        fed.finetune(result, clients, **{"test": TEST, **options})
