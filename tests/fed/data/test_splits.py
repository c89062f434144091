"""The pathological split, the per-class Dirichlet split, and lists of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam.fed.data import partition, split_data

# Unique training samples used out of 50,000 with seed 20 (CIFAR's class sizes), by (classes, clients, classes per
# client).
UNIQUE = {
    (10, 100, 6): 48640,
    (10, 100, 3): 48610,
    (10, 200, 6): 48892,
    (10, 200, 3): 48108,
    (100, 100, 20): 46385,
    (100, 100, 10): 43697,
}


def cifar_labels(classes: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(np.repeat(np.arange(classes), 50_000 // classes))


@pytest.mark.parametrize(("classes", "clients", "own"), UNIQUE)
def test_pathological_regression_numbers(classes: int, clients: int, own: int) -> None:
    labels = cifar_labels(classes)
    made = partition.pathological(labels, clients, own)
    assert len(np.unique(np.concatenate(made.indices))) == UNIQUE[classes, clients, own]
    for indices, prior in zip(made.indices, made.priors):
        assert len(indices) == 50_000 // clients
        assert np.array_equal(np.unique(labels[indices]), np.flatnonzero(prior))
        assert np.array_equal(prior[prior > 0], np.full(own, 1 / own))


def simulators_pathological(labels: np.ndarray, clients: int, c: int, seed: int) -> list[list[int]]:
    """The public simulators' procedure with their calls: order, rows of ones shuffled in place, then the dealing
    loop."""
    rng = np.random.RandomState(seed)
    order = rng.permutation(len(labels))
    y = labels[order]
    rows = np.ones((clients, labels.max() + 1))
    rows[:, c:] = 0
    for row in rows:
        rng.shuffle(row)
    cdf = np.where(rows > 0, np.cumsum(rows, axis=1) / c, 0.0)
    pools = [np.where(y == k)[0] for k in range(rows.shape[1])]
    amount = [len(p) for p in pools]
    left = [len(y) // clients] * clients
    left[0] += len(y) - sum(left)
    slots = [[-1] * n for n in left]
    while sum(left):
        client = rng.randint(clients)
        if left[client] <= 0:
            continue
        left[client] -= 1
        while True:
            k = int(np.argmax(rng.uniform() <= cdf[client]))
            if amount[k] <= 0:
                amount[k] = len(pools[k])
                continue
            amount[k] -= 1
            slots[client][left[client]] = int(order[pools[k][amount[k]]])
            break
    return slots


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 8), own=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_pathological_is_the_simulators_procedure_call_by_call(clients: int, own: int, seed: int) -> None:
    labels = np.concatenate([np.arange(5), np.random.default_rng(seed).integers(0, 5, 75)])
    made = partition.pathological(labels, clients, own, seed)
    assert [part.tolist() for part in made.indices] == simulators_pathological(labels, clients, own, seed)


def test_pathological_without_repetition_where_it_can_be_made() -> None:
    labels = np.arange(400) % 4
    made = partition.pathological(labels, 4, 4, exhausted="redraw")
    assert sorted(np.concatenate(made.indices).tolist()) == list(range(400))


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
    made = partition.dirichlet_per_class(labels, clients, alpha, seed, least)
    assert [part.tolist() for part in made.indices] == niid_bench(labels, clients, alpha, seed, least)
    assert sorted(np.concatenate(made.indices).tolist()) == list(range(200))
    assert min(map(len, made.indices)) >= least
    for part, prior in zip(made.indices, made.priors):
        assert np.array_equal(prior, np.bincount(labels[part], minlength=6) / len(part))


def test_per_class_dirichlet_is_unbalanced() -> None:
    sizes = [len(part) for part in partition.dirichlet_per_class(cifar_labels(10), 20, 0.3).indices]
    assert max(sizes) > 2 * min(sizes)


def test_own_lists_are_taken_as_they_are(tmp_path: Path) -> None:
    labels = np.array([0, 1, 2, 0, 1, 2])
    made = partition.own(labels, indices=[[5, 0], [1]])
    assert [part.tolist() for part in made.indices] == [[5, 0], [1]]
    assert made.priors.tolist() == [[0.5, 0, 0.5], [0, 1, 0]]
    (tmp_path / "mine.json").write_text(json.dumps([[5, 0], [1]]))
    from_file = partition.make("own", labels, None, 20, indices=str(tmp_path / "mine.json"))
    assert [part.tolist() for part in from_file.indices] == [[5, 0], [1]]
    repeated = partition.own(labels, 2, indices=[[0, 0], [0, 1]], duplicates=True)
    assert [part.tolist() for part in repeated.indices] == [[0, 0], [0, 1]]


def test_own_lists_from_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="with the clients' indices"):
        partition.own(np.arange(6), indices=tmp_path / "none.json")
    (tmp_path / "cut.json").write_text("[[0, 1], [2")
    with pytest.raises(ValueError, match="is no JSON file"):
        partition.own(np.arange(6), indices=tmp_path / "cut.json")
    with pytest.raises(ValueError, match="lists of 1 clients, and clients is 3"):
        partition.own(np.arange(6), 3, indices=[[0, 1]])


@settings(max_examples=25, deadline=None)
@given(
    split=st.sampled_from(["dirichlet", "iid", "pathological", "dirichlet_per_class"]),
    clients=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_split_gives_each_client_samples_that_exist(split: str, clients: int, seed: int) -> None:
    import torch

    own = {
        "dirichlet": {"alpha": 0.3},
        "pathological": {"classes_per_client": 2},
        "dirichlet_per_class": {"alpha": 5.0},
    }
    x, y = torch.arange(400.0)[:, None], torch.arange(400) % 4
    data = split_data(x, y, (x, y), clients=clients, split=split, seed=seed, **own.get(split, {}))
    assert len(data) == clients
    for cx, cy in data:
        assert len(cy) > 0 and torch.equal(cx[:, 0].long() % 4, cy)
