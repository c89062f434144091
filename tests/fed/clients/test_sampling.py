"""Cohorts and seeds: functions of (seed, round), regression values, and user-defined samplers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed, ops
from fastsam.fed.clients import sampling
from fastsam.fed.clients.sampling import draw_present
from fastsam.fed.common import seeds
from tests.helpers import oracle
from tests.helpers.fed_rundir import records, start
from tests.helpers.fed_runs import same_bits


def draw_rounds(name, clients, participation, rounds, seed=0):
    sampler = sampling.make(name, clients, participation)
    return [sampling.draw(sampler, t, seed) for t in range(rounds)]


def test_regression():
    """The very clients: a change here changes every published run."""
    assert draw_rounds("bernoulli", 20, 0.2, 4) == [[4, 12, 19], [0, 1, 5, 9, 13], [4, 8, 9], [1, 3, 9, 16]]
    assert draw_rounds("fixed", 20, 0.2, 4) == [[6, 7, 8, 16], [1, 8, 10, 18], [6, 9, 10, 19], [0, 11, 16, 18]]
    assert seeds.derive(0, "sample", 0) == 6834760543676935646
    assert seeds.permutation(8, 1, "shuffle", 2).tolist() == [6, 4, 7, 1, 2, 5, 3, 0]


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["bernoulli", "fixed"]), st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 99),
    st.integers(0, 3),
)  # fmt: skip
def test_every_draw_is_valid_and_repeatable(name, clients, participation, round, seed):
    sampler = sampling.make(name, clients, participation)
    ids = sampling.draw(sampler, round, seed)
    assert ids == sorted(set(ids)) and ids and ids[0] >= 0 and ids[-1] < clients
    assert ids == sampling.draw(sampling.make(name, clients, participation), round, seed)
    if name == "fixed":
        assert len(ids) == max(1, int(participation * clients + 0.5))
    if participation == 1.0:
        assert len(ids) == clients


def test_bernoulli_has_the_right_mean_and_spread():
    counts = [len(ids) for ids in draw_rounds("bernoulli", 100, 0.1, 800)]
    assert 9.5 < np.mean(counts) < 10.5 and 2.5 < np.std(counts) < 3.5 and min(counts) >= 1
    members = np.bincount(np.concatenate(draw_rounds("bernoulli", 10, 0.3, 2000)), minlength=10)
    assert members.min() > 450 and members.max() < 750  # 600 are expected for each client


def test_a_participation_near_zero_still_ends():
    assert all(len(ids) == 1 for ids in draw_rounds("bernoulli", 10, 1e-9, 5))
    assert len({ids[0] for ids in draw_rounds("bernoulli", 10, 1e-9, 50)}) > 5
    generator = seeds.generator(0, "sample", 3)
    last = [torch.rand(10, generator=generator, dtype=torch.float64) for _ in range(100)][-1]
    assert draw_rounds("bernoulli", 10, 1e-9, 4)[3] == [int(last.argmin())]


def test_by_default_each_round_has_the_same_number_of_clients(tmp_path):
    history = start(tmp_path, clients=oracle.ragged_clients(sizes=(3,) * 20), participation=0.25, rounds=6).history
    assert [record["clients"] for record in history] == [5] * 6


def test_rounds_and_seeds_differ():
    a, b = draw_rounds("bernoulli", 50, 0.3, 20, seed=0), draw_rounds("bernoulli", 50, 0.3, 20, seed=1)
    assert len({tuple(x) for x in a + b}) == 40


def test_the_simulators_cohorts():
    """The counts of its first ten rounds, as its code gives them; the run's seed changes nothing."""
    assert [len(ids) for ids in draw_rounds("simulator", 100, 0.1, 10)] == [7, 7, 11, 11, 7, 11, 7, 7, 8, 10]
    assert [len(ids) for ids in draw_rounds("simulator", 200, 0.05, 10)] == [8, 8, 18, 7, 8, 10, 4, 8, 11, 11]
    assert draw_rounds("simulator", 100, 0.1, 1, seed=5) == [[4, 15, 33, 61, 69, 80, 92]]
    assert all(draw_rounds("simulator", 3, 0.01, 40))


def test_the_simulator_draws_with_the_next_seed_while_nobody_takes_part():
    result = draw_rounds("simulator", 5, 0.05, 60)
    redrawn = 0
    for t, ids in enumerate(result):
        seed = 20 + t
        while not (np.random.RandomState(seed).uniform(size=5) <= 0.05).any():
            seed += 1
        redrawn += seed > 20 + t
        assert ids == np.flatnonzero(np.random.RandomState(seed).uniform(size=5) <= 0.05).tolist()
    assert redrawn > 30
    # The client with the smallest draw, if a hundred seeds give no client.
    assert draw_rounds("simulator", 5, 1e-9, 2) == [
        [int(np.random.RandomState(20 + t + 99).uniform(size=5).argmin())] for t in (0, 1)
    ]


@pytest.mark.parametrize("kind", [list, tuple, set, np.array, torch.tensor, iter])
def test_a_callable_may_return_any_iterable(kind):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    result = fed.run(model, clients, fed.FedAvg(), rounds=2, sampler=lambda t, g: kind([3, t]))
    assert [r["samples"] for r in result.history] == [23 + 7, 23 + 16]


def test_a_callable_gets_a_generator_of_seed_and_round():
    records = {}

    def sampler(round, generator):
        records.setdefault(round, []).append(torch.rand((), generator=generator).item())
        return [0]

    for _ in range(2):
        fed.run(oracle.smooth_model(), oracle.ragged_clients(), fed.FedAvg(), rounds=2, sampler=sampler, seed=5)
    assert len(records[0]) == 2 and len(set(records[0])) == 1 and records[0] != records[1]


@settings(deadline=None)
@given(*[st.lists(st.one_of(st.integers(), st.text()), max_size=4)] * 2)
def test_seeds_depend_on_every_part(a, b):
    assert (seeds.derive(*a) == seeds.derive(*b)) == (repr(tuple(a)) == repr(tuple(b)))
    assert 0 <= seeds.derive(*a) < 2**63


# Test vectors of Random123 (kat_vectors, philox4x32): rounds, counter, key, result.
KNOWN = (
    (7, (0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (0xFFFFFFFF,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, (0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def test_philox_gives_the_published_numbers():
    for rounds, counter, key, expected in KNOWN:
        for count in (1, 5):
            result = seeds.philox(key, np.tile(np.array(counter, np.uint32)[:, None], count), rounds)
            assert result.T.tolist() == [list(expected)] * count


CLIENTS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 70)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(CLIENTS, st.integers(0, 3))
def test_an_order_is_a_function_of_its_client_alone(clients, epoch):
    numbers, sizes = zip(*clients, strict=True)
    all_orders = seeds.permutations(numbers, sizes, 1, "shuffle", epoch)
    assert all_orders.dtype == torch.int64 and all_orders.shape == (len(clients), max(sizes))
    for order, number, size in zip(all_orders, numbers, sizes, strict=True):
        assert sorted(order[:size].tolist()) == list(range(size))
        assert torch.equal(order[:size], seeds.permutations([number], [size], 1, "shuffle", epoch)[0])
    if sizes[0] > 20:
        assert not torch.equal(all_orders[0], seeds.permutations(numbers, sizes, 1, "shuffle", epoch + 1)[0])
        assert not torch.equal(all_orders[0], seeds.permutations([numbers[0] ^ 1], sizes[:1], 1, "shuffle", epoch)[0])


@pytest.mark.skipif(ops.native_orders() is None, reason="no compiled kernels")
@settings(deadline=None, max_examples=50)
@given(CLIENTS, st.sampled_from([(), (1, "shuffle", 2)]), st.data())
def test_compiled_orders_have_the_bits_of_numpys(clients, parts, data):
    """Orders, whole or shortened, at places of a common memory, with an offset."""
    lines, begin = [], 3
    for number, size in clients:
        kept = data.draw(st.integers(0, size))
        lines.append((number, size, kept, begin, 10 * number))
        begin += kept
    compiled, plain = torch.full((2, begin), -1).unbind()
    seeds.write_orders(compiled, lines, parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "native_orders", lambda: None)
        seeds.write_orders(plain, lines, parts)
    assert torch.equal(compiled, plain) and compiled[:3].tolist() == [-1] * 3


@pytest.mark.skipif(ops.native_orders() is None, reason="no compiled kernels")
def test_compiled_orders_that_do_not_fit():
    out = torch.zeros(9, dtype=torch.int64)
    for line in ((0, 9, 10, 0, 0), (0, -1, 0, 0, 0), (0, 9, 9, 1, 0), (0, 9, 9, -1, 0)):
        with pytest.raises(RuntimeError, match="client 0 must have an order"):
            seeds.write_orders(out, [line], (1,))


def test_orders_are_uniform():
    """Each of the 24 orders of four, 500 times of 12,000; chi-squared with 23 degrees of freedom is above 58 once in
    15,000 seeds."""
    orders = seeds.permutations(range(12_000), [4] * 12_000, "uniform")
    _, counts = torch.unique((orders * torch.tensor([64, 16, 4, 1])).sum(1), return_counts=True)
    assert len(counts) == 24 and float(((counts - 500) ** 2 / 500).sum()) < 58


def test_orders_under_another_default_device():
    expected = seeds.permutation(50, 1)
    with torch.device("meta"):
        assert torch.equal(seeds.permutation(50, 1), expected)


# --- Clients that come and go, and what each of them counts.


@pytest.mark.parametrize("sampler", ["bernoulli", "fixed"])
def test_where_all_are_there_nothing_changes(sampler, tmp_path):
    plain = start(tmp_path / "plain", sampler=sampler)
    same = start(tmp_path / "same", sampler=sampler, available=lambda t: range(5))
    assert same_bits(plain.model, same.model) and records(tmp_path / "plain") == records(tmp_path / "same")


@pytest.mark.parametrize(
    "available",
    [
        lambda t: [4, 1, 2], lambda t: {1, 2, 4}, lambda t: torch.tensor([1, 2, 4]),
        lambda t: [False, True, True, False, True], lambda t: np.array([0, 1, 1, 0, 1], bool),
    ],
)  # fmt: skip
def test_only_those_that_are_there_take_part(available, tmp_path):
    available_run = start(tmp_path / "a", participation=1.0, available=available)
    name_run = start(tmp_path / "b", sampler=lambda t, g: [1, 2, 4])
    assert same_bits(available_run.model, name_run.model) and records(tmp_path / "a") == records(tmp_path / "b")


def test_the_share_is_one_of_those_that_are_there():
    cohorts = [draw_present("fixed", lambda clients: 0.5, lambda t: range(t, 10), t, 10, 0) for t in range(9)]
    assert [len(cohort) for cohort in cohorts] == [5, 5, 4, 4, 3, 3, 2, 2, 1]
    assert all(min(cohort) >= t and cohort == sorted({*cohort}) for t, cohort in enumerate(cohorts))
    draws = [draw_present("bernoulli", lambda clients: 0.3, lambda t: range(0, 100, 2), t, 100, 0) for t in range(200)]
    assert all(i % 2 == 0 for cohort in draws for i in cohort)
    assert sum(map(len, draws)) / 200 == pytest.approx(15, abs=1)


def test_a_cohort_is_a_number_of_clients(tmp_path):
    count_run = start(tmp_path / "a", cohort=2, participation=0.2)
    assert [record["clients"] for record in count_run.history] == [2] * len(count_run.history)
    name_run = start(tmp_path / "b", participation=2 / 5, sampler="fixed")
    assert same_bits(count_run.model, name_run.model) and records(tmp_path / "a") == records(tmp_path / "b")
    for sampler, sizes in {"shuffled": {2, 1}, "bernoulli": {1, 2, 3, 4, 5}}.items():
        history = start(tmp_path / sampler, cohort=2, participation=0.2, sampler=sampler).history
        assert {record["clients"] for record in history} <= sizes
    present = start(tmp_path / "c", cohort=2, participation=0.2, available=lambda t: range(t + 1)).history
    assert [record["clients"] for record in present] == [min(2, t + 1) for t in range(len(present))]


def test_a_round_with_nobody_is_skipped_and_says_so(tmp_path):
    class Models(fed.Callback):
        def on_start(self, run):
            self.result = [run.model()]

        def on_round(self, run, record):
            self.result.append(run.model())

    def available(t):
        return [] if t in (0, 2) else [0, 3]

    models = Models()
    options = {"available": available, "algorithm": fed.SCAFFOLD(), "buffers": None, "server_lr": lambda t: 1.0}
    result = start(tmp_path / "run", rounds=4, callbacks=[models], **options)
    assert [same_bits(a, b) for a, b in zip(models.result, models.result[1:])] == [True, False, True, False]
    skipped_record, next_record = result.history[2], result.history[1]
    assert [r.get("skipped") for r in result.history] == ["no client was available", None] * 2
    assert (skipped_record["clients"], skipped_record["steps"], skipped_record["train_loss"]) == (0, 0, None)
    assert skipped_record["test_loss"] == next_record["test_loss"] and {*next_record} == {*skipped_record} - {"skipped"}
    assert result.summary()["rounds"] == 4 and result.summary()["megabytes"] > 0
    # Killed after a skipped round, and resumed.
    start(tmp_path / "again", rounds=3, **options)
    resumed_result = start(tmp_path / "again", rounds=4, resume=True, **options)
    assert same_bits(resumed_result.model, result.model) and records(tmp_path / "again") == records(tmp_path / "run")


def test_weights_of_the_clients_own(tmp_path):
    sizes = [len(y) for _, y in oracle.ragged_clients()]
    samples = start(tmp_path / "samples", weighting="samples")
    for i, weighting in enumerate((sizes, np.array(sizes), sizes.__getitem__)):
        assert same_bits(start(tmp_path / f"{i}", weighting=weighting).model, samples.model)
    uniform = start(tmp_path / "uniform")
    assert same_bits(start(tmp_path / "ones", weighting=lambda i: 4).model, uniform.model)
    assert not same_bits(uniform.model, samples.model)
    with pytest.raises(fed.RunDirectoryError, match="another weighting"):
        start(tmp_path / "0", weighting=[*sizes[:-1], 1], resume=True)
