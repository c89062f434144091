"""Accuracy if there is one output per class, and only then; metrics as functions and as objects that accumulate."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.lab import cli


def logistic(out, y):
    """Cross-entropy of one output."""
    return F.binary_cross_entropy_with_logits(out[:, 0], y.to(out.dtype))


def squares(out, y):
    return F.mse_loss(out[:, 0], y.to(out.dtype))


def one_hot_squares(out, y):
    return F.mse_loss(out, F.one_hot(y, out.shape[1]).to(out.dtype))


def binary_clients(number=4, samples=20):
    """Two classes that a line parts, a third of them of class 1; client i has more of class 1 than client i - 1."""
    g = torch.Generator().manual_seed(0)
    results = []
    for i in range(number + 1):
        y = (torch.rand(samples, generator=g) < (0.35 if i == number else 0.15 + 0.2 * i)).long()
        x = torch.randn(samples, 5, generator=g) + 3.0 * y[:, None]
        results.append((x, y))
    return results[:-1], results[-1]


def run(loss, outputs=1, **options):
    clients, test = binary_clients()
    torch.manual_seed(0)
    settings = {
        "rounds": 8, "participation": 1.0, "lr": 0.5, "batch_size": 4, "test": test, "loss": loss, "target": 0.5,
        "measures": ["train"],
    }  # fmt: skip
    return fed.run(torch.nn.Linear(5, outputs), clients, fed.FedAvg(), **settings | options)


@pytest.mark.parametrize(("loss", "outputs"), [(logistic, 1), (squares, 1)])
def test_outputs_that_are_not_one_per_class_have_no_accuracy(loss, outputs):
    """The argmax of one output is always 0, so an accuracy would be the share of class 0."""
    result = run(loss, outputs, lr=0.03)
    last = result.history[-1]
    assert last["test_loss"] is not None and last["train_set_accuracy"] is None
    assert all(last[key] is None for key in last if "accuracy" in key or key in ("client_worst", "client_best"))
    summary = result.summary()
    assert summary["accuracy_final"] is None and summary["rounds_to_target"] is None and summary["validation"] is None


@pytest.mark.parametrize("loss", ["cross_entropy", one_hot_squares, lambda out, y: F.nll_loss(out.log_softmax(1), y)])
def test_outputs_that_are_one_per_class_have_it(loss):
    result = run(loss, 2, lr=0.03)
    x, y = binary_clients()[1]
    accuracy = (result.model(x).argmax(1) == y).double().mean().item()
    assert result.history[-1]["test_accuracy"] == accuracy > 0.8 and result.summary()["rounds_to_target"] is not None
    assert result.history[-1]["train_set_accuracy"] > 0.8


def test_labels_outside_the_outputs_are_no_classes():
    """Counts of 0 to 9, fitted through the first of three outputs."""
    x = torch.randn(40, 5)
    y = torch.arange(40) % 10
    options = {"rounds": 1, "participation": 1.0, "lr": 0.01, "loss": squares, "test": (x, y)}
    result = fed.run(torch.nn.Linear(5, 3), [(x, y)], fed.FedAvg(), **options)
    assert result.history[-1]["test_accuracy"] is None


def binary_accuracy(outputs, labels):
    return ((outputs[:, 0] > 0) == labels.bool()).double().mean()


def test_one_output_with_a_threshold_is_a_metric():
    result = run(logistic, metrics={"binary_accuracy": binary_accuracy})
    x, y = binary_clients()[1]
    accuracy = ((result.model(x)[:, 0] > 0) == y.bool()).double().mean().item()
    last = result.history[-1]
    assert last["test_binary_accuracy"] == accuracy > 0.8 and last["test_accuracy"] is None
    low, mean, high = (last[f"client_binary_accuracy_{name}"] for name in ("min", "mean", "max"))
    assert low <= mean <= high
    assert last["client_binary_accuracy_std"] > 0
    assert result.summary()["metrics"]["test_binary_accuracy"] == accuracy and result.summary()["validation"] == "prior"


class Accumulated:
    """A metric with the interface of torchmetrics."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.errors = self.records = 0

    def update(self, outputs, labels):
        self.errors += int((outputs.argmax(1) != labels).sum())
        self.records += len(labels)

    def compute(self):
        return torch.tensor(self.errors / self.records, dtype=torch.float64)


def test_functions_and_objects_are_over_all_and_over_clients():
    def share_of_class_1(outputs, labels):
        return labels.double().mean()

    result = run(
        "cross_entropy", 2, metrics={"error": Accumulated(), "ones": share_of_class_1}, client_test_split="iid",
        eval_every=4,
    )  # fmt: skip
    last, first = result.history[-1], result.history[0]
    assert last["test_error"] == pytest.approx(1 - last["test_accuracy"])
    assert last["client_error_mean"] == pytest.approx(1 - last["client_accuracy_mean"])
    assert last["client_error_std"] == pytest.approx(last["client_accuracy_std"])
    assert last["test_ones"] == binary_clients()[1][1].double().mean().item()
    assert first["test_error"] is None and first["client_error_mean"] is None
    assert result.history[3]["test_error"] is not None
    plain = run("cross_entropy", 2, client_test_split="iid", eval_every=4)
    assert all(
        np.array_equal(a.detach(), b.detach())
        for a, b in zip(result.model.parameters(), plain.model.parameters(), strict=True)
    )
    assert not [key for key in plain.history[-1] if "error" in key] and plain.summary()["metrics"] == {}


def test_a_metric_of_a_regression_has_no_clients_of_their_own_classes():
    x = torch.randn(40, 5)
    y = x.sum(1, keepdim=True)
    mae = {"mae": F.l1_loss}
    data = [(x[:10], y[:10]), (x[10:20], y[10:20])]
    options = {"rounds": 2, "participation": 1.0, "loss": "mse_loss", "test": (x[20:], y[20:]), "metrics": mae}
    result = fed.run(torch.nn.Linear(5, 1), data, fed.FedAvg(), **options)
    assert result.history[-1]["test_mae"] == pytest.approx(F.l1_loss(result.model(x[20:]), y[20:]).item())
    assert result.history[-1]["client_mae_mean"] is None
    sliced_record = fed.run(torch.nn.Linear(5, 1), data, fed.FedAvg(), **options, client_test_split="iid").history[-1]
    assert (
        sliced_record["client_mae_mean"] == pytest.approx(sliced_record["test_mae"])
        and sliced_record["client_mae_std"] > 0
    )


def test_the_command_names_metrics_and_reports_them(tmp_path: Path, monkeypatch, capsys) -> None:
    x, y = binary_clients(1, 60)[0][0]
    np.savez(tmp_path / "all.npz", x=x.numpy(), y=y.numpy())
    (tmp_path / "own.py").write_text(
        "import torch\n\n\ndef model(in_shape, classes):\n    return torch.nn.Linear(5, 1)\n\n\n"
        "def loss(out, y):\n    return torch.nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float())\n"
        "\n\ndef accuracy(out, y):\n    return ((out[:, 0] > 0) == y.bool()).double().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--data", "all.npz", "--clients", "3", "--split", "iid", "--model", "own.py:model", "--loss", "own.py:loss",
        "--rounds", "2",
    ]  # fmt: skip
    arguments += ["--participation", "1"]
    (tmp_path / "metrics.toml").write_text('[metrics]\nbinary_accuracy = "own.py:accuracy"\n')
    assert cli.main(["compare", "metrics.toml", "--algorithms", "fedavg,fedsam", *arguments, "--run-dir", "out"]) == 0
    assert "binary accuracy" in (tmp_path / "out" / "report.html").read_text()
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert 0 < runs["algorithms"]["fedsam"]["test_binary_accuracy"]["mean"] <= 1
    assert (tmp_path / "out" / "curve-test-binary-accuracy.png").exists()
