"""Numbers over clients with personal models: all accuracies and metrics belong to these models."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import norm_model

CLIENTS = oracle.ragged_clients(sizes=(30, 24, 18))
SETS = oracle.ragged_clients(sizes=(40, 20, 30), seed=5)
TEST = tuple(torch.cat(parts) for parts in zip(*SETS, strict=True))
ALGORITHMS: dict[str, tuple[fed.Algorithm, dict[str, Any]]] = {
    "Ditto": (fed.Ditto(), {}),
    "APFL": (fed.APFL(), {}),
    "FedRep": (fed.FedRep(head_epochs=1), {}),
    "local head": (fed.FedSAM(), {"local_parameters": "2"}),
    "local buffers": (fed.FedAvg(), {"buffers": "local", "model": lambda: norm_model().double()}),
}
KEYS = ("mean", "std", "min", "max")


def error(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) != labels).double().mean()


def brier(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.softmax(1) - F.one_hot(labels, 3)).square().sum(1).mean()


def run(name: str, **options: Any) -> fed.Result:
    algorithm, extra = ALGORITHMS[name]
    options = {"rounds": 2, "participation": 1.0, "batch_size": 6, "lr": 0.3, **extra, **options}
    model = options.pop("model", oracle.smooth_model)()
    return fed.run(model, CLIENTS, algorithm, **options)


@pytest.mark.parametrize("split", ["prior", "iid", "shared", "own"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_metrics_over_clients_are_of_their_own_models(name: str, split: str) -> None:
    test: Any = fed.ClientTestSets(SETS) if split == "own" else TEST
    options: dict[str, Any] = {} if split == "own" else {"client_test_split": split}
    result = run(name, test=test, metrics={"error": error, "brier": brier}, **options)
    record = result.history[-1]
    assert record["client_accuracy_std"] > 0
    assert record["client_error_mean"] == pytest.approx(1 - record["client_accuracy_mean"])
    assert record["client_error_std"] == pytest.approx(record["client_accuracy_std"])
    assert record["client_error_min"] == pytest.approx(1 - record["client_accuracy_max"])
    assert record["test_brier"] == pytest.approx(brier(result.model.eval()(TEST[0]), TEST[1]).item())
    if split not in ("own", "shared"):
        return
    sets = SETS if split == "own" else [TEST] * 3
    values = [brier(result.client_model(i).eval()(x), y).item() for i, (x, y) in enumerate(sets)]
    statistics = np.mean(values), np.std(values), min(values), max(values)
    assert [record[f"client_brier_{k}"] for k in KEYS] == pytest.approx(statistics)
    if split == "own":
        assert record["client_brier_each"] == pytest.approx(values)


@pytest.mark.parametrize("split", ["prior", "iid", "shared", "own"])
@pytest.mark.parametrize("name", ["FedAvg", "Ditto"])
def test_the_accuracy_of_each_client_is_in_the_result_and_in_a_file(name: str, split: str, tmp_path: Path) -> None:
    test: Any = fed.ClientTestSets(SETS) if split == "own" else TEST
    options: dict[str, Any] = {} if split == "own" else {"client_test_split": split}
    options |= {"run_dir": tmp_path / "run", "participation": 1.0, "lr": 0.3, "test": test}
    algorithm = getattr(fed, name)()
    for rounds, resume in ((2, False), (3, True), (3, True)):  # the last one evaluates nothing anew
        result = fed.run(oracle.smooth_model(), CLIENTS, algorithm, rounds=rounds, resume=resume, **options)
        values = result.client_accuracies
        assert values is not None and len(values) == len(CLIENTS)
        record = result.history[-1]
        assert np.mean(values) == pytest.approx(record["client_accuracy_mean"])
        assert [min(values), max(values)] == [record["client_accuracy_min"], record["client_accuracy_max"]]
        if split == "own":
            assert values == record["client_accuracy_each"]
        with open(tmp_path / "run" / "clients.csv", newline="") as file:
            assert [*csv.DictReader(file)] == [
                {"client": str(i), "accuracy": repr(value)} for i, value in enumerate(values)
            ]


def test_a_client_without_test_samples_has_no_accuracy(tmp_path: Path) -> None:
    sets = fed.ClientTestSets([SETS[0], None, SETS[2]])
    result = fed.run(oracle.smooth_model(), CLIENTS, fed.FedAvg(), rounds=1, test=sets, run_dir=tmp_path / "run")
    assert result.client_accuracies is not None and result.client_accuracies[1] is None
    assert (tmp_path / "run" / "clients.csv").read_text().splitlines()[2] == "1,"


def test_metrics_of_a_regression_too() -> None:
    clients = [(x, x.sum(1, keepdim=True) * (i + 1)) for i, (x, _) in enumerate(CLIENTS)]
    sets = [(x, x.sum(1, keepdim=True) * (i + 1)) for i, (x, _) in enumerate(SETS)]
    result = fed.run(
        nn.Linear(6, 1).double(), clients, fed.Ditto(), rounds=2, participation=1.0, loss="mse_loss", lr=0.05,
        test=fed.ClientTestSets(sets), metrics={"mae": F.l1_loss},
    )  # fmt: skip
    values = [F.l1_loss(result.client_model(i)(x), y).item() for i, (x, y) in enumerate(sets)]
    record = result.history[-1]
    assert record["client_mae_each"] == pytest.approx(values)
    assert record["client_mae_mean"] == pytest.approx(np.mean(values)) != pytest.approx(record["test_mae"])
    assert record["client_accuracy_mean"] is None and result.client_accuracies is None
