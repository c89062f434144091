"""Fine-tuning after a run, compared with a run of one client."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.loop.run import NO_TEST_SET
from tests.helpers import oracle

TEST = oracle.ragged_clients(sizes=(60,), seed=5)[0]
TUNED: dict[str, Any] = {
    "test": TEST, "client_test_split": "shared", "lr": 0.3, "batch_size": 5, "shuffle": False,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"local_parameters": "2.*"}], ids=["global model", "client models"])
def test_each_client_trains_alone(options: dict[str, Any]) -> None:
    """Finetuning equals one round of federated averaging with only this client, from its final model."""
    clients = oracle.ragged_clients()
    result = fed.run(oracle.smooth_model(), clients, fed.FedSAM(), rounds=2, **TUNED, **options)
    weights = [p.clone() for p in result.model.parameters()]
    tuned_result = fed.finetune(result, clients, epochs=4, test=TEST)
    assert [entry["client"] for entry in tuned_result] == [0, 1, 2, 3, 4]
    for i, entry in enumerate(tuned_result):
        start = result.client_model(i) if options else result.model
        single_run = fed.run(start, clients[i : i + 1], fed.FedAvg(), rounds=1, local_epochs=4, **TUNED)
        assert entry["before"] == (start(TEST[0]).argmax(1) == TEST[1]).double().mean().item()
        assert entry["after"] == single_run.history[-1]["test_accuracy"]
    assert len({entry["after"] for entry in tuned_result}) > 1, "no client learnt anything: this shows nothing"
    assert all(map(torch.equal, weights, result.model.parameters()))


def test_accuracies_are_measured_on_the_clients_own_samples() -> None:
    """With its own class prior a client of one class is always right once it has learnt to predict only that class."""
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    clients = [(x[y == k], y[y == k]) for k in range(3)]
    options: dict[str, Any] = {"participation": 1.0, "rounds": 1, "batch_size": 5, "lr": 0.1, "test": (x, y)}
    result = fed.run(nn.Linear(6, 3), clients, fed.FedAvg(), **options)
    tuned_result = fed.finetune(result, clients, epochs=60, lr=0.5, test=(x, y))
    assert [run_1["after"] for run_1 in tuned_result] == [1.0, 1.0, 1.0] and all(
        run_1["before"] < 1 for run_1 in tuned_result
    )


def test_every_kind_of_data() -> None:
    """A FederatedData has its own test set; lazy clients are loaded one by one."""
    data = fed.digits(clients=3, alpha=1.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fed.run(model, data, fed.FedAvg(), rounds=1, participation=1.0)
    tuned_result = fed.finetune(result, data)
    lazy = fed.LazyClients(3, data.__getitem__)
    result = fed.run(model, lazy, fed.FedAvg(), rounds=1, participation=1.0, test=data.test, client_test_split="shared")
    repeat = fed.finetune(result, lazy, test=data.test)
    assert all(0 < run_1["after"] <= 1 for run_1 in (*tuned_result, *repeat)) and len(repeat) == 3


def test_a_test_set_that_the_run_did_not_have(caplog) -> None:
    """The accuracies equal the accuracies of a run with the test set, and no warning says that a test set is missing.
    Other warnings are logged, and so are the warnings of later runs."""
    clients, options = oracle.ragged_clients(), {"rounds": 1, "participation": 1.0}
    blind, full = (
        fed.run(oracle.smooth_model(), clients, fed.FedAvg(), **options | TUNED | {"test": test})
        for test in (None, TEST)
    )
    caplog.clear()
    assert fed.finetune(blind, clients, test=TEST) == fed.finetune(full, clients, test=TEST)
    assert not caplog.records

    def loss(scores: Tensor, y: Tensor) -> Tensor:
        logging.getLogger("fastsam.fed").warning("a loss warns")
        return F.cross_entropy(scores, y)

    warns = fed.run(oracle.smooth_model(), clients, fed.FedAvg(), loss=loss, **options | TUNED)
    counts = []
    for epochs in (1, 2):
        caplog.clear()
        fed.finetune(warns, clients, epochs=epochs, test=TEST)
        assert set(caplog.messages) == {"a loss warns"}
        counts.append(len(caplog.messages))
    assert counts[0] < counts[1]
    fed.run(oracle.smooth_model(), clients, fed.FedAvg(), **options)
    assert caplog.messages[-1] == NO_TEST_SET
    with pytest.raises(ValueError, match="It needs a test set"):
        fed.finetune(blind, clients)
    regression = [(x, x[:, :3]) for x, _ in clients]
    blind = fed.run(oracle.smooth_model(), regression, fed.FedAvg(), loss="mse_loss", rounds=1)
    with pytest.raises(ValueError, match="a model with one output per class"):
        fed.finetune(blind, regression, test=regression[0])
