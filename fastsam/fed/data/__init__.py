"""Data sets and splits: built-in sets by name (`SETS`), a user's own, splits over clients (`SPLITS`), domains,
augmentation."""

from collections.abc import Callable

from fastsam.fed.data.augment import AUGMENTS, Augment, FlipCrop
from fastsam.fed.data.dealing import Partition, draw
from fastsam.fed.data.domains import by_domain, digits_domains
from fastsam.fed.data.federated import FederatedData, as_tensors, split, split_data, stratified_test
from fastsam.fed.data.files import from_client_files, from_npz
from fastsam.fed.data.folders import domainnet, officehome, read_domains
from fastsam.fed.data.handwritten import digits
from fastsam.fed.data.images import cifar10, cifar100, emnist
from fastsam.fed.data.partition import SPLITS, dirichlet, dirichlet_per_class, iid, own, pathological

SETS: dict[str, Callable[..., FederatedData]] = {
    "digits": digits,
    "digits-domains": digits_domains,
    "emnist": emnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "officehome": officehome,
    "domainnet": domainnet,
}

__all__ = [
    "AUGMENTS",
    "SETS",
    "SPLITS",
    "Augment",
    "FederatedData",
    "FlipCrop",
    "Partition",
    "as_tensors",
    "by_domain",
    "cifar10",
    "cifar100",
    "digits",
    "digits_domains",
    "dirichlet",
    "dirichlet_per_class",
    "domainnet",
    "draw",
    "emnist",
    "from_client_files",
    "from_npz",
    "iid",
    "officehome",
    "own",
    "pathological",
    "read_domains",
    "split",
    "split_data",
    "stratified_test",
]
