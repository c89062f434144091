"""`fed.split`: subsets of a user's data set."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from fastsam import fed
from fastsam.fed.data import partition

X, Y = torch.arange(210.0).reshape(210, 1), torch.arange(210) % 3


class Named(Dataset[Any]):
    """A data set with its labels under a name, or under none."""

    def __init__(self, name: str | None, labels: Any = Y) -> None:
        self.y, self.reads = labels, 0
        if name is not None:
            setattr(self, name, labels)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return X[i], int(self.y[i])


def positions(subsets: list[Subset[Any]]) -> list[list[int]]:
    return [list(subset.indices) for subset in subsets]


@pytest.mark.parametrize("alpha", [0.05, 0.3, 100.0, None])
def test_every_sample_goes_to_one_client(alpha: float | None) -> None:
    subsets = fed.split(TensorDataset(X, Y), clients=20, alpha=alpha)
    assert [len(subset) for subset in subsets] == [20, *[10] * 19]
    assert sorted(i for indices in positions(subsets) for i in indices) == list(range(210))


def test_alpha_says_how_unlike_the_clients_are() -> None:
    spread = []
    for alpha in (0.05, 1.0, 1000.0):
        splits = positions(fed.split(Named("y"), clients=14, alpha=alpha))
        shares = [np.bincount(Y[indices], minlength=3) / len(indices) for indices in splits]
        spread.append(float(np.std(shares)))
    assert spread[0] > 0.3 > spread[1] > 0.15 > spread[2]


def test_labels_are_found_without_reading_samples() -> None:
    expected = positions(fed.split(TensorDataset(X, Y), clients=7, alpha=0.3, seed=1))
    split = partition.dirichlet(Y.numpy(), 7, 0.3, 1, exhausted="redraw")
    assert expected == [indices.tolist() for indices in split.indices]
    for dataset in (Named("targets"), Named("labels"), Named("targets", Y.tolist()), Named("targets", Y.numpy())):
        assert positions(fed.split(dataset, clients=7, alpha=0.3, seed=1)) == expected
        assert dataset.reads == 0
    dataset = Named(None)
    assert positions(fed.split(dataset, clients=7, alpha=0.3, seed=1)) == expected
    assert dataset.reads == 210
    assert positions(fed.split(Named("targets", Y * 0), clients=7, alpha=0.3, seed=1, labels=Y.numpy())) == expected


def test_a_subset_is_split_by_its_own_labels() -> None:
    part = Subset(Named("targets"), range(209, 99, -1))
    same = TensorDataset(X[100:].flip(0), Y[100:].flip(0))
    assert positions(fed.split(part, clients=5, alpha=0.3)) == positions(fed.split(same, clients=5, alpha=0.3))


def test_a_run_takes_the_subsets() -> None:
    model = nn.Linear(1, 3)
    dataset = TensorDataset(X / 100, Y)
    result = fed.run(model, fed.split(dataset, clients=20, alpha=0.3), fed.FedAvg(), rounds=2, cohort=5, test=dataset)
    assert [record["clients"] for record in result.history] == [5, 5]
