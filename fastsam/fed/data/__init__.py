"""Data sets and splits: `digits` (built in), a user's own, `dirichlet` and `iid` over clients."""

from fastsam.fed.data.digits import digits
from fastsam.fed.data.federated import FederatedData, as_tensors, split_data, stratified_test
from fastsam.fed.data.files import from_client_files, from_function, from_npz
from fastsam.fed.data.partition import SPLITS, Partition, dirichlet, draw, iid

__all__ = [
    "SPLITS",
    "FederatedData",
    "Partition",
    "as_tensors",
    "digits",
    "dirichlet",
    "draw",
    "from_client_files",
    "from_function",
    "from_npz",
    "iid",
    "split_data",
    "stratified_test",
]
