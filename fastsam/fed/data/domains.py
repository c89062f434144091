"""Domains as clients: each domain has its own clients, one domain may be the test set; and the digits as domains."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastsam.fed.common import seeds
from fastsam.fed.common.checks import integer
from fastsam.fed.data import augment as augmentation
from fastsam.fed.data import partition
from fastsam.fed.data.federated import FederatedData, stratified_test
from fastsam.fed.data.handwritten import load as load_digits

Pair = tuple[Tensor, Tensor]


def by_domain(
    domains: Mapping[str, Pair],
    held_out: str | None = None,
    clients_per_domain: int = 1,
    seed: int = 20,
    test_fraction: float = 0.2,
    classes: int | None = None,
    name: str = "domains",
    **options: Any,
) -> FederatedData:
    """Return a federated data set with one client per domain, or several clients with equal parts of it (IID; the
    remainder goes to the domain's first client).

    Args:
        domains: x [n, *shape] and y [n] int64 of each domain, by its name.
        held_out: the domain that is the test set and is not trained on. None: the test set is a stratified
            `test_fraction` of every domain.
        clients_per_domain: number of clients of each domain.
        seed: random seed of the split of each domain.
        test_fraction: share of the test samples, without a held-out domain.
        classes: number of classes; default: one more than the largest label.
        name: name for reports.
        **options: fields of `FederatedData`.

    Raises:
        ValueError: a domain does not exist, no domain is left for training, or a domain has fewer samples than
            clients.
    """
    num_clients = integer("clients_per_domain", clients_per_domain, at_least=1)
    training = _training(domains, held_out, name)
    if classes is None:
        classes = 1 + max(int(y.max()) for _, y in domains.values())
    tests = [domains[held_out]] if held_out is not None else []
    clients, priors, labels = [], [], []
    for key, (x, y) in training.items():
        if held_out is None:
            train, test_indices = (torch.from_numpy(i) for i in stratified_test(y.numpy(), test_fraction))
            tests.append((x[test_indices], y[test_indices]))
            x, y = x[train], y[train]
        if num_clients > len(y):
            raise ValueError(f"{num_clients} clients cannot share the {len(y)} training samples of the domain {key!r}")
        split = partition.iid(y.numpy(), num_clients, seed, classes=classes)
        # One client keeps the domain's own storage and order: a large domain may be a file mapped into memory.
        clients += [(x, y)] if num_clients == 1 else [(x[i], y[i]) for i in map(torch.from_numpy, split.indices)]
        priors.append(split.priors)
        labels += [key] * num_clients
    test = tests[0] if len(tests) == 1 else (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))
    return FederatedData(clients, test, classes, name, np.concatenate(priors), labels, held_out, **options)


def _training(domains: Mapping[str, Pair], held_out: str | None, name: str) -> dict[str, Pair]:
    """Return the domains that are not held out."""
    if held_out is not None and held_out not in domains:
        raise ValueError(
            f"held_out: {name} has no domain {held_out!r}; its domains are {', '.join(map(repr, domains))}"
        )
    training = {key: pair for key, pair in domains.items() if key != held_out}
    if not training:
        raise ValueError(f"{name}: no domain is left to train on; it has {', '.join(map(repr, domains)) or 'none'}")
    return training


def digits_domains(
    domains: Sequence[str] = ("rot0", "rot30", "rot60", "noise1"),
    held_out: str | None = None,
    clients_per_domain: int = 1,
    seed: int = 20,
    test_fraction: float = 0.2,
    augment: str = "auto",
) -> FederatedData:
    """Return the handwritten digits in equal parts, each under a transform: a small stand-in for data sets with
    domains.

    No image is in two domains. Each domain has the class frequencies of the whole. x [n, 1, 8, 8] float32 has mean 0
    and standard deviation 1 before the transform.

    Args:
        domains: transforms, also their names: "rot30" (degrees counter-clockwise about the centre, bilinear;
            multiples of 90 are exact), "noise0.5" (Gaussian, in standard deviations of the pixels, fixed by the
            name), or several, "rot30+noise0.5".
        held_out, clients_per_domain, seed, test_fraction: see `by_domain`.
        augment: a name of `fastsam.fed.data.augment.AUGMENTS`; "auto" means no augmentation.

    Raises:
        ValueError: a transform is unknown, or a domain is named twice.
    """
    if isinstance(domains, str) or not domains or len(set(domains)) < len(domains):
        raise ValueError(f"domains must be a list of different transforms such as ['rot0', 'rot30'], got {domains!r}")
    x, y = load_digits()
    parts = {name: (_transform(x[i], name), y[i]) for name, i in zip(domains, _parts(y, len(domains)), strict=True)}
    chosen_augment = augmentation.augment_by_name(augment)
    return by_domain(
        parts,
        held_out,
        clients_per_domain,
        seed,
        test_fraction,
        classes=10,
        name="digits-domains",
        augment=chosen_augment,
    )


def _parts(y: Tensor, count: int) -> list[Tensor]:
    """Return positions of `count` stratified parts of nearly one size: shuffled, sorted by class, dealt in turn."""
    order = np.random.RandomState(0).permutation(len(y))
    order = order[np.argsort(y.numpy()[order], kind="stable")]
    return [torch.from_numpy(np.sort(order[i::count])) for i in range(count)]


def _transform(x: Tensor, name: str) -> Tensor:
    for step in name.split("+"):
        match = re.fullmatch(r"(rot|noise)(-?\d+(?:\.\d+)?)", step)
        if match is None or (match[1] == "noise" and float(match[2]) < 0):
            raise ValueError(f"a domain of the digits is 'rot30', 'noise0.5' or 'rot30+noise0.5', got {name!r}")
        amount = float(match[2])
        if match[1] == "noise":
            x = x + amount * torch.randn(x.shape, generator=seeds.generator("digits-domains", name))
        elif amount % 90 == 0:
            x = torch.rot90(x, int(amount // 90), (2, 3))
        else:
            x = _rotate(x, math.radians(amount))
    return x.contiguous()


def _rotate(x: Tensor, angle: float) -> Tensor:
    """Rotate images counter-clockwise about the centre. The background is the least value of the image set."""
    low, cos, sin = x.min(), math.cos(angle), math.sin(angle)
    grid = F.affine_grid(torch.tensor([[[cos, -sin, 0.0], [sin, cos, 0.0]]]).expand(len(x), 2, 3), list(x.shape), False)
    return F.grid_sample(x - low, grid, "bilinear", "zeros", False) + low
