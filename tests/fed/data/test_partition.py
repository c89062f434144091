"""Splits: the published procedures, regression values, and messages for bad input."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam.fed import data
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.common import seeds
from fastsam.fed.data import dealing, partition
from fastsam.fed.loop.evaluate import client_slices

# Unique training samples used out of 50,000 with seed 20 (CIFAR's class sizes), by (classes, clients, alpha). They
# depend on the labels only through the class sizes, since samples are taken from per-class lists.
UNIQUE = {
    (10, 100, 0.6): 48733, (10, 100, 0.3): 47938, (10, 100, 0.1): 46198, (10, 200, 0.6): 48603, (10, 200, 0.3): 48204,
    (10, 200, 0.1): 47522, (100, 100, 0.6): 47214, (100, 100, 0.3): 46284, (100, 100, 0.1): 44141,
}  # fmt: skip
DISTINCT = {0.6: 9.3, 0.3: 8.1, 0.1: 5.0}  # mean distinct classes per client, 10 classes, 100 clients, to one digit


def cifar_labels(classes: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(np.repeat(np.arange(classes), 50_000 // classes))


@pytest.mark.parametrize(("classes", "clients", "alpha"), UNIQUE)
def test_dirichlet_regression_numbers(classes: int, clients: int, alpha: float) -> None:
    labels = cifar_labels(classes)
    parts = partition.dirichlet(labels, clients, alpha, seed=20)
    assert [len(i) for i in parts.indices] == [50_000 // clients] * clients
    assert len(np.unique(np.concatenate(parts.indices))) == UNIQUE[classes, clients, alpha]
    if (classes, clients) == (10, 100):
        distinct = np.mean([len(np.unique(labels[i])) for i in parts.indices])
        assert distinct == pytest.approx(DISTINCT[alpha], abs=0.05 + 1e-9)


def deal(
    cdf: np.ndarray, pools: list[np.ndarray], sizes: Sequence[int], rng: np.random.RandomState, exhausted: str = "reset"
) -> list[list[int]]:
    """Deal the samples of `pools` out as the public simulators do, with the calls that they make.

    Args:
        cdf: cumulative probabilities of the classes `[clients, classes]`.
        pools: positions of the samples of each class.
        sizes: number of samples of each client.
    """
    amount, sizes_left = [len(pool) for pool in pools], [int(size) for size in sizes]
    slots = [[-1] * size for size in sizes_left]
    while sum(sizes_left):
        client = rng.randint(len(sizes))
        if sizes_left[client] <= 0:
            continue
        sizes_left[client] -= 1
        while True:
            c = int(np.argmax(rng.uniform() <= cdf[client]))
            if amount[c] <= 0:
                if exhausted == "reset":
                    amount[c] = len(pools[c])
                continue
            amount[c] -= 1
            slots[client][sizes_left[client]] = int(pools[c][amount[c]])
            break
    return slots


def pools_of(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    return [np.flatnonzero(labels == c) for c in range(classes)]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=8, max_size=60).filter(lambda values: set(values) == {0, 1, 2, 3}),
    clients=st.integers(1, 7),
    exhausted=st.sampled_from(dealing.EXHAUSTED),
    seed=st.integers(0, 2**32 - 1),
)
def test_draw_is_the_simulators_loop_call_by_call(labels: list[int], clients: int, exhausted: str, seed: int) -> None:
    y = np.array(labels)
    priors = np.random.default_rng(seed).dirichlet([2.0] * 4, size=clients)
    sizes = np.full(clients, len(y) // clients)
    rng, twin_rng = np.random.RandomState(seed), np.random.RandomState(seed)
    parts = partition.draw(y, priors, sizes, rng, exhausted)
    assert [part.tolist() for part in parts] == deal(priors.cumsum(axis=1), pools_of(y, 4), sizes, twin_rng, exhausted)
    assert rng.uniform() == twin_rng.uniform()  # both streams are at the same position


@pytest.mark.parametrize("n", [1, 2, 3, 50, 64, 65, 1000])
def test_a_draw_from_blocks_of_words_takes_the_numbers_one_by_one(n: int) -> None:
    twin_rng, rng = (np.random.RandomState(7) for _ in range(2))
    twin_rng.randint(5), rng.randint(5)  # not from a state's beginning
    labels, priors = np.arange(5 * n) % 3, np.random.RandomState(1).dirichlet([0.5] * 3, size=n)
    parts = partition.draw(labels, priors, np.full(n, 5), rng)
    assert [part.tolist() for part in parts] == deal(priors.cumsum(axis=1), pools_of(labels, 3), [5] * n, twin_rng)
    assert (rng.randint(2**31, size=5) == twin_rng.randint(2**31, size=5)).all()


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(5, 120), clients=st.integers(1, 5), alpha=st.floats(0.02, 50), seed=st.integers(0, 1000))
def test_redraw_uses_every_sample_once(samples: int, clients: int, alpha: float, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 5, samples)
    parts = partition.dirichlet(labels, clients, alpha, seed, exhausted="redraw", classes=5)
    assert sorted(np.concatenate(parts.indices).tolist()) == list(range(samples))


def test_redraw_ends_when_a_clients_classes_are_used_up() -> None:
    labels = np.array([0] * 5 + [1] * 15)
    numbers = partition.draw(labels, np.array([[1.0, 0.0]]), np.array([20]), np.random.RandomState(0), "redraw")[0]
    assert sorted(numbers.tolist()) == list(range(20))


def test_redraw_takes_the_remaining_classes_of_the_prior() -> None:
    """The first class has two samples, the second hardly any weight, the third none."""
    labels, prior = np.repeat([0, 1, 2], [2, 30, 30]), np.array([[1 - 1e-12, 1e-12, 0.0]])
    numbers = partition.draw(labels, prior, np.array([20]), np.random.RandomState(0), "redraw")[0]
    assert np.bincount(labels[numbers], minlength=3).tolist() == [2, 18, 0]


def test_a_class_without_samples_is_passed_over() -> None:
    labels = np.array([0, 0, 2, 2])
    almost_all_on_the_empty_class = np.array([[1e-300, 1.0, 1e-300]])
    numbers = partition.draw(labels, almost_all_on_the_empty_class, np.array([40]), np.random.RandomState(0))[0]
    assert len(numbers) == 40
    assert set(labels[numbers]) == {0, 2}


def test_same_seed_same_split_another_seed_another() -> None:
    labels = cifar_labels(10)[:2000]
    a, b, c = (partition.dirichlet(labels, 20, 0.3, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(x, y) for x, y in zip(a.indices, b.indices, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a.indices, c.indices, strict=True))


def test_splits_leave_numpys_global_generator_alone() -> None:
    labels = cifar_labels(10)[:500]
    np.random.seed(1)
    state_before = np.random.get_state()[1].copy()
    partition.dirichlet(labels, 5, 0.3)
    partition.iid(labels, 5)
    assert np.array_equal(state_before, np.random.get_state()[1])


def test_iid_deals_every_sample_out_once_in_blocks_of_the_shuffled_set() -> None:
    labels = cifar_labels(10)[:1000]
    parts = partition.iid(labels, 8, seed=20)
    assert np.array_equal(np.concatenate(parts.indices), np.random.RandomState(20).permutation(1000))
    assert np.allclose(parts.priors, np.bincount(labels) / 1000)


def test_balanced_iid_gives_every_client_the_same_classes() -> None:
    labels = cifar_labels(100)
    parts = partition.iid(labels, 100, balanced=True)
    assert sorted(np.concatenate(parts.indices).tolist()) == list(range(50_000))
    assert all((np.bincount(labels[i], minlength=100) == 5).all() for i in parts.indices)


def test_make_takes_the_name_of_a_split_and_its_options() -> None:
    assert len(partition.make("dirichlet", np.arange(40) % 4, 4, 20, alpha=0.5)) == 4


# --- Per-client validation against the split that made the clients: the same routine, each client's own prior, equal
# sizes.


def population(split: str, **options: object) -> Population:
    return prepare(data.digits(clients=12, split=split, **options), None, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "own", [{"split": "dirichlet", "alpha": 0.1}, {"split": "pathological", "classes_per_client": 3}]
)
def test_prior_is_the_splits_routine_on_the_test_set(own: dict) -> None:
    people = population(**own)
    labels = people.test_labels.numpy()
    slices = client_slices("prior", people, seed=4)
    rng = np.random.RandomState(seeds.derive(4, "validation") % 2**32)
    order = rng.permutation(360)
    expected = data.draw(labels[order], people.priors, np.full(12, 30), rng)
    assert [s.tolist() for s in slices] == [order[t].tolist() for t in expected]
    assert [len(s) for s in slices] == [30] * 12
    for prior, part in zip(people.priors, slices):
        assert prior[labels[part]].min() > 0


# --- The pathological split, the per-class Dirichlet split, and lists of a user's own.


# Unique training samples used out of 50,000 with seed 20 (CIFAR's class sizes), by (classes, clients, classes per
# client).
CLASSES_DRAWN = {
    (10, 100, 6): 48640, (10, 100, 3): 48610, (10, 200, 6): 48892, (10, 200, 3): 48108, (100, 100, 20): 46385,
    (100, 100, 10): 43697,
}  # fmt: skip


@pytest.mark.parametrize(("classes", "clients", "own"), CLASSES_DRAWN)
def test_pathological_regression_numbers(classes: int, clients: int, own: int) -> None:
    labels = cifar_labels(classes)
    parts = partition.pathological(labels, clients, own)
    assert len(np.unique(np.concatenate(parts.indices))) == CLASSES_DRAWN[classes, clients, own]
    for indices, prior in zip(parts.indices, parts.priors):
        assert len(indices) == 50_000 // clients
        assert np.array_equal(np.unique(labels[indices]), np.flatnonzero(prior))
        assert np.array_equal(prior[prior > 0], np.full(own, 1 / own))


def simulators_pathological(labels: np.ndarray, clients: int, c: int, seed: int) -> list[list[int]]:
    """The public simulators' procedure with their calls: order, rows of ones shuffled in place, then the dealing."""
    rng = np.random.RandomState(seed)
    order = rng.permutation(len(labels))
    rows = np.ones((clients, labels.max() + 1))
    rows[:, c:] = 0
    for row in rows:
        rng.shuffle(row)
    cdf = np.where(rows > 0, np.cumsum(rows, axis=1) / c, 0.0)
    sizes = [len(labels) // clients] * clients
    sizes[0] += len(labels) - sum(sizes)
    pools = [order[pool] for pool in pools_of(labels[order], rows.shape[1])]
    return deal(cdf, pools, sizes, rng)


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 8), own=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_pathological_is_the_simulators_procedure_call_by_call(clients: int, own: int, seed: int) -> None:
    labels = np.concatenate([np.arange(5), np.random.default_rng(seed).integers(0, 5, 75)])
    parts = partition.pathological(labels, clients, own, seed)
    assert [part.tolist() for part in parts.indices] == simulators_pathological(labels, clients, own, seed)


def test_pathological_without_repetition_where_it_can_be_made() -> None:
    labels = np.arange(400) % 4
    parts = partition.pathological(labels, 4, 4, exhausted="redraw")
    assert sorted(np.concatenate(parts.indices).tolist()) == list(range(400))


def niid_bench(labels: np.ndarray, clients: int, alpha: float, seed: int, least: int) -> list[list[int]]:
    """``noniid-labeldir`` of NIID-Bench, with numpy's calls in its order."""
    rng = np.random.RandomState(seed)
    smallest = 0
    while smallest < least:
        batches: list[list[int]] = [[] for _ in range(clients)]
        for k in range(labels.max() + 1):
            ids = np.where(labels == k)[0]
            rng.shuffle(ids)
            p = rng.dirichlet(np.repeat(alpha, clients))
            p = np.array([q * (len(b) < len(labels) / clients) for q, b in zip(p, batches)])
            p = p / p.sum()
            cuts = (np.cumsum(p) * len(ids)).astype(int)[:-1]
            batches = [b + i.tolist() for b, i in zip(batches, np.split(ids, cuts))]
            smallest = min(len(b) for b in batches)
    for batch in batches:
        rng.shuffle(batch)
    return batches


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 6), alpha=st.floats(0.3, 20), seed=st.integers(0, 1000), least=st.integers(1, 8))
def test_per_class_dirichlet_is_the_published_procedure(clients: int, alpha: float, seed: int, least: int) -> None:
    labels = np.concatenate([np.arange(6), np.random.default_rng(seed).integers(0, 6, 194)])
    parts = partition.dirichlet_per_class(labels, clients, alpha, seed, least)
    assert [part.tolist() for part in parts.indices] == niid_bench(labels, clients, alpha, seed, least)
    assert sorted(np.concatenate(parts.indices).tolist()) == list(range(200))
    assert min(map(len, parts.indices)) >= least
    for part, prior in zip(parts.indices, parts.priors):
        assert np.array_equal(prior, np.bincount(labels[part], minlength=6) / len(part))


def test_per_class_dirichlet_is_unbalanced() -> None:
    sizes = [len(part) for part in partition.dirichlet_per_class(cifar_labels(10), 20, 0.3).indices]
    assert max(sizes) > 2 * min(sizes)


def test_own_lists_are_taken_as_they_are(tmp_path: Path) -> None:
    labels = np.array([0, 1, 2, 0, 1, 2])
    parts = partition.own(labels, indices=[[5, 0], [1]])
    assert [part.tolist() for part in parts.indices] == [[5, 0], [1]]
    assert parts.priors.tolist() == [[0.5, 0, 0.5], [0, 1, 0]]
    (tmp_path / "mine.json").write_text(json.dumps([[5, 0], [1]]))
    from_file = partition.make("own", labels, None, 20, indices=str(tmp_path / "mine.json"))
    assert [part.tolist() for part in from_file.indices] == [[5, 0], [1]]
    parts_with_repeats = partition.own(labels, 2, indices=[[0, 0], [0, 1]], duplicates=True)
    assert [part.tolist() for part in parts_with_repeats.indices] == [[0, 0], [0, 1]]


def test_own_lists_from_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="with the clients' indices"):
        partition.own(np.arange(6), indices=tmp_path / "none.json")
    (tmp_path / "cut.json").write_text("[[0, 1], [2")
    with pytest.raises(ValueError, match="is no JSON file"):
        partition.own(np.arange(6), indices=tmp_path / "cut.json")
    with pytest.raises(ValueError, match="lists of 1 clients, and clients is 3"):
        partition.own(np.arange(6), 3, indices=[[0, 1]])
