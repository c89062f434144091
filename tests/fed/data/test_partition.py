"""Splits: the published procedure, its regression numbers, and what bad input gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam.fed.data import dealing, partition

# Unique training samples used out of 50,000 with seed 20 (CIFAR's class sizes), by (classes, clients, alpha). They
# depend on the labels only through the class sizes, since samples are taken from per-class lists.
UNIQUE = {
    (10, 100, 0.6): 48733,
    (10, 100, 0.3): 47938,
    (10, 100, 0.1): 46198,
    (10, 200, 0.6): 48603,
    (10, 200, 0.3): 48204,
    (10, 200, 0.1): 47522,
    (100, 100, 0.6): 47214,
    (100, 100, 0.3): 46284,
    (100, 100, 0.1): 44141,
}
DISTINCT = {0.6: 9.3, 0.3: 8.1, 0.1: 5.0}  # mean distinct classes per client, 10 classes, 100 clients, to one digit


def cifar_labels(classes: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(np.repeat(np.arange(classes), 50_000 // classes))


@pytest.mark.parametrize(("classes", "clients", "alpha"), UNIQUE)
def test_dirichlet_regression_numbers(classes: int, clients: int, alpha: float) -> None:
    labels = cifar_labels(classes)
    made = partition.dirichlet(labels, clients, alpha, seed=20)
    assert [len(i) for i in made.indices] == [50_000 // clients] * clients
    assert len(np.unique(np.concatenate(made.indices))) == UNIQUE[classes, clients, alpha]
    if (classes, clients) == (10, 100):
        distinct = np.mean([len(np.unique(labels[i])) for i in made.indices])
        assert distinct == pytest.approx(DISTINCT[alpha], abs=0.05 + 1e-9)


def test_the_order_of_the_labels_changes_positions_only() -> None:
    shuffled, in_order = cifar_labels(10), np.sort(cifar_labels(10))
    a, b = partition.dirichlet(shuffled, 100, 0.3), partition.dirichlet(in_order, 100, 0.3)
    assert len(np.unique(np.concatenate(a.indices))) == len(np.unique(np.concatenate(b.indices)))
    assert all(np.array_equal(shuffled[i], in_order[j]) for i, j in zip(a.indices, b.indices, strict=True))
    assert np.array_equal(a.priors, b.priors)


def simulators_loop(
    labels: np.ndarray, priors: np.ndarray, sizes: np.ndarray, rng: np.random.RandomState, exhausted: str
) -> list[list[int]]:
    """Steps 4 and 5 written plainly, with the calls that the simulators make."""
    cdf = np.cumsum(priors, axis=1)
    pools = [np.where(labels == c)[0] for c in range(priors.shape[1])]
    amount = [len(p) for p in pools]
    left = [int(s) for s in sizes]
    slots = [[-1] * int(s) for s in sizes]
    while sum(left):
        client = rng.randint(len(sizes))
        if left[client] <= 0:
            continue
        left[client] -= 1
        while True:
            c = int(np.argmax(rng.uniform() <= cdf[client]))
            if amount[c] <= 0:
                if exhausted == "reset":
                    amount[c] = len(pools[c])
                continue
            amount[c] -= 1
            slots[client][left[client]] = int(pools[c][amount[c]])
            break
    return slots


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
    ours, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
    made = partition.draw(y, priors, sizes, ours, exhausted)
    assert [part.tolist() for part in made] == simulators_loop(y, priors, sizes, theirs, exhausted)
    assert ours.uniform() == theirs.uniform()  # the streams stand at the same place


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(5, 120), clients=st.integers(1, 5), alpha=st.floats(0.02, 50), seed=st.integers(0, 1000))
def test_redraw_uses_every_sample_once(samples: int, clients: int, alpha: float, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 5, samples)
    made = partition.dirichlet(labels, clients, alpha, seed, exhausted="redraw", classes=5)
    assert sorted(np.concatenate(made.indices).tolist()) == list(range(samples))


def test_redraw_ends_when_a_clients_classes_are_used_up() -> None:
    labels = np.array([0] * 5 + [1] * 15)
    taken = partition.draw(labels, np.array([[1.0, 0.0]]), np.array([20]), np.random.RandomState(0), "redraw")[0]
    assert sorted(taken.tolist()) == list(range(20))


def test_a_class_without_samples_is_passed_over() -> None:
    labels = np.array([0, 0, 2, 2])
    almost_all_on_the_empty_class = np.array([[1e-300, 1.0, 1e-300]])
    taken = partition.draw(labels, almost_all_on_the_empty_class, np.array([40]), np.random.RandomState(0))[0]
    assert len(taken) == 40
    assert set(labels[taken]) == {0, 2}


def test_same_seed_same_split_another_seed_another() -> None:
    labels = cifar_labels(10)[:2000]
    a, b, c = (partition.dirichlet(labels, 20, 0.3, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(x, y) for x, y in zip(a.indices, b.indices, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a.indices, c.indices, strict=True))


def test_splits_leave_numpys_global_generator_alone() -> None:
    labels = cifar_labels(10)[:500]
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    partition.dirichlet(labels, 5, 0.3)
    partition.iid(labels, 5)
    assert np.array_equal(before, np.random.get_state()[1])


def test_smaller_alpha_is_more_heterogeneous() -> None:
    labels = cifar_labels(10)

    def distinct(alpha: float) -> float:
        return float(np.mean([len(np.unique(labels[i])) for i in partition.dirichlet(labels, 50, alpha).indices]))

    assert distinct(0.05) < distinct(0.5) < distinct(50) == 10


def test_the_remainder_goes_to_client_0() -> None:
    labels = cifar_labels(10)[:1437]
    for made in (partition.dirichlet(labels, 50, 0.3), partition.iid(labels, 50)):
        assert [len(i) for i in made.indices] == [28 + 37] + [28] * 49


def test_iid_deals_every_sample_out_once_in_blocks_of_the_shuffled_set() -> None:
    labels = cifar_labels(10)[:1000]
    made = partition.iid(labels, 8, seed=20)
    assert np.array_equal(np.concatenate(made.indices), np.random.RandomState(20).permutation(1000))
    assert np.allclose(made.priors, np.bincount(labels) / 1000)


def test_balanced_iid_gives_every_client_the_same_classes() -> None:
    labels = cifar_labels(100)
    made = partition.iid(labels, 100, balanced=True)
    assert sorted(np.concatenate(made.indices).tolist()) == list(range(50_000))
    assert all((np.bincount(labels[i], minlength=100) == 5).all() for i in made.indices)
    with pytest.raises(ValueError, match="divisible by 7 clients"):
        partition.iid(labels, 7, balanced=True)


def test_make_knows_the_splits_and_their_options() -> None:
    labels = np.arange(40) % 4
    assert len(partition.make("dirichlet", labels, 4, 20, alpha=0.5)) == 4
    with pytest.raises(ValueError, match="'dirichlet', 'iid', 'pathological', .*'own', got 'shards'"):
        partition.make("shards", labels, 4, 20)
    with pytest.raises(ValueError, match="'iid' takes no alpha; its options are balanced"):
        partition.make("iid", labels, 4, 20, alpha=0.5)
