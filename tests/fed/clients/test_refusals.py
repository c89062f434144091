"""Refused clients, cohorts and weights, and the words of the errors."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from fastsam import fed
from fastsam.fed.clients.sampling import present
from tests.helpers.fed_input import start as start_small
from tests.helpers.fed_kinds import Rows, in_another_collate, pairs, run
from tests.helpers.fed_refusals import refusals


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


GOOD = pairs()[0]
NAMES = ["cat", "dog"] * 5
REMEDY = "Number the classes of all clients together: classes, y = numpy.unique"


def run_with(client):
    run([GOOD, client, GOOD])


def run_with_tests(*tests):
    """A run of four clients with these test sets."""
    run(pairs(), test=fed.ClientTestSets(list(tests)))


test_refused = refusals(
    # a pair among pairs, which are checked together
    (lambda: run_with((GOOD[0] * float("nan"), GOOD[1])), 'client 1: x holds NaN'),
    (lambda: run_with((GOOD[0][1:], GOOD[1])), 'client 1: x has 9 samples and y 10'),
    (lambda: run_with((GOOD[0][:0], GOOD[1][:0])), 'client 1 has no samples'),
    (lambda: run_with((GOOD[0].to_sparse(), GOOD[1])), 'x of client 1 must be a dense real tensor'),
    (lambda: run_with(GOOD[0]), 'client 1 must be a pair'),
    # labels that are texts
    (lambda: run_with((GOOD[0], np.array(NAMES))), f"y of client 1 must be .*, got texts such as 'cat'. {REMEDY}"),
    (lambda: run_with((GOOD[0], NAMES)), f"y of client 1 must be .*, got texts such as 'cat'. {REMEDY}"),
    (lambda: run([list(zip(GOOD[0], NAMES, strict=True))]), f"y of texts such as 'cat'. {REMEDY}"),
    (lambda: run([{"x": GOOD[0], "label": np.array(NAMES)}]), f"client 0: label must be .*. {REMEDY}"),
    (lambda: run_with((GOOD[0], GOOD[1] + 9)), 'client 1: labels must be in 0..'),
    # wrong results of `available`
    (lambda: present(lambda t: [0, 5], 2, 5),
     'client ids from 0 to 4, or a mask of 5 booleans; in round 3: 5 is not a client'),
    (lambda: present(lambda t: [-1], 2, 5), 'available must return client ids from .*-1 is not a client'),
    (lambda: present(lambda t: [True, False], 2, 5), 'available must return client ids from .*a mask of 2'),
    (lambda: present(lambda t: [0.5], 2, 5),
     'available must return client ids from .*a client id must be an integer, got 0.5'),
    (lambda: present(lambda t: [1, 3, 1], 2, 5), 'available must return client ids from .*client 1 is there twice$'),
    (lambda: present(lambda t: [1, 0, 1, 1, 0], 2, 5),
     r'client 0 is there twice. As a mask write booleans: \[True, False, \.\.\.\]'),
    (lambda: present(lambda t: torch.tensor([0, 1, 1, 0, 1]), 2, 5), 'twice. As a mask write booleans'),
    (lambda: present(lambda t: [1], 2, 1), '1 is not a client. As a mask write booleans'),
    (lambda: present(lambda t: None, 2, 5),
     "available must return client ids from .*TypeError: 'NoneType' object is not iterable"),
    # a sampler that chooses by itself
    (lambda: start_small(sampler="simulator", available=lambda t: [0]),
     "available restricts sampler='bernoulli' or 'fixed'"),
    (lambda: start_small(sampler=lambda t, g: [0], available=lambda t: [0]),
     "available restricts sampler='bernoulli' or 'fixed'"),
    # bad weights
    (lambda: start_small(weighting=[1, 2]), 'weighting must have one weight for each of the 1 clients, got 2'),
    (lambda: start_small(weighting=[2 ** 53 + 1]),
     r"weight of client 0 must be at most 9007199254740992 = 2\^53, .*got 9007199254740993"),
    (lambda: start_small(weighting=[0.5]),
     'shares of 0.25 and 0.5 are 1 and 2.: the weight of client 0 must be an integer >= 1, got 0.5'),
    (lambda: start_small(weighting=lambda i: 0), 'the weight of client 0 must be an integer >= 1, got 0'),
    (lambda: start_small(weighting={0: 1}),
     "weighting must be 'uniform', 'samples', a list .* or a function of a client's id .*got {0: 1}"),
    # bad clients
    (lambda: run([GOOD, Streamed()]), 'client 1 is Streamed, which has no samples by number'),
    (lambda: run([iter([GOOD])]), 'client 0 is list_iterator, which has no samples by number'),
    (lambda: run([GOOD, []]), 'client 1 has no samples'),
    (lambda: run([GOOD, TensorDataset(torch.zeros(0, 6), torch.zeros(0))]), 'client 1 has no samples'),
    (lambda: run([GOOD, Rows(torch.zeros(0, 6), torch.zeros(0))]), 'client 1 has no samples'),
    (lambda: run([GOOD, [(torch.ones(6), 0), (torch.ones(5), 0)]]),
     'client 1: its samples make no batch .RuntimeError.*collate='),
    (lambda: run([GOOD, [(torch.ones(6), 0), (torch.ones(6), 0, 1)]]),
     'client 1: its samples make no batch .RuntimeError.*collate='),
    (lambda: run([GOOD, [{"x": 1.0}] * 3]), 'client 1 must be a pair .*got a dict with x; say loss=fed.BatchLoss'),
    (lambda: run([[{"x": 1.0}] * 3, [{"z": 1.0}] * 3], loss=fed.BatchLoss(min)),
     'client 1: x is missing in a batch, but torch.float32 in a batch of client 0'),
    (lambda: run([[(object(), 0)] * 3]), 'client 0: its samples make no batch .TypeError'),
    (lambda: run([{"x": torch.ones(3, 6), "y": torch.ones(2)}], loss=fed.BatchLoss(min)),
     'client 0: columns .* x has 3, y has 2'),
    (lambda: run([{"x": torch.full((3, 6), torch.nan)}], loss=fed.BatchLoss(min)), 'client 0: x holds NaN'),
    (lambda: run([{"x": "words"}], loss=fed.BatchLoss(min)), 'client 0: x must be a tensor'),
    (lambda: run([GOOD], collate=in_another_collate),
     'collate makes a batch of a list of samples, and all clients are tensors'),
    (lambda: run([Rows(*GOOD)], collate=lambda items: None),
     'collate of client 0 must make a batch of tensors .* got NoneType'),
    (lambda: run([Rows(*GOOD)], collate=lambda items: 1 / 0), 'client 0: the collate failed.*ZeroDivisionError'),
    (lambda: run([Rows(*GOOD)], collate=list), 'collate must be a function'),
    (lambda: run([Rows(*GOOD)], collate=lambda items: torch.ones(3)), 'client 0 must be a pair .*got Tensor'),
    (lambda: run([GOOD], test=[{"x": 1.0}] * 2), 'the test set must be a pair'),
    (lambda: run([DataLoader(Rows(*GOOD), sampler=WeightedRandomSampler([1.0] * 10, 5))]),
     r"client 0 is a DataLoader with its own sampler .*WeightedRandomSampler.*Subset\(dataset, indices\)"),
    (lambda: run([{1: 2}.keys()]), 'client 0 must be a pair .*got dict_keys'),
    # bad ones
    (lambda: fed.LazyClients(4, pairs().__getitem__, prefetch=-1), 'LazyClients: prefetch must be an integer >= 0'),
    (lambda: fed.LazyClients(0, pairs().__getitem__), 'clients must be an integer >= 1'),
    (lambda: fed.LazyClients(2, pairs()), 'load must be a function'),
    (lambda: fed.LazyClients(2, pairs().__getitem__, [3]), 'sizes must have a number for each of the 2 clients, got 1'),
    (lambda: fed.LazyClients(2, pairs().__getitem__, [3, 0]), r"sizes\[1\] must be an integer >= 1"),
    (lambda: run(fed.LazyClients(4, pairs().__getitem__), weighting="samples"),
     "weighting='samples' needs the clients' sizes.*sizes="),
    (lambda: run(fed.LazyClients(4, pairs().__getitem__), measures=["sharpness"]),
     "measures needs the clients' sizes.*sizes="),
    (lambda: run(fed.LazyClients(4, pairs().__getitem__, [10, 11, 12, 13]), measures=["sharpness"]),
     'sharpness .*batch by batch'),
    # test sets of the clients
    (lambda: fed.ClientTestSets(dict(enumerate(pairs()))), "ClientTestSets takes a list .* got dict"),
    (lambda: run_with_tests(None, None, None, None), "no client has a test set"),
    (lambda: run_with_tests(*pairs()[:3]), "None, for each of the 4 clients; got 3"),
    (lambda: run_with_tests(*pairs()[:3], 5), "the test set of client 3 must be a pair"),
    (lambda: run_with_tests(*pairs()[:3], (torch.randn(2, 5), torch.zeros(2).long())),
     r"client 3 has samples x torch.float32 \[5\], .*client 0"),
    (lambda: run_with_tests(*pairs()[:3], (torch.full((1, 6), torch.nan), torch.tensor([0]))),
     "test set of client 3: x holds NaN"),
    (lambda: run_with_tests(*pairs()[:3], (torch.zeros(1, 6), torch.tensor([7]))),
     "the test set: labels must be in 0..2"),
    # cohorts
    (lambda: start_small(cohort=6, run_dir="run"), "cohort=6 needs at least 6 clients, but there (is|are) 1"),
    (lambda: start_small(cohort=0, run_dir="run"), "cohort.*must be an integer >= 1, got 0"),
    (lambda: start_small(cohort=1, participation=0.5, run_dir="run"),
     "cohort=1 needs participation at its default, but the run has participation=0.5"),
    # wrong results of a sampler
    (lambda: start_small(sampler=lambda t, g: []), 'no client'),
    (lambda: start_small(sampler=lambda t, g: [5]), '5, which is not a client'),
    (lambda: start_small(sampler=lambda t, g: [-1]), '-1, which is not a client'),
    (lambda: start_small(sampler=lambda t, g: [0, 0]), 'a client twice'),
    (lambda: start_small(sampler=lambda t, g: [0.5]), r"round 1 it returned \[0.5\]"),
    (lambda: start_small(sampler=lambda t, g: ["0"]), r"returned \['0'\]"),
    (lambda: start_small(sampler=lambda t, g: None), 'returned None'),
)  # fmt: skip
