"""CIFAR-10, CIFAR-100 and EMNIST from their published archives, dealt out to clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.common.checks import number
from fastsam.fed.data import archives, augment
from fastsam.fed.data.archives import ArchiveError
from fastsam.fed.data.federated import FederatedData, split_data
from fastsam.fed.data.partition import SPLITS, options_of

# Mean and standard deviation of the three channels, in 0..1, of FL-Simulator and FedLESAM.
CIFAR10_STATISTICS = ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
CIFAR100_STATISTICS = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


def cifar10(
    data_dir: str | Path = "data",
    clients: int | None = 100,
    split: str = "dirichlet",
    alpha: float = 0.6,
    seed: int = 20,
    download: bool = False,
    augment: str = "auto",
    mean: tuple[float, float, float] = CIFAR10_STATISTICS[0],
    std: tuple[float, float, float] = CIFAR10_STATISTICS[1],
    url: str | None = None,
    **options: Any,
) -> FederatedData:
    """Return CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images; x [n, 3, 32, 32] float32 ``(x / 255 -
    mean) / std``.

    Args:
        data_dir: folder with `cifar-10-python.tar.gz`.
        clients, split, seed, **options: see `split_data`.
        alpha: concentration, for the splits that take one.
        download: fetch the archive if it is missing or wrong.
        augment: "auto" is the simulators' `FlipCrop`.
        mean, std: mean and standard deviation of each channel, in 0..1.
        url: address of a mirror.

    Raises:
        ImportError, FileNotFoundError: torchvision or the archive is missing.
        ArchiveError: the archive is damaged or a different one.
        ConnectionError: the download failed.
        ValueError: the split cannot be made.
    """
    parts = archives.CIFAR10.read(data_dir, download, url)
    train, test = (_standardise(_cifar_part(part), mean, std) for part in parts)
    return _split_over_clients(
        (train, test), 10, "CIFAR-10", "flip_crop", augment, split, alpha, clients=clients, seed=seed, **options
    )


def cifar100(
    data_dir: str | Path = "data",
    clients: int | None = 100,
    split: str = "dirichlet",
    alpha: float = 0.6,
    seed: int = 20,
    download: bool = False,
    augment: str = "auto",
    mean: tuple[float, float, float] = CIFAR100_STATISTICS[0],
    std: tuple[float, float, float] = CIFAR100_STATISTICS[1],
    url: str | None = None,
    **options: Any,
) -> FederatedData:
    """Return CIFAR-100 with its 100 fine classes, from `cifar-100-python.tar.gz`; otherwise as `cifar10`.

    The simulators' IID split of it gives each client the same number of samples of each class: ``split="iid",
    balanced=True``.
    """
    parts = archives.CIFAR100.read(data_dir, download, url)
    train, test = (_standardise(_cifar_part(part), mean, std) for part in parts)
    return _split_over_clients(
        (train, test), 100, "CIFAR-100", "flip_crop", augment, split, alpha, clients=clients, seed=seed, **options
    )


def emnist(
    data_dir: str | Path = "data",
    clients: int | None = 100,
    split: str = "dirichlet",
    alpha: float = 0.6,
    seed: int = 20,
    download: bool = False,
    augment: str = "auto",
    fraction: float = 0.1,
    url: str | None = None,
    **options: Any,
) -> FederatedData:
    """Return EMNIST ByClass (Cohen et al., 2017): 62 classes of characters; x [n, 1, 28, 28] float32.

    Pixels are divided by 255 and scaled to mean 0 and standard deviation 1 over the training part. The stored images
    are transposed and are turned upright.

    Args:
        data_dir: folder with `EMNIST/raw/gzip.zip`.
        clients, split, alpha, seed, download, url, **options: see `cifar10`, also for the errors.
        augment: "auto" means no augmentation.
        fraction: share of the 697,932 training and of the 116,323 test images, drawn without replacement by a fixed
            generator. 0.1, the FedSAM paper's subset, gives 69,793 and 11,632 images.
    """
    fraction = number("fraction", fraction, greater_than=0, at_most=1)
    parts = zip(archives.EMNIST.read(data_dir, download, url), ("training", "test"), strict=True)
    (train_x, train_y), (test_x, test_y) = (_emnist_part(part, part_name, fraction) for part, part_name in parts)
    statistics = _statistics(train_x)
    pair = _standardise((train_x, train_y), *statistics), _standardise((test_x, test_y), *statistics)
    return _split_over_clients(pair, 62, "EMNIST", "none", augment, split, alpha, clients=clients, seed=seed, **options)


def _cifar_part(part: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return x uint8 [n, 3, 32, 32] and y int64 [n] in the order of the files; torchvision has the channels last."""
    return _check_part(part, part.data.transpose(0, 3, 1, 2), np.asarray(part.targets), (3, 32, 32))


def _emnist_part(part: Any, part_name: str, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    images, labels = _check_part(part, part.data.numpy(), part.targets.numpy(), (28, 28))
    count = int(fraction * len(labels))
    if count == 0:
        raise ValueError(
            f"fraction={fraction!r} of the {len(labels)} {part_name} images of EMNIST has no image. Take more"
        )
    indices = np.sort(np.random.RandomState(20).permutation(len(labels))[:count])
    return images[indices].transpose(0, 2, 1)[:, None], labels[indices]


def _check_part(part: Any, x: np.ndarray, y: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Check what torchvision does not compare."""
    if x.dtype != np.uint8 or x.shape[1:] != shape or y.shape != (len(x),):
        raise ArchiveError(
            f"{type(part).__name__} in {part.root}: expected bytes of {list(shape)} with a label each, got {x.dtype} "
            f"{list(x.shape)} and {list(y.shape)} labels; is it another data set?"
        )
    return x, y.astype(np.int64)


def _statistics(x: np.ndarray) -> tuple[tuple[float], tuple[float]]:
    """Return mean and standard deviation of ``x / 255``, from the counts of the 256 values, in blocks."""
    counts = sum(np.bincount(x[i : i + 4096].ravel(), minlength=256) for i in range(0, len(x), 4096)) / x.size
    values = np.arange(256) / 255
    mean = float(counts @ values)
    return (mean,), (float(np.sqrt(counts @ (values - mean) ** 2)),)


def _standardise(part: tuple[np.ndarray, np.ndarray], mean: Any, std: Any) -> tuple[Tensor, Tensor]:
    """Return uint8 [n, C, H, W] as float32 ``(x / 255 - mean) / std``, with one mean and std per channel, and the
    labels."""
    x, y = part
    images = torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32).div_(255)
    channels = [torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1) for values in (mean, std)]
    return images.sub_(channels[0]).div_(channels[1]), torch.from_numpy(y)


def _split_over_clients(
    pair: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    classes: int,
    name: str,
    usual: str,
    augmentation: str,
    split: str,
    alpha: float,
    **options: Any,
) -> FederatedData:
    """Return the training and the test pair as clients. `usual` is the meaning of "auto" for this data set."""
    (x, y), test = pair
    for part_name, (_, labels) in (("training", (x, y)), ("test", test)):
        if len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise ArchiveError(
                f"the {part_name} part of {name} must have labels in 0..{classes - 1}; is it another data set?"
            )
    if split in SPLITS and "alpha" in options_of(split):
        options["alpha"] = alpha
    augment_function = augment.augment_by_name(augmentation, usual)
    return split_data(x, y, test, split=split, classes=classes, name=name, augment=augment_function, **options)
