"""Whole runs: against a program that others would write, on real data, the same bits twice."""

import json
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

from fastsam import fed
from fastsam.fed.algorithms.base import Upload
from tests.helpers import oracle
from tests.helpers.fed_input import X, Y, start
from tests.helpers.fed_runs import same_bits, untimed_records
from tests.helpers.places import ROOT

KEYS = [
    "round", "lr", "clients", "samples", "steps", "train_loss", "test_loss", "test_accuracy", "client_accuracy_mean",
    "client_accuracy_std",
    "client_accuracy_min", "client_accuracy_max", "client_worst", "client_best", "megabytes_down", "megabytes_up",
    "backprops", "excluded",
    "outliers", "seconds_training", "seconds",
]  # fmt: skip


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout(0.1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10)
    )


@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.FedSAM(adaptive=True, rho=0.5), fed.MoFedSAM()], ids=repr)
def test_the_same_bits_twice(algorithm):
    """The bits do not depend on the number of threads or on torch's generator."""
    data, options = fed.digits(clients=10), {"rounds": 2, "participation": 0.4}
    threads, runs = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            runs.append(fed.run(cnn(), data, algorithm, **options))
            torch.rand(7)
    finally:
        torch.set_num_threads(threads)
    assert same_bits(runs[0].model, runs[1].model) and untimed_records(runs[0]) == untimed_records(runs[1])
    other_result = fed.run(cnn(), data, algorithm, seed=1, **options)
    assert not same_bits(runs[0].model, other_result.model)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "mofedsam")), "fedsam"]
)
def test_digits_are_learnt(name):
    algorithm = fed.algorithms.registry[name]() if name != "mofedsam" else fed.MoFedSAM(beta=0.5)
    records = []
    result = fed.run(
        oracle_mlp(), fed.digits(clients=20, alpha=1.0), algorithm, rounds=25, participation=0.5, lr=0.2, target=0.8,
        progress=records.append,
    )  # fmt: skip
    summary = result.summary()
    assert summary["accuracy_final"] > 0.85 and summary["rounds_to_target"] <= 25 and summary["validation"] == "prior"
    assert 0 < summary["client_accuracy_std"] < 0.3 and summary["backprops"] == (1 if name == "fedavg" else 2) * sum(
        r["steps"] for r in result.history
    )
    assert records == result.history and all(sorted(r) == sorted(KEYS) for r in records)
    assert json.loads(json.dumps(summary)) == summary


def oracle_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def test_numbers_of_other_types_give_the_same_bits():
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    plain = fed.run(model, clients, fed.FedSAM(rho=0.5), rounds=2, seed=3, lr=0.25, lr_decay=0.5)
    other_result = fed.run(
        model, clients, fed.FedSAM(rho=np.float32(0.5)), rounds=np.int64(2), seed=np.int32(3), lr=torch.tensor(0.25),
        lr_decay=np.float32(0.5),
    )  # fmt: skip
    assert same_bits(plain.model, other_result.model) and untimed_records(plain) == untimed_records(other_result)
    assert json.dumps(other_result.summary()["hyperparameters"]) == json.dumps(plain.summary()["hyperparameters"])


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "threads"])
def test_nothing_heavy_is_imported_in_a_round(executor):
    """Otherwise the first run of a process, often a baseline, would seem slower."""
    code = f"""
import sys
from tests.helpers import oracle
from fastsam import fed
known = []
def sampler(t, generator):
    known.append(set(sys.modules))
    return [0, 1]
fed.run(oracle.smooth_model(), oracle.ragged_clients(), fed.FedSAM(), rounds=2, executor={executor!r}, sampler=sampler)
print(len([m for m in known[1] - known[0] if m.startswith("torch.")]))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(process.stdout) < 50


def test_public_names():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in fed.__all__:
        assert getattr(fed, name).__doc__, f"fed.{name} has no docstring"
        assert re.search(rf"\b{name}\b", pages), f"fed.{name} stands on no page of docs/"
    with pytest.raises(AttributeError, match="no attribute 'FedBest'"):
        _ = fed.FedBest


class Noisy(fed.FedAvg):
    """Adds noise from torch's default generator to every upload."""

    def finish(self, server, client, results, round):
        state, upload = super().finish(server, client, results, round)
        noise = torch.zeros_like(results.delta)
        for view in round.layout.unflatten(noise).values():
            view.normal_()
        return state, Upload({"delta": upload.mean["delta"] + 0.01 * noise})


def test_what_an_algorithm_draws_after_a_client_does_not_depend_on_what_was_drawn_before(tmp_path):
    def train(rounds, num_drawn, algorithm=Noisy, **options):
        model, clients = oracle.smooth_model(), oracle.ragged_clients()
        torch.rand(num_drawn)
        return fed.run(model, clients, algorithm(), rounds=rounds, batch_size=5, executor="sequential", **options).model

    whole = train(4, 1)
    train(2, 2, run_dir=tmp_path / "run")
    assert same_bits(whole, train(4, 3, run_dir=tmp_path / "run", resume=True))
    assert oracle.difference(whole, train(4, 1, fed.FedAvg)) > 1e-4


# --- Several runs in threads of one process.


DROPS = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
PLAIN = nn.Linear(6, 3)


class Beside(fed.Callback):
    """Starts a second run in another thread, or in this one, in the middle of the first."""

    def __init__(self, model: nn.Module, thread: bool) -> None:
        self.model, self.thread, self.outcomes = model, thread, list[Any]()

    def on_round(self, run: Any, record: Any) -> None:
        if not self.thread:
            self._run()
            return
        thread = threading.Thread(target=self._run)
        thread.start()
        thread.join()

    def _run(self) -> None:
        try:
            self.outcomes.append(start(self.model))
        except ValueError as error:
            self.outcomes.append(error)


@pytest.mark.parametrize(("first", "second"), [(DROPS, PLAIN), (PLAIN, DROPS), (DROPS, DROPS)])
def test_runs_in_threads_of_which_one_draws(first: nn.Module, second: nn.Module) -> None:
    second_run, state = Beside(second, thread=True), torch.get_rng_state()
    result = start(first, callbacks=[second_run])
    assert "another fed.run is active in a thread of this process" in str(second_run.outcomes[0])
    assert same_bits(result.model, start(first).model) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("model", "thread"), [(PLAIN, True), (DROPS, False)])
def test_runs_that_may_be_together(model: nn.Module, thread: bool) -> None:
    second_run = Beside(model, thread)
    start(model, callbacks=[second_run])
    assert isinstance(second_run.outcomes[0], fed.Result)


def test_a_result_is_plotted() -> None:
    result = start(rounds=3, test=(X, Y))
    axes = result.plot()
    assert result.plot(axes) is axes and axes.get_ylabel() == "test accuracy"
    first, second = axes.lines
    assert list(first.get_xdata()) == [1, 2, 3] == list(second.get_xdata())
    assert list(first.get_ydata()) == [record["test_accuracy"] for record in result.history]
    assert first.get_label() == "FedAvg"
    other_axes = start(rounds=2).plot()
    assert other_axes is not axes and other_axes.get_ylabel() == "training loss of the active clients"
    assert len(other_axes.lines[0].get_xdata()) == 2
    for plotted in (axes, other_axes):
        pyplot.close(plotted.figure)
