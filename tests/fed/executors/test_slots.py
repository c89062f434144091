"""A fixed number of rows for any number of clients; a bad client never poisons the round."""

import gc
from dataclasses import replace

import pytest
import torch

from fastsam import fed
from fastsam.fed.clients import sampling
from fastsam.fed.loop import cohort
from fastsam.fed.loop.cohort import Cohort
from fastsam.fed.stages.base import ClientUploads
from fastsam.fed.stages.clip import shorten_
from fastsam.fed.update.results import ClientResults
from tests.helpers import oracle
from tests.helpers.fed_runs import FLOAT, fixed_linear

EXECUTORS = [("sequential", None), ("threads", 3), ("vmap", 8)]


def peak_of_vectors(monkeypatch, clients, executor, slots):
    """The most rows `[row_size]` or `[rows, row_size]` that were alive at once, in rows, looked at four times in a
    round."""
    counts, calls, original = [], [], Cohort.finish

    def finish(self, results):
        original(self, results)
        old_count = len(calls)
        calls.extend(results.client_ids)
        if len(calls) // (clients // 4) > old_count // (clients // 4):
            stride = results.delta.shape[-1]
            result = [
                t for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() <= 2 and t.shape[-1:] == (stride,)
            ]
            distinct = {t.untyped_storage().data_ptr(): t for t in result}.values()
            counts.append(sum(t.untyped_storage().nbytes() for t in distinct))

    monkeypatch.setattr(Cohort, "finish", finish)
    x, y = oracle.ragged_clients(FLOAT, (1,))[0]
    model = torch.nn.Sequential(torch.nn.Linear(6, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))
    gc.collect()
    fed.run(model, [(x, y)] * clients, fed.FedSAM(), rounds=1, participation=1.0, executor=executor, slots=slots)
    monkeypatch.undo()
    return max(counts)


@pytest.mark.parametrize(
    ("clients", "executor", "slots"),
    [(100, "threads", 2), *(pytest.param(10_000, *case, marks=pytest.mark.slow) for case in EXECUTORS)],
)
def test_memory_is_bounded_by_slots_and_not_by_clients(monkeypatch, executor, slots, clients):
    """Ten thousand stateless clients cost what twenty do."""
    small_count, large_count = (peak_of_vectors(monkeypatch, n, executor, slots) for n in (20, clients))
    # The system decides the number of rows between the threads at any moment.
    assert large_count <= (1.5 if executor == "threads" else 1.1) * small_count


def test_the_longest_clients_come_first_where_clients_train_at_once(monkeypatch):
    orders = {}
    for executor, slots in EXECUTORS:
        records, original = [], Cohort.tasks

        def tasks(self, *args, original=original, records=records):
            for task in original(self, *args):
                records.append(task.work.samples)
                yield task

        monkeypatch.setattr(Cohort, "tasks", tasks)
        data = oracle.ragged_clients(FLOAT, (7, 16, 1, 23, 12))
        options = {"rounds": 1, "participation": 1.0, "executor": executor, "slots": slots and 3}
        fed.run(oracle.smooth_model(FLOAT), data, fed.FedAvg(), **options)
        monkeypatch.undo()
        orders[executor] = records
    # Stacked clients that begin together are in the order of their partial batches.
    assert orders == {"sequential": [7, 16, 1, 23, 12], "threads": [23, 16, 12, 7, 1], "vmap": [23, 12, 16, 1, 7]}


def test_how_many_clients_a_round_is_likely_to_have():
    assert sampling.likely("fixed", 100, 0.2) == 20
    assert sampling.likely("bernoulli", 100, 0.2) == 28
    assert sampling.likely("bernoulli", 100, 1.0) == sampling.likely(lambda t, g: [0], 100, 0.2) == 100


# --- bad clients ---


def train(algorithm=None, clients=6, **options):
    data = [(x.clamp(-3, 3), y) for x, y in oracle.ragged_clients(FLOAT, (9,) * clients)]
    base = {"rounds": 1, "participation": 1.0, "batch_size": 4, "executor": "sequential"}
    return fed.run(fixed_linear(), data, algorithm or fed.FedSAM(), **(base | options))


@pytest.mark.parametrize("name", ["delta", "gradient", "norms"])
def test_a_client_with_an_infinite_result_is_found_by_its_row(name):
    good_rows, bad_rows = torch.ones(3, 4), torch.ones(3, 4)
    bad_rows[1, 1], bad_rows[2, 3] = float("nan"), float("inf")
    outputs = {"gradient": good_rows, "norms": good_rows[:, :1]}
    results = ClientResults([5, 6, 7], good_rows, [1] * 3, [1] * 3, torch.zeros(3), [1] * 3, outputs=outputs)
    uploads = ClientUploads({}, results, {}, {}, {}, {}, {"loss": [0.0] * 3}, None, [1] * 3)
    assert cohort._nonfinite_clients(uploads) == {}
    bad_rows = bad_rows.sum(1, keepdim=True) if name == "norms" else bad_rows
    broken = {"delta": bad_rows} if name == "delta" else {"outputs": {**outputs, name: bad_rows}}
    broken_value = replace(uploads, results=replace(results, **broken))
    reason = f"its {name} is not finite"
    assert cohort._nonfinite_clients(broken_value) == {1: reason, 2: reason}
    broken_upload = replace(broken_value, mean={"x": bad_rows})
    assert cohort._nonfinite_clients(broken_upload) == {}  # it is checked when it is added


# --- the largest displacement ---


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e25])
def test_shortened_where_float32_holds_no_squares(size):
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]]) * size
    original = x.clone()
    assert shorten_(x, size) == pytest.approx([5 * size, 0.5 * size], rel=1e-5)
    torch.testing.assert_close(x[0].double(), original[0].double() / 5, rtol=1e-5, atol=0)
    assert torch.equal(x[1], original[1])


def test_control_variates_follow_the_shortened_displacement():
    """One client, one step: with the displacement cut to a length L, SCAFFOLD's c_i has the length L/(lr*K)."""
    variates = {}

    class Seen(fed.SCAFFOLD):
        def finish(self, server, client, results, round):
            state, upload = super().finish(server, client, results, round)
            variates.update(state)
            return state, upload

    train(Seen(), clients=1, batch_size=9, lr=0.1, privacy=fed.Privacy(clip=1e-3))
    (c,) = variates.values()
    assert float(c.norm()) == pytest.approx(1e-3 / 0.1, rel=1e-5)
