"""Clients that end together are closed together: the same bits as one by one, and nothing of a bad one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from fastsam.fed.clients import packed_samples as stores
from fastsam.fed.clients.packed_samples import pack_samples as pack_pairs
from fastsam.fed.sums.fixed_point import FixedPointAggregate
from fastsam.fed.update.results import ClientResults
from tests.helpers import oracle
from tests.helpers.fed_runs import FLOAT, digest, fixed_linear, overflow
from tests.helpers.sums import add_client_

SIZES = (9, 9, 4, 9, 9, 17, 9)


def run(algorithm, bad_clients=(), **options):
    data = oracle.ragged_clients(FLOAT, SIZES)
    data = [(overflow(x) if i in bad_clients else x, y) for i, (x, y) in enumerate(data)]
    base = {"rounds": 3, "participation": 0.8, "batch_size": 4, "executor": "vmap", "slots": 4}
    return fed.run(fixed_linear(), data, algorithm, **(base | options))


# --- sums ---


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_group_adds_what_its_good_clients_add_one_by_one(data):
    n, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    values = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, 1e30]))
    lists = [data.draw(st.lists(values, min_size=size, max_size=size)) for _ in range(n)]
    rows = torch.tensor(lists, dtype=torch.float64).to(dtype)
    weights = data.draw(st.lists(st.sampled_from([1, 7, 30]), min_size=n, max_size=n))
    losses = data.draw(st.lists(st.sampled_from([0.5, 2.0, math.nan]), min_size=n, max_size=n))
    group_sum, single_sums = (FixedPointAggregate(n, 30) for _ in range(2))
    first = torch.zeros(size, dtype=dtype)
    for aggregate in (group_sum, single_sums):  # the sum exists for any number of accepted clients
        assert add_client_(aggregate, 1, {"delta": first}, {"plain": first}, {"loss": 0.0}) is None
    known_problems = {0: "it is known to be bad"} if data.draw(st.booleans()) else {}
    problems = group_sum.add_rows(weights, {"delta": rows}, {"plain": rows}, {"loss": losses}, known_problems)
    assert known_problems.items() <= problems.items()
    for i, (row, weight, loss) in enumerate(zip(rows, weights, losses, strict=True)):
        if i not in known_problems:
            assert add_client_(single_sums, weight, {"delta": row}, {"plain": row}, {"loss": loss}) == problems.get(i)
    assert torch.equal(group_sum.mean("delta"), single_sums.mean("delta"))
    assert torch.equal(group_sum.sum("plain"), single_sums.sum("plain"))
    assert (group_sum.num_clients, group_sum.weight) == (single_sums.num_clients, single_sums.weight)
    assert group_sum.scalar("loss") == single_sums.scalar("loss")


# --- runs ---


def test_steps_are_asked_for_together_as_many_as_there_are_slots(monkeypatch):
    sizes, original = [], fed.SCAFFOLD.local_step

    def local_step(self, server, client, round):
        sizes.append(len(client["c_i"]))
        return original(self, server, client, round)

    monkeypatch.setattr(fed.SCAFFOLD, "local_step", local_step)
    run(fed.SCAFFOLD(), rounds=2, participation=1.0)
    assert sizes == [1, 1, 4, 3]  # before the first round, in it, and seven clients in four slots
    sizes.clear()
    run(fed.SCAFFOLD(), rounds=2, participation=1.0, executor="sequential")
    assert sizes == [1] * (2 + len(SIZES))


class Mixed(fed.FedAvg):
    """States that hold other things after other rounds: the clients of a group are then not alike."""

    def finish(self, server, client, results, round):
        self.records.append((sorted(client), len(results.client_ids)))
        old_states = {name: t.clone() for name, t in client.items()} | {f"round {round.index}": results.delta}
        return old_states, fed.Upload(mean={"delta": results.delta})


def test_clients_of_a_group_whose_states_are_not_alike_are_closed_apart():
    Mixed.records = []
    result = run(Mixed(), slots=8, participation=0.6, rounds=4)
    assert {len(names) for names, _ in Mixed.records} >= {0, 1, 2} and max(n for _, n in Mixed.records) > 1
    assert digest(result) == digest(run(fed.FedAvg(), slots=8, participation=0.6, rounds=4))


def test_some_of_a_group_have_memory_of_their_own():
    start, mu = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    options = [{0: None}, {}]
    results = ClientResults(
        [4, 7], start, [2, 3], [2, 3], torch.tensor([0.5, 1.5]), [8, 9], outputs={"mu": mu}, snapshots=options
    )
    second = results.take([1])
    assert torch.equal(results.column([1.0, -2.0]), torch.tensor([[1.0], [-2.0]]))
    assert results.column([0, 1]).dtype == FLOAT
    start.zero_(), mu.zero_(), results.losses.zero_()
    assert second.delta.tolist() == [[3, 4, 5]] and second.outputs["mu"].tolist() == [[1, 1, 1]]
    assert (second.client_ids, second.num_steps, second.num_samples, second.snapshots) == ([7], [3], [9], [{}])
    assert second.losses.tolist() == [1.5] and second.buffers is None


# --- steps that clients share ---


class Counted(fed.FedAvg):
    calls: list[int]

    def local_step(self, server, client, round):
        self.calls.append(round.index)
        return super().local_step(server, client, round)


class CountedStates(fed.SCAFFOLD):
    calls: list[tuple[int, bool]]

    def local_step(self, server, client, round):
        self.calls.append((round.index, bool(client["c_i"].any())))
        return super().local_step(server, client, round)


@pytest.mark.parametrize(("executor", "calls"), [("sequential", len(SIZES)), ("vmap", 2)])
def test_clients_of_one_state_share_their_step(executor, calls):
    Counted.calls = []
    run(Counted(), executor=executor)
    assert Counted.calls == [0, 0, 0, 1, 2]  # for one row and for two before the first round, then once a round
    CountedStates.calls = []
    run(CountedStates(), executor=executor, participation=1.0, rounds=2)
    assert CountedStates.calls == [*[(0, False)] * 3, *[(1, True)] * calls]


# --- the store ---


def test_without_one_shape_or_with_too_much_there_is_no_store(monkeypatch):
    pairs = [(torch.randn(4, 3), torch.zeros(4)), (torch.randn(4, 2), torch.zeros(4))]
    views, store = pack_pairs(pairs)
    assert store is None and views[0][0] is pairs[0][0]
    assert pack_pairs([(torch.randn(4, 0), torch.zeros(4))])[1] is None
    monkeypatch.setattr(stores, "MAX_BYTES", 2 * 16 * 16 - 1)  # two clients with 16 samples of 16 bytes
    assert pack_pairs([pairs[0]] * 2)[1] is None
    monkeypatch.setattr(stores, "MAX_BYTES", 2 * 16 * 16)
    assert pack_pairs([pairs[0]] * 2)[1] is not None
