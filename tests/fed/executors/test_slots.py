"""A fixed number of rows for any number of clients; a bad client never poisons the round."""

import gc
import logging
from dataclasses import replace

import pytest
import torch

from fastsam import fed
from fastsam.fed.clients import sampling
from fastsam.fed.loop import cohort
from fastsam.fed.loop.cohort import Cohort
from fastsam.fed.stages.clip import shorten_
from fastsam.fed.step.local_update import ClientResults
from tests.helpers import oracle
from tests.helpers.fed_runs import FLOAT, digest

EXECUTORS = [("sequential", None), ("threads", 3), ("vmap", 8)]


def peak_of_vectors(monkeypatch, clients, executor, slots):
    """The most rows `[row_size]` or `[rows, row_size]` that were alive at once, in rows, looked at four times in a
    round."""
    counts, calls, own = [], [], Cohort.finish

    def finish(self, results):
        own(self, results)
        before = len(calls)
        calls.extend(results.client_ids)
        if len(calls) // (clients // 4) > before // (clients // 4):
            stride = results.delta.shape[-1]
            found = [
                t for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() <= 2 and t.shape[-1:] == (stride,)
            ]
            distinct = {t.untyped_storage().data_ptr(): t for t in found}.values()
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
    [(100, "threads", 2), *(pytest.param(10_000, *each, marks=pytest.mark.slow) for each in EXECUTORS)],
)
def test_memory_is_bounded_by_slots_and_not_by_clients(monkeypatch, executor, slots, clients):
    """Ten thousand stateless clients cost what twenty do."""
    few, many = (peak_of_vectors(monkeypatch, n, executor, slots) for n in (20, clients))
    # The system decides the number of rows between the threads at any moment.
    assert many <= (1.5 if executor == "threads" else 1.1) * few


def test_the_longest_clients_come_first_where_clients_train_at_once(monkeypatch):
    orders = {}
    for executor, slots in EXECUTORS:
        seen, own = [], Cohort.tasks

        def tasks(self, *args, own=own, seen=seen):
            for task in own(self, *args):
                seen.append(len(task.y))
                yield task

        monkeypatch.setattr(Cohort, "tasks", tasks)
        data = oracle.ragged_clients(FLOAT, (7, 16, 1, 23, 12))
        options = {"rounds": 1, "participation": 1.0, "executor": executor, "slots": slots}
        fed.run(oracle.smooth_model(FLOAT), data, fed.FedAvg(), **options)
        monkeypatch.undo()
        orders[executor] = seen
    assert orders == {"sequential": [7, 16, 1, 23, 12], "threads": [23, 16, 12, 7, 1], "vmap": [23, 16, 12, 7, 1]}


def test_how_many_clients_a_round_is_likely_to_have():
    assert sampling.likely("fixed", 100, 0.2) == 20
    assert sampling.likely("bernoulli", 100, 0.2) == 28
    assert sampling.likely("bernoulli", 100, 1.0) == sampling.likely(lambda t, g: [0], 100, 0.2) == 100


# --- bad clients ---


def poisoned(count=1, clients=6):
    """Clients of finite samples; the first `count` of them overflow in the first layer."""
    data = oracle.ragged_clients(FLOAT, (9,) * clients)
    return [(x.clamp(-3, 3) * 1e38 if i < count else x, y) for i, (x, y) in enumerate(data)]


def train(executor="sequential", slots=None, count=1, algorithm=None, clients=6, **options):
    model = torch.nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-2, 2, 18).view(3, 6))
        model.bias.zero_()
    base = {"rounds": 2, "participation": 1.0, "batch_size": 4, "executor": executor, "slots": slots}
    return fed.run(model, poisoned(count, clients), algorithm or fed.FedSAM(), **(base | options))


@pytest.mark.parametrize(("executor", "slots"), EXECUTORS)
def test_a_bad_client_is_excluded_and_named_and_the_round_goes_on(caplog, executor, slots):
    with caplog.at_level(logging.WARNING, logger="fastsam.fed"):
        result = train(executor, slots, algorithm=fed.SCAFFOLD())
    assert [r["excluded"][0]["client"] for r in result.history] == [0, 0]
    assert any("client 0 is excluded: " in m and "not finite" in m for m in caplog.messages)
    # a model that a round with a bad client left behind still trains
    good = fed.run(train(rounds=1).model, oracle.ragged_clients(FLOAT, (9,)), fed.FedAvg(), rounds=1, participation=1.0)
    assert all(torch.isfinite(p).all() for m in (result.model, good.model) for p in m.parameters())


def test_excluded_clients_leave_the_same_bits_behind_in_every_exact_executor():
    assert len({digest(train(e, s, algorithm=fed.SCAFFOLD())) for e, s in EXECUTORS[:2]}) == 1


def test_too_many_excluded_clients_stop_the_run():
    assert len(train(count=3, max_excluded=0.5).history) == 2
    words = "round 1: 3 of 6 active clients were excluded, more than max_excluded=0.4 allows .client 0: .* not finite"
    with pytest.raises(RuntimeError, match=words):
        train(count=3, max_excluded=0.4)
    with pytest.raises(RuntimeError, match="all 6 active clients were excluded"):
        train(count=6)


@pytest.mark.parametrize("name", ["delta", "gradient", "dual"])
def test_everything_that_a_row_leaves_behind_is_looked_at(name):
    good, bad = torch.ones(3, 4), torch.ones(3, 4)
    bad[1, 1], bad[2, 3] = float("nan"), float("inf")
    results = ClientResults([5, 6, 7], good, [1] * 3, [1] * 3, torch.zeros(3), [1] * 3, gradient=good, dual=good)
    assert cohort._nonfinite_fields(results, []) == {}
    broken = replace(results, **{name: bad})
    assert cohort._nonfinite_fields(broken, []) == {1: f"its {name} is not finite", 2: f"its {name} is not finite"}
    assert cohort._nonfinite_fields(broken, [bad]) == {}  # it is checked when it is added


# --- the largest displacement ---


class Norms(fed.FedAvg):
    seen: list[float]

    def finish_client(self, server, client, results, round):
        Norms.seen.extend(float(row.norm()) for row in results.delta)
        return super().finish_client(server, client, results, round)


def test_clipping_shortens_long_displacements_and_no_others():
    Norms.seen = []
    train(count=0, algorithm=Norms(), rounds=1)
    free = Norms.seen
    limit = sorted(free)[3]
    Norms.seen = []
    train(count=0, algorithm=Norms(), rounds=1, privacy=fed.Privacy(clip=limit))
    assert Norms.seen == pytest.approx([min(n, limit) for n in free], rel=1e-5)
    assert [a == b for a, b in zip(Norms.seen, free, strict=True)].count(True) >= 3


def test_shortened():
    x = torch.tensor([[3.0, 4.0], [0.5, 0.0], [float("inf"), 1.0]])
    longest, before = x[:2], x.clone()
    assert shorten_(longest, 5.0) == [5.0, 0.5] and torch.equal(x, before)
    shorten_(x, 1.0)
    torch.testing.assert_close(x[0], before[0] / 5, rtol=1e-5, atol=0)
    assert float(x[0].double().norm()) <= 1.0 and torch.equal(x[1], before[1])
    assert not torch.isfinite(x[2]).all()
    alone = before[2:].clone()
    shorten_(alone, 1.0)
    assert not torch.isfinite(alone).all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e25])
def test_shortened_where_float32_holds_no_squares(size):
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]]) * size
    before = x.clone()
    assert shorten_(x, size) == pytest.approx([5 * size, 0.5 * size], rel=1e-5)
    torch.testing.assert_close(x[0].double(), before[0].double() / 5, rtol=1e-5, atol=0)
    assert torch.equal(x[1], before[1])


def test_control_variates_follow_the_shortened_displacement():
    """One client, one step: with the displacement cut to a length L, SCAFFOLD's c_i has the length L/(lr*K)."""
    kept = {}

    class Seen(fed.SCAFFOLD):
        def finish_client(self, server, client, results, round):
            state, upload = super().finish_client(server, client, results, round)
            kept.update(state)
            return state, upload

    train(count=0, clients=1, algorithm=Seen(), rounds=1, batch_size=9, lr=0.1, privacy=fed.Privacy(clip=1e-3))
    (c,) = kept.values()
    assert float(c.norm()) == pytest.approx(1e-3 / 0.1, rel=1e-5)


def test_the_log_names_a_few_and_counts_the_rest(caplog):
    with caplog.at_level(logging.WARNING, logger="fastsam.fed"):
        train(count=5, rounds=1)
    named = [m for m in caplog.messages if "is excluded" in m]
    assert len(named) == 3 and "round 1: 5 of 6 clients are excluded" in caplog.messages
