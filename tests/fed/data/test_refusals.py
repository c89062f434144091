"""Data, splits and models that cannot be made, and in which words."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastsam import fed
from fastsam.fed import models
from fastsam.fed.data import FederatedData, FlipCrop, by_domain, digits_domains, partition, stratified_test
from fastsam.fed.data.augment import augment_by_name
from tests.helpers.fed_refusals import refusals


def pair(n: int, labels: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(n, 2), torch.tensor(labels if labels is not None else [0] * n, dtype=torch.int64)


def dirichlet(**changes):
    partition.dirichlet(**{"labels": np.arange(20) % 2, "clients": 2, "alpha": 0.3, "classes": 2} | changes)


def pathological(**changes):
    partition.pathological(**{"labels": np.arange(40) % 4, "clients": 4, "classes_per_client": 2} | changes)


def domains(**changes):
    by_domain(**{"domains": {"a": pair(3), "b": pair(5)}, "held_out": "b"} | changes)


def digits_with(outputs):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
    fed.run(model, fed.digits(clients=3, split="iid"), fed.FedAvg(), rounds=1)


draw, LEGACY = partition.draw, np.random.RandomState(0)


test_refused = refusals(
    # cnn accepts only images
    (lambda: models.build("cnn", (10,), 10, 0), "takes images .* try 'mlp'"),
    (lambda: models.build("cnn", (1, 3, 8), 10, 0), "takes images .* try 'mlp'"),
    (lambda: models.build("cnn", (2, 2), 10, 0), "takes images .* try 'mlp'"),
    # unknown model
    (lambda: models.build("resnet", (1, 8, 8), 10, 0),
     "'cnn', 'mlp', .* in a config its import path .* got 'resnet' .did you mean 'resnet18_gn'"),
    # images that do not fit the model
    (lambda: models.build("emnist_cnn", (1, 5, 9), 10, 0), 'at least 6x6'),
    (lambda: models.build("lenet", (1, 8, 8), 10, 0), 'at least 16x16'),
    (lambda: models.build("resnet18_gn", (64,), 10, 0), 'takes images'),
    (lambda: models.build("vit_b_32", (1, 224, 224), 10, 0), r"takes images \[3, H, H\] with H divisible by 32"),
    (lambda: models.build("vit_b_32", (3, 225, 225), 10, 0), 'divisible by 32'),
    # model_options that no model takes
    (lambda: models.build("mpl", (64,), 10, 0), "did you mean 'mlp'"),
    (lambda: models.build("mlp", (64,), 10, 0, hidden=["wide"]),
     r"model_options of mlp: {'hidden': \['wide'\]} makes no model"),
    # outputs must match the classes
    (lambda: digits_with(9), 'the model has 9 outputs and the data 10 classes'),
    (lambda: digits_with(12), 'the model has 12 outputs and the data 10 classes'),
    # dirichlet refuses
    (lambda: dirichlet(clients=21), '21 clients cannot share 20 training samples'),
    (lambda: dirichlet(clients=0), 'clients must be an integer >= 1, got 0'),
    (lambda: dirichlet(clients=2.0), 'clients must be an integer'),
    (lambda: dirichlet(alpha=0.0), 'alpha must be a finite number > 0'),
    (lambda: dirichlet(alpha=-1), 'alpha must be a finite number > 0'),
    (lambda: dirichlet(alpha=float("nan")), 'alpha must be a finite number > 0'),
    (lambda: dirichlet(alpha=1e-09), 'too small'),
    (lambda: dirichlet(labels=np.array([0, 1, 5])), r"must be in 0..1 \(2 classes\), got 5 at position 2"),
    (lambda: dirichlet(labels=np.array([0, -1, 1])), 'got -1 at position 1'),
    (lambda: dirichlet(labels=np.array([0.0, 0.5])), 'integer class numbers'),
    (lambda: dirichlet(labels=np.array(["a", "b"])), 'integer class numbers'),
    (lambda: dirichlet(labels=np.zeros((3, 2))), r"vector .* got the shape \(3, 2\)"),
    (lambda: dirichlet(labels=np.array([], dtype=int)), 'there are no samples'),
    (lambda: dirichlet(exhausted="recycle"), "'reset', 'redraw', got 'recycle'"),
    # domains
    (lambda: domains(held_out="d"), "has no domain 'd'; its domains are 'a', 'b'"),
    (lambda: domains(clients_per_domain=4),
     "4 clients cannot share the 3 training samples of the domain 'a'"),
    (lambda: domains(clients_per_domain=0), "clients_per_domain must be an integer >= 1"),
    (lambda: domains(domains={"a": pair(5)}, held_out="a"), "no domain is left to train on"),
    (lambda: domains(domains={}, held_out=None), "it has none"),
    (lambda: digits_domains(["rot"]), "domain"),
    (lambda: digits_domains(["blur3"]), "domain"),
    (lambda: digits_domains(["noise-1"]), "domain"),
    (lambda: digits_domains(["rot0+"]), "domain"),
    (lambda: digits_domains(["rot0", "rot0"]), "domain"),
    (lambda: digits_domains([]), "domain"),
    (lambda: digits_domains("rot0"), "domain"),
    # splits of a user's data set
    (lambda: fed.split(TensorDataset(*pair(210)), clients=211, alpha=1.0), "211 clients cannot share 210"),
    (lambda: fed.split(TensorDataset(*pair(210)), clients=3, alpha=0.0), "alpha must be"),
    (lambda: fed.split([(torch.ones(2), name) for name in ("cat", "dog")], clients=2, alpha=None),
     "labels must be integer class numbers, got texts such as 'cat'. Number the classes of all clients together: "
     "classes, y = numpy.unique"),
    (lambda: fed.split(TensorDataset(torch.zeros(9, 2), torch.full((9, 1), 0.5)), clients=3, alpha=1.0), "labels"),
    (lambda: fed.digits(clients=1438), "1438 clients cannot share 1437 training samples"),
    # augmentation
    (lambda: FlipCrop(pad=-1), "pad must be an integer >= 0"),
    (lambda: FlipCrop(flip=1.1), "flip .*<= 1"),
    (lambda: FlipCrop(crop=-0.1), "crop .*>= 0"),
    (lambda: FlipCrop()(torch.zeros(3, 4), torch.Generator()), r"takes images .*, got the shape \[3, 4\]"),
    (lambda: augment_by_name("mixup"), "augment must be 'auto', 'none', 'flip_crop', .* got 'mixup'"),
    (lambda: FederatedData([pair(2)], pair(2), 2, augment="flip_crop"), "augment must be callable"),
    # models
    (lambda: models.build("mlp", (4,), 3, 0, width=9),
     r"keyword argument 'width'; it takes \(in_shape, classes, hidden=\(64,\)\)"),
    (lambda: models.build("resnet18_gn", (3, 16, 16), 10, 0, stem="5x5"),
     "stem must be one of '7x7', '3x3', got '5x5'"),
    (lambda: models.build("cnn", (3, 32, 32), 10, 0, kernel=4), "kernel must be"),
    (lambda: models.build("cnn", (3, 32, 32), 10, 0, kernel=0), "kernel must be"),
    # splits by name
    (lambda: partition.make("shards", np.arange(40) % 4, 4, 20),
     "'dirichlet', 'iid', 'pathological', .*'own', got 'shards'"),
    (lambda: partition.make("iid", np.arange(40) % 4, 4, 20, alpha=0.5),
     "'iid' takes no alpha; its options are balanced"),
    (lambda: partition.iid(np.arange(40) % 4, 7, balanced=True), "divisible by 7 clients"),
    # draw refuses what cannot be filled
    (lambda: draw(np.array([0, 0, 1]), np.array([[0.5, 0.5]]), np.array([4]), LEGACY, "redraw"),
     '4 slots cannot be filled from 3 samples'),
    (lambda: draw(np.array([0, 0]), np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 1]), LEGACY),
     'prior of client 1 gives no weight to any class that has samples'),
    (lambda: draw(np.array([0, 0, 1]), np.array([[0.5, 0.5]]), np.array([1, 1]), LEGACY),
     'one integer >= 0 for each of the 1 clients'),
    # stratified test refuses
    (lambda: stratified_test(np.arange(10) % 2, 0.0), 'test_fraction must lie between 0 and 1'),
    (lambda: stratified_test(np.arange(10) % 2, 1.0), 'test_fraction must lie between 0 and 1'),
    (lambda: stratified_test(np.arange(10) % 2, -0.1), 'test_fraction must lie between 0 and 1'),
    (lambda: stratified_test(np.arange(10) % 2, float("nan")), 'test_fraction must lie between 0 and 1'),
    # federated data refuses
    (lambda: FederatedData([], pair(2), classes=3), 'at least one client'),
    (lambda: FederatedData([pair(2), pair(0)], pair(2), classes=3), 'client 1 has no samples'),
    (lambda: FederatedData([pair(2, [0, 3])], pair(2), classes=3),
     r"client 0: labels must be in 0..2 \(3 classes\), got 3 at position 1"),
    (lambda: FederatedData([pair(2)], pair(2, [0, -1]), classes=3), 'the test set: labels must be in 0..2'),
    (lambda: FederatedData([(torch.zeros(3, 2), pair(2)[1])], pair(2), classes=3),
     'client 0: x has 3 samples and y 2 labels'),
    (lambda: FederatedData([(torch.zeros(2, 2), torch.zeros(2))], pair(2), classes=3),
     'client 0: labels must be int64'),
    (lambda: FederatedData([pair(2), (torch.zeros(2, 5), pair(2)[1])], pair(2), classes=3),
     r"one shape, got \(2,\) and \(5,\)"),
    (lambda: FederatedData([([0.0], [0])], pair(2), classes=3), 'client 0 must be a pair .* of tensors'),
    # pathological refuses what cannot be made
    (lambda: pathological(classes_per_client=5), 'classes_per_client=5, but the training set has samples of 4 classes'),
    (lambda: pathological(classes_per_client=5, classes=9), 'has samples of 4 classes; take at most 4'),
    (lambda: pathological(classes_per_client=0), 'classes_per_client must be an integer >= 1'),
    (lambda: pathological(classes_per_client=3, clients=20), '40 samples give each of 20 clients 2'),
    (lambda: pathological(clients=41), '41 clients cannot share 40'),
    (lambda: pathological(exhausted="redraw", classes_per_client=1, clients=3), 'classes .* of client . were used up'),
    # per class dirichlet refuses what cannot be made
    (lambda: partition.dirichlet_per_class(np.arange(40) % 4, 5, 0.5),
     '5 clients would need 50 training samples, there are 40'),
    (lambda: partition.dirichlet_per_class(np.arange(40) % 4, 9, 0.01, min_samples=4),
     r"alpha=0\.01 left a client of 9 with less than 4 samples"),
    (lambda: partition.dirichlet_per_class(np.arange(40) % 4, 2, 0.0), 'alpha must be a finite number > 0'),
    # own lists are checked
    (lambda: partition.own(np.arange(6) % 3, indices=None), 'one list of positions per client'),
    (lambda: partition.own(np.arange(6) % 3, indices=[]), 'one list of positions per client'),
    (lambda: partition.own(np.arange(6) % 3, indices=[[0], []]), 'client 1 must be a list with one position or more'),
    (lambda: partition.own(np.arange(6) % 3, indices=[0, 1]),
     'client 0 must be a list with one position or more, got 0'),
    (lambda: partition.own(np.arange(6) % 3, indices=[[0], [6]]),
     r"client 1 must be in 0\.\.5 \(the training set\), got 6"),
    (lambda: partition.own(np.arange(6) % 3, indices=[[0], [5, -1]]), 'got -1'),
    (lambda: partition.own(np.arange(6) % 3, indices=[[0.0, 1.0]]), 'client 0 must be integers, got float64'),
    (lambda: partition.own(np.arange(6) % 3, indices=[[True, False]]), 'client 0 must be integers, got bool'),
    (lambda: partition.own(np.arange(6) % 3, indices=[[0, 1], [2, 1]]), 'name sample 1 more than once'),
    (lambda: partition.own(np.arange(6) % 3, indices=[[3, 3]]), 'name sample 3 more than once'),
)  # fmt: skip
