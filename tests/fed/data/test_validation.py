"""Per-client validation against the split that made the clients: the same routine, each client's own prior, equal
sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastsam.fed import data
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.common import seeds
from fastsam.fed.loop.evaluate import client_slices


def population(split: str, **options: object) -> Population:
    return prepare(data.digits(clients=12, split=split, **options), None, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("split", "options"), [("dirichlet", {"alpha": 0.1}), ("pathological", {"classes_per_client": 3})]
)
def test_prior_is_the_splits_routine_on_the_test_set(split: str, options: dict) -> None:
    people = population(split, **options)
    labels = people.test[1].numpy()
    made = client_slices("prior", people, seed=4)
    rng = np.random.RandomState(seeds.derive(4, "validation") % 2**32)
    order = rng.permutation(360)
    expected = data.draw(labels[order], people.priors, np.full(12, 30), rng)
    assert [s.tolist() for s in made] == [order[t].tolist() for t in expected]
    assert [len(s) for s in made] == [30] * 12
    for prior, part in zip(people.priors, made):
        assert prior[labels[part]].min() > 0


def test_prior_follows_the_distribution_of_each_client() -> None:
    people = population("dirichlet", alpha=0.3)
    counts = np.zeros((12, 10))
    for seed in range(60):
        for client, part in enumerate(client_slices("prior", people, seed)):
            counts[client] += np.bincount(people.test[1].numpy()[part], minlength=10)
    assert np.abs(counts / (60 * 30) - people.priors).max() < 0.05  # five standard deviations of 1,800 draws


def test_no_part_of_the_test_set_is_left_out_for_where_it_is_stored() -> None:
    people = population("dirichlet", alpha=0.1)
    used = [np.unique(np.concatenate(client_slices("prior", people, seed))) for seed in range(40)]
    assert max(map(len, used)) < 360  # classes run out and begin anew, others are not used up
    assert len(np.unique(np.concatenate(used))) == 360


def test_iid_cuts_the_test_set_into_equal_slices_and_shared_takes_all() -> None:
    people = population("iid")
    made = client_slices("iid", people, 1)
    assert [len(s) for s in made] == [30] * 12 and sorted(np.concatenate(made).tolist()) == list(range(360))
    assert client_slices("shared", people, 1) is None
