"""Test sets of clients: their records and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastsam import fed

SIZES = (3, 0, 7, 1)


def data(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)


CLIENTS = [data(8, i) for i in range(4)]
TESTS = [data(n, 10 + i) if n else None for i, n in enumerate(SIZES)]


def start(clients: Any = CLIENTS, tests: Any = TESTS, **options: Any) -> fed.Result:
    torch.manual_seed(0)
    test = fed.ClientTestSets(tests) if tests is not None else None
    options = {"rounds": 2, "participation": 1.0, "test": test, **options}
    return fed.run(nn.Linear(4, 3), clients, fed.FedAvg(), **options)


def accuracy(model: nn.Module, test_set: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float((model(test_set[0]).argmax(1) == test_set[1]).double().mean())


def wrong(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return float((outputs.argmax(1) != labels).double().mean())


@pytest.mark.parametrize("kind", ["pairs", "lazy", "batches"])
def test_each_client_is_tested_on_its_own(kind: str) -> None:
    """Clients are in memory, loaded, or read in batches."""
    clients: Any = CLIENTS
    if kind == "lazy":
        clients = fed.LazyClients(4, CLIENTS.__getitem__)
    if kind == "batches":
        clients = [{"x": x, "y": y} for x, y in CLIENTS]
    loss: Any = "cross_entropy"
    if kind == "batches":

        def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            return model(x), y

        loss = fed.BatchLoss(lambda model, batch: nn.functional.cross_entropy(*predict(model, batch)), predict)
    result = start(clients, loss=loss, metrics={"wrong": wrong})
    accuracies = [None if run_1 is None else accuracy(result.model, run_1) for run_1 in TESTS]
    last = result.history[-1]
    assert [v is None for v in last["client_accuracy_each"]] == [n == 0 for n in SIZES]
    known_accuracies = [v for v in accuracies if v is not None]
    assert [v for v in last["client_accuracy_each"] if v is not None] == pytest.approx(known_accuracies)
    assert last["client_accuracy_mean"] == pytest.approx(np.mean(known_accuracies)) and last[
        "client_accuracy_min"
    ] == min(known_accuracies)
    joined_set = tuple(torch.cat([run_1[i] for run_1 in TESTS if run_1 is not None]) for i in (0, 1))
    assert last["test_accuracy"] == pytest.approx(accuracy(result.model, joined_set))
    assert result.summary()["validation"] == "own"
    assert [v for v in last["client_wrong_each"] if v is not None] == pytest.approx([1 - v for v in known_accuracies])


def test_rounds_without_evaluation_have_the_keys_too() -> None:
    lines = start(eval_every=2).history
    assert [*lines[0]] == [*lines[1]] and lines[0]["client_accuracy_each"] is None
    assert not any(key.endswith("_each") for key in start(tests=None, test=TESTS[0]).history[-1])


def test_own_models_are_tested_on_own_test_sets() -> None:
    result = start(local_parameters="bias")
    accuracies = [None if run_1 is None else accuracy(result.client_model(i), run_1) for i, run_1 in enumerate(TESTS)]
    assert result.history[-1]["client_accuracy_each"] == accuracies


def test_a_run_goes_on_with_the_same_test_sets_alone(tmp_path: Path) -> None:
    start(run_dir=tmp_path / "run")
    start(run_dir=tmp_path / "run", resume=True, rounds=3)
    x, y = (torch.cat([run_1[i] for run_1 in TESTS if run_1 is not None]) for i in (0, 1))
    other_sets = [(x[:4], y[:4]), None, (x[4:], y[4:]), None]
    with pytest.raises(fed.RunDirectoryError, match="data"):
        start(tests=other_sets, run_dir=tmp_path / "run", resume=True, rounds=4)
