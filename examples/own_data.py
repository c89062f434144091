"""Data of your own: any list of (x, y), one pair per client, and one pair to test on; any torch module.

Here: the breast-cancer measurements that scikit-learn ships (569 tumours, 30 numbers each, benign or malignant), held
by eight clinics that see tumours of different sizes, so that no two clients have the same distribution.

Run it here:             python examples/own_data.py
or with a config file:   fastsam run examples/own_data.toml
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_breast_cancer
from torch import nn

from fastsam import fed

Samples = tuple[np.ndarray, np.ndarray]


def clinics(count: int = 8) -> tuple[list[Samples], Samples]:
    """Return the clients' samples and the test set. Every fifth tumour is for testing, the others go to the clinics by
    their size."""
    x, y = load_breast_cancer(return_X_y=True)
    test = np.arange(len(y)) % 5 == 0
    x = (x - x[~test].mean(axis=0)) / x[~test].std(axis=0)
    by_size = np.flatnonzero(~test)[np.argsort(x[~test, 0], kind="stable")]
    return [(x[part], y[part]) for part in np.array_split(by_size, count)], (x[test], y[test])


def network(width: int = 16) -> nn.Module:
    """Return a module. A config names this function as model = "examples/own_data.py:network"."""
    return nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, 2))


def main() -> None:
    clients, test = clinics()
    result = fed.run(
        network(), clients, fed.FedSAM(rho=0.05), rounds=30, batch_size=16, lr=0.1, participation=0.5, test=test, seed=0
    )
    summary = result.summary()
    print(f"test accuracy {summary['accuracy_final']:.3f}")
    print(f"over clients  {summary['client_accuracy_mean']:.3f} ± {summary['client_accuracy_std']:.3f}")


if __name__ == "__main__":
    main()
