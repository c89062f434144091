"""Local parameters, compared with a loop in plain torch in which every client has a separate head."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_input import start as start_small
from tests.helpers.fed_runs import same_bits

SIZES = (7, 12, 5)
TEST = oracle.ragged_clients(sizes=(60,), seed=5)[0]
OPTIONS: dict[str, Any] = {
    "participation": 1.0, "batch_size": 4, "shuffle": False, "lr": 0.3, "rounds": 3, "test": TEST,
}  # fmt: skip


def heads_of_their_own(phi: float, server_lr: float) -> tuple[nn.Module, list[nn.Module]]:
    """Federated averaging (FedProx) of the first layer: the shared model after the rounds, and every client's."""
    shared_model = oracle.smooth_model()
    clients = oracle.ragged_clients(sizes=SIZES)
    heads = [copy.deepcopy(shared_model[2].state_dict()) for _ in clients]
    for _ in range(OPTIONS["rounds"]):
        moves: list[list[Tensor]] = []
        for i, (x, y) in enumerate(clients):
            client_model = copy.deepcopy(shared_model)
            client_model[2].load_state_dict(heads[i])
            begin = [p.detach().clone() for p in client_model.parameters()]
            opt = torch.optim.SGD(client_model.parameters(), lr=OPTIONS["lr"])
            for a, b in zip(x.split(4), y.split(4), strict=True):
                opt.zero_grad()
                pull = sum(((p - q) ** 2).sum() for p, q in zip(client_model.parameters(), begin, strict=True))
                (F.cross_entropy(client_model(a), b) + phi / 2 * pull).backward()
                opt.step()
            heads[i] = copy.deepcopy(client_model[2].state_dict())
            moves.append([p.detach() - q for p, q in zip(client_model[0].parameters(), begin[:2], strict=True)])
        with torch.no_grad():
            for p, *parts in zip(shared_model[0].parameters(), *moves, strict=True):
                p += server_lr * sum(parts) / len(parts)
    own_models = [copy.deepcopy(shared_model) for _ in clients]
    for model, head in zip(own_models, heads, strict=True):
        model[2].load_state_dict(head)
    return shared_model, own_models


@pytest.mark.parametrize(
    ("algorithm", "phi"),
    [
        (fed.FedAvg(), 0.0),
        (fed.FedProx(phi=0.5), 0.5),
        *((a, None) for a in (fed.FedAdam(), fed.SCAFFOLD(), fed.FedGAMMA())),
    ],
    ids=repr,
)
def test_every_client_has_a_head_of_its_own(algorithm, phi):
    begin = oracle.smooth_model()
    clients = oracle.ragged_clients(sizes=SIZES)
    result = fed.run(begin, clients, algorithm, local_parameters="2", server_lr=0.7, **OPTIONS)
    assert same_bits(result.model[2], begin[2]), "the global head stays as it was"
    if phi is None:
        return
    shared_model, original = heads_of_their_own(phi, 0.7)
    assert oracle.movement(result.model[0], shared_model[0]) < 1e-12
    for i, model in enumerate(original):
        assert oracle.movement(result.client_model(i), model) < 1e-12
    assert oracle.movement(result.client_model(0), result.client_model(1)) > 1e-2


@pytest.mark.parametrize("validation", ["shared", "iid"])
def test_accuracies_over_clients_are_those_of_their_own_models(validation):
    clients = oracle.ragged_clients(sizes=SIZES)
    options = {**OPTIONS, "client_test_split": validation}
    result = fed.run(oracle.smooth_model(), clients, fed.FedSAM(), local_parameters=["2.weight", "2.bias"], **options)
    record = result.history[-1]
    if validation == "shared":
        models = map(result.client_model, range(len(SIZES)))
        accuracies = [(model(TEST[0]).argmax(1) == TEST[1]).double().mean().item() for model in models]
        assert record["client_accuracy_mean"] == pytest.approx(sum(accuracies) / 3)
        assert (record["client_accuracy_min"], record["client_accuracy_max"]) == pytest.approx(
            (min(accuracies), max(accuracies))
        )
        assert record["client_worst"] == accuracies.index(min(accuracies)) and record[
            "client_best"
        ] == accuracies.index(max(accuracies))
    assert record["client_accuracy_std"] > 0
    accuracy = (result.model(TEST[0]).argmax(1) == TEST[1]).double().mean().item()
    assert record["test_accuracy"] == pytest.approx(accuracy)


def test_only_what_is_shared_is_sent():
    plain, original = start_small(), start_small(local_parameters="2.*")
    parts = {name: p.numel() for name, p in plain.model.named_parameters()}
    share = (parts["0.weight"] + parts["0.bias"]) / sum(parts.values())
    for way in ("megabytes_up", "megabytes_down"):
        assert original.history[0][way] == pytest.approx(share * plain.history[0][way])


# --- Fine-tuning after a run, compared with a run of one client.


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
    """The accuracies are those of a run with the test set, and there is no warning that a test set is missing."""
    clients, options = oracle.ragged_clients(), {"rounds": 1, "participation": 1.0}
    blind, full = (
        fed.run(oracle.smooth_model(), clients, fed.FedAvg(), **options | TUNED | {"test": test})
        for test in (None, TEST)
    )
    caplog.clear()
    assert fed.finetune(blind, clients, test=TEST) == fed.finetune(full, clients, test=TEST)
    assert not caplog.records
    with pytest.raises(ValueError, match="It needs a test set"):
        fed.finetune(blind, clients)
    regression = [(x, x[:, :3]) for x, _ in clients]
    blind = fed.run(oracle.smooth_model(), regression, fed.FedAvg(), loss="mse_loss", rounds=1)
    with pytest.raises(ValueError, match="a model with one output per class"):
        fed.finetune(blind, regression, test=regression[0])


def test_two_calls_give_the_same() -> None:
    clients = oracle.ragged_clients()
    options = TUNED | {"shuffle": True}
    result, other_result = (
        fed.run(oracle.smooth_model(), clients, fed.FedAvg(), rounds=1, **options) for _ in range(2)
    )
    assert same_bits(result.model, other_result.model)
    assert fed.finetune(result, clients, test=TEST) == fed.finetune(other_result, clients, test=TEST)
