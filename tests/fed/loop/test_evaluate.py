"""Test accuracy and its spread over clients."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.samples import as_samples
from fastsam.fed.loop.evaluate import Evaluator, client_slices
from fastsam.fed.rundir.result import to_target
from tests.helpers import oracle

CPU = torch.device("cpu")


class Oracle(torch.nn.Module):
    """Answers the class that the first feature names; wrong where the second is 1."""

    def forward(self, x):
        answer = (x[:, 0].long() + x[:, 1].long()) % 3
        return 10 * F.one_hot(answer, 3).to(x.dtype)


def population(labels, clients, wrong_samples=(), priors=None):
    y = torch.tensor(labels)
    x = torch.stack([y.float(), torch.zeros(len(y))], dim=1)
    x[list(wrong_samples), 1] = 1.0
    return Population(PairClients(clients), CPU, as_samples((x, y)), priors=priors)


def client(*labels):
    return torch.zeros(len(labels), 2), torch.tensor(labels)


def test_accuracy_and_loss_by_hand():
    people = population([0, 1, 2, 0, 1, 2, 0, 1], [client(0)], wrong_samples=[1, 4, 6])
    got = Evaluator(F.cross_entropy, people, True, "shared", 0)(Oracle())
    loss = math.log(1 + 2 * math.exp(-10))
    assert got["test_accuracy"] == 5 / 8
    assert got["test_loss"] == pytest.approx((5 * loss + 3 * (10 + loss)) / 8, rel=1e-6)
    assert [got[f"client_accuracy_{k}"] for k in ("mean", "std", "min", "max")] == [5 / 8, 0, 5 / 8, 5 / 8]
    assert got["client_worst"] is None and got["client_best"] is None  # all are validated on the same


def test_prior_follows_each_clients_own_classes():
    """A client that holds one class is validated on that class; the spread is the population's."""
    labels = [0] * 10 + [1] * 10 + [2] * 10
    people = population(labels, [client(0, 0), client(1), client(2, 2, 2)], wrong_samples=range(10))
    slices = client_slices("prior", people, seed=0)
    assert [{labels[j] for j in s} for s in slices] == [{0}, {1}, {2}] and [len(s) for s in slices] == [10, 10, 10]
    got = Evaluator(F.cross_entropy, people, True, "prior", 0)(Oracle())
    assert got["client_accuracy_mean"] == pytest.approx(2 / 3)
    assert got["client_accuracy_std"] == pytest.approx(np.std([0, 1, 1]))
    assert (got["client_accuracy_min"], got["client_accuracy_max"]) == (0, 1)
    assert got["test_accuracy"] == pytest.approx(2 / 3)


def test_the_worst_and_the_best_client_are_named_even_when_others_have_no_sample():
    """Client 0 has no class of the test set; 1 and 3 are wrong, 2 and 4 right: the first of each is named."""
    people = population(
        [0] * 10 + [1] * 10, [client(2), client(0), client(1), client(0), client(1)], wrong_samples=range(10)
    )
    got = Evaluator(F.cross_entropy, people, True, "prior", 0)(Oracle())
    assert (got["client_worst"], got["client_best"]) == (1, 2)
    assert (got["client_accuracy_min"], got["client_accuracy_max"]) == (0, 1)


def test_clients_whose_classes_the_test_set_lacks():
    people = population([0, 1, 0, 1], [client(2, 2), client(0, 2)], wrong_samples=[1, 3])
    assert [len(s) for s in client_slices("prior", people, 0)] == [0, 2]
    got = Evaluator(F.cross_entropy, people, True, "prior", 0)(Oracle())
    assert (got["test_accuracy"], got["client_accuracy_mean"], got["client_accuracy_std"]) == (0.5, 1.0, 0.0)
    nobody = Evaluator(F.cross_entropy, population([0, 1], [client(2)]), True, "prior", 0)(Oracle())
    assert nobody["test_accuracy"] == 1.0 and nobody["client_accuracy_mean"] is None


def test_iid_slices_share_the_test_set():
    slices = client_slices("iid", population([0, 1, 2] * 7, [client(0)] * 4), seed=3)
    assert sorted(len(s) for s in slices) == [5, 5, 5, 6]
    assert sorted(np.concatenate(slices)) == list(range(21))
    small_count = client_slices("iid", population([0, 1], [client(0)] * 5), seed=3)
    assert [len(s) for s in small_count] == [1] * 5 and set(np.concatenate(small_count)) == {0, 1}


@pytest.mark.parametrize("mode", ["prior", "iid"])
def test_slices_are_functions_of_the_seed(mode):
    people = population([0, 1, 2] * 20, [client(0, 1), client(1, 2)])
    a, b, c = (np.concatenate(client_slices(mode, people, s)) for s in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def run(algorithm=None, **options):
    clients, test = oracle.ragged_clients(), oracle.ragged_clients(sizes=(40,), seed=9)[0]
    return fed.run(oracle.smooth_model(), clients, algorithm or fed.FedAvg(), **{"test": test, "rounds": 5, **options})


def test_eval_every_measures_those_rounds_and_the_last():
    history = run(eval_every=2).history
    assert [r["round"] for r in history if r["test_accuracy"] is not None] == [2, 4, 5]
    assert [r["test_loss"] is None for r in history] == [True, False, True, False, False]
    full = run().history
    assert [full[i]["test_accuracy"] for i in (1, 3, 4)] == [history[i]["test_accuracy"] for i in (1, 3, 4)]


class StopAt:
    """A callback that stops the run after some rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round(self, run, record):
        if record["round"] == self.rounds:
            raise fed.Stop("enough")


@pytest.mark.parametrize("options", [{}, {"local_parameters": "2", "metrics": {"errors": lambda out, y: 0.5}}])
def test_a_run_that_stops_between_evaluations_is_evaluated_at_the_end(tmp_path, options):
    """The last record of the result has the evaluation. The log keeps its records, so that the run can be resumed."""
    options |= {"eval_every": 4, "callbacks": [StopAt(6)], "run_dir": tmp_path / "run", "rounds": 9}
    stopped, full = run(**options), run(**options | {"eval_every": 1, "callbacks": [], "run_dir": None, "rounds": 6})
    without_time = [
        {key: value for key, value in result.history[-1].items() if not key.startswith("seconds")}
        for result in (stopped, full)
    ]
    assert without_time[0] == without_time[1] and len(stopped.history) == 6
    assert stopped.summary()["accuracy_final"] == full.summary()["accuracy_final"] is not None
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in log if record["test_loss"] is not None] == [4]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_loss_final"] is not None
    resumed = run(**options | {"callbacks": [], "resume": True})
    assert [r["round"] for r in resumed.history if r["test_loss"] is not None] == [4, 8, 9]
    again = run(**options | {"callbacks": [], "resume": True, "eval_every": 4, "rounds": 9})
    assert again.history == resumed.history


def test_a_finished_run_that_is_resumed_without_further_rounds_is_evaluated(tmp_path):
    options = {"eval_every": 4, "run_dir": tmp_path / "run"}
    run(**options, rounds=9, callbacks=[StopAt(6)])
    result = run(**options, rounds=6, resume=True)
    assert result.history[-1]["test_loss"] == run(rounds=6).history[-1]["test_loss"]


def test_summary():
    result = run(rounds=12, target=0.3, lr=0.5)
    accuracies = [r["test_accuracy"] for r in result.history]
    summary = result.summary()
    assert summary["accuracy_final"] == accuracies[-1] and summary["accuracy_best"] == max(accuracies)
    assert summary["accuracy_last10"] == pytest.approx(np.mean(accuracies[-10:]))
    assert summary["rounds_to_target"] == next(i + 1 for i, a in enumerate(accuracies) if a >= 0.3)
    assert run(target=1.0, rounds=2).summary()["rounds_to_target"] is None
    assert summary["validation"] == "prior" and summary["parameters"] == 73 and summary["algorithm"] == "FedAvg"
    assert summary["megabytes"] == pytest.approx(sum(2 * r["clients"] for r in result.history) * 73 * 8 / 1e6)
    assert summary["backprops"] == sum(r["steps"] for r in result.history)
    rounds_to_target = result.history[: summary["rounds_to_target"]]
    assert summary["megabytes_to_target"] == pytest.approx(
        sum(2 * r["clients"] for r in rounds_to_target) * 73 * 8 / 1e6
    )
    assert summary["seconds_to_target"] == pytest.approx(sum(r["seconds_training"] for r in rounds_to_target))
    assert all(0 < r["seconds_training"] < r["seconds"] for r in result.history)
    assert summary["client_worst"] == result.history[-1]["client_worst"] is not None and summary["measures"] == {}
    assert run(target=1.0, rounds=2).summary()["megabytes_to_target"] is None


def test_memory_is_what_is_kept_and_what_a_step_works_with():
    """SCAFFOLD keeps w and c on the server and c_i for every client that took part: 73 numbers each, in rows of 256."""
    result = run(fed.SCAFFOLD(), rounds=2, participation=1.0).summary()
    assert result["state_megabytes"] == pytest.approx((2 + 5) * 256 * 8 / 1e6)
    assert result["client_megabytes"] == pytest.approx(3 * 73 * 8 / 1e6)  # w, a gradient, q


def test_without_a_test_set_nothing_is_measured():
    result = run(test=None)
    assert all(r["test_loss"] is None and r["client_accuracy_mean"] is None for r in result.history)
    assert result.summary()["accuracy_final"] is None and result.summary()["validation"] is None


def test_to_target_counts_the_round_that_reaches_it_exactly():
    seconds, accuracies = (1.0, 2.0, 4.0, 8.0), (0.25, None, 0.5, 0.75)
    history = [
        {
            "round": i, "test_accuracy": a, "seconds": 100.0, "seconds_training": s, "megabytes_down": 1.0,
            "megabytes_up": s,
        }
        for i, (a, s) in enumerate(zip(accuracies, seconds, strict=True), 1)
    ]  # fmt: skip
    expected = {"rounds_to_target": 3, "seconds_to_target": 7.0, "megabytes_to_target": 10.0}
    assert to_target(history, 0.5) == expected
    for target in (0.76, None):
        assert to_target(history, target) == dict.fromkeys(expected)
