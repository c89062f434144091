"""The handwritten digits that scikit-learn ships: 1,797 images of 8 x 8 pixels, 10 classes; no download.

Source: the test part of the Optical Recognition of Handwritten Digits data set (E. Alpaydin and C. Kaynak, UCI,
1998), ``sklearn.datasets.load_digits``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsam.extras import install_command
from fastsam.fed.data.augment import augment_by_name
from fastsam.fed.data.federated import FederatedData, split_data, stratified_test
from fastsam.fed.data.partition import SPLITS, options_of

FILE = "datasets/data/digits.csv.gz"  # in the package, as `load_digits` reads it


def digits(
    clients: int | None = 50,
    split: str = "dirichlet",
    alpha: float = 0.3,
    seed: int = 20,
    test_fraction: float = 0.2,
    augment: str = "auto",
    **options: Any,
) -> FederatedData:
    """Return the handwritten digits, divided among `clients` clients; x [n, 1, 8, 8] float32, y [n] int64.

    The test set (360 images at the default fraction) is stratified and the same for every seed and split. Pixels are
    scaled to mean 0 and standard deviation 1 over the training part. With 50 clients each holds 28 training images;
    client 0 has the remainder too (65 in all).

    Args:
        clients, split, seed, **options: see `split_data`.
        alpha: concentration, for the splits that take one.
        test_fraction: share of the images in the test set.
        augment: a name of `fastsam.fed.data.augment.AUGMENTS`; "auto" means no augmentation.

    Raises:
        ValueError: there are more clients than training images, or the split cannot be made.
    """
    pixels, y = _read()
    train, test = stratified_test(y.numpy(), test_fraction)
    x = _standardise(pixels, train)
    if split in SPLITS and "alpha" in options_of(split):
        options["alpha"] = alpha
    return split_data(
        x[train],
        y[train],
        (x[test], y[test]),
        clients=clients,
        split=split,
        seed=seed,
        classes=10,
        name="digits",
        augment=augment_by_name(augment),
        **options,
    )


def load() -> tuple[Tensor, Tensor]:
    """Return all 1,797 digits in stored order: x [1797, 1, 8, 8] float32, standardised, y [1797] int64."""
    pixels, y = _read()
    return _standardise(pixels, slice(None)), y


def _read() -> tuple[np.ndarray, Tensor]:
    """Return pixels [1797, 64] float64 from 0 to 16, and labels. Importing scikit-learn would take longer."""
    package = find_spec("sklearn")
    file = (
        Path(package.submodule_search_locations[0]) / FILE if package and package.submodule_search_locations else None
    )
    if file is not None and file.is_file():
        table = np.loadtxt(file, delimiter=",")
        pixels, labels = table[:, :-1], table[:, -1]
    else:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ImportError(
                f"the digits come with scikit-learn, which is not installed: {install_command('lab')}", name="sklearn"
            ) from error
        pixels, labels = load_digits(return_X_y=True)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def _standardise(pixels: np.ndarray, train: Any) -> Tensor:
    """Scale the pixels to mean 0 and standard deviation 1 over the rows `train`."""
    mean, std = pixels[train].mean(), pixels[train].std()
    return torch.from_numpy(((pixels - mean) / std).astype(np.float32).reshape(-1, 1, 8, 8))
