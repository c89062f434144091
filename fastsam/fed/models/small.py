"""Small models without normalisation layers: a CNN, an MLP, and the EMNIST CNN and LeNet-5x5 of the experiments."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from fastsam.fed.common.checks import integer

_CHANNELS = (1, 3, 4)  # that images usually have


def image_shape(model: str, in_shape: tuple[int, ...], least: int, other_model: str) -> tuple[int, int, int]:
    """Return `in_shape` as (C, H, W). Raises ValueError if it is not an image or smaller than `least`."""
    shape = (1, *in_shape) if len(in_shape) == 2 else tuple(in_shape)
    if len(shape) != 3 or min(shape[1:]) < least:
        last = len(shape) == 3 and shape[2] in _CHANNELS and min(shape[:2]) >= least
        advice = "their channels come last: x.movedim(-1, 1) has them first" if last else f"try {other_model!r}"
        raise ValueError(
            f"the model {model!r} takes images [C, H, W] or [H, W] of at least {least}x{least}, got samples of the "
            f"shape {tuple(in_shape)}; {advice}"
        )
    return shape[0], shape[1], shape[2]


def as_images(x: Tensor, in_shape: tuple[int, int, int]) -> Tensor:
    """Return x as [n, C, H, W]. It may be images of that shape, of one channel without a channel dimension, or flat.

    Raises:
        ValueError: x has a different shape with the same number of elements, such as images with channels last.
    """
    shape = tuple(x.shape[1:])
    if shape == in_shape:
        return x
    if shape != in_shape[1:] and len(shape) != 1:
        last = shape == (*in_shape[1:], in_shape[0])
        advice = "; their channels come last: x.movedim(-1, 1) has them first" if last else ""
        raise ValueError(f"the model takes images [n, {', '.join(map(str, in_shape))}], got {list(x.shape)}{advice}")
    return x.reshape(-1, *in_shape)


class CNN(nn.Module):
    """Two 3x3 convolutions (16 and 32 channels by default), each with ReLU and 2x2 max-pooling, a hidden layer, a
    linear layer.

    No normalisation layer, hence no buffers. Inputs [n, C, H, W], or [n, H, W] for one channel; H and W of 4 or more
    (8x8 digits: 13,706 parameters; 28x28: 105,866). With channels 32 and 64, kernel 5 and hidden 512 it is McMahan et
    al.'s (AISTATS 2017): 2,156,490 parameters for CIFAR-10.

    Args:
        in_shape: shape of a sample.
        classes: number of outputs.
        channels: channels of the two convolutions.
        hidden: size of the hidden layer.
        kernel: odd width of the convolutions, padded to keep the size.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        classes: int,
        channels: tuple[int, int] = (16, 32),
        hidden: int = 64,
        kernel: int = 3,
    ) -> None:
        super().__init__()
        in_shape = image_shape("cnn", in_shape, 4, "mlp")
        if integer("kernel", kernel, at_least=1) % 2 == 0:
            raise ValueError(f"kernel must be odd, so that padding keeps an image's size, got {kernel}")
        first, second = channels
        self.in_shape = in_shape
        self.conv1 = nn.Conv2d(in_shape[0], first, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(first, second, kernel, padding=kernel // 2)
        self.hidden = nn.Linear(second * (in_shape[1] // 4) * (in_shape[2] // 4), hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = as_images(x, self.in_shape)
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(nn.functional.relu(conv(x)), 2)
        return self.out(nn.functional.relu(self.hidden(x.flatten(1))))


class MLP(nn.Module):
    """Fully connected: one hidden layer (64 units by default) per entry of `hidden`, ReLU between; a number is one
    layer.

    Inputs [n, ...] are flattened.
    """

    def __init__(self, in_shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] | int = (64,)) -> None:
        super().__init__()
        sizes = [math.prod(in_shape), *([hidden] if isinstance(hidden, int) else hidden)]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = nn.functional.relu(layer(x))
        return self.out(x)


class EMNISTCNN(nn.Module):
    """The CNN of Reddi et al. (ICLR 2021, as in fedjax): 3x3 convolutions of 32 and 64 channels without padding, each
    with ReLU, 2x2 max-pooling, dropout, a hidden layer, dropout, a linear layer.

    Inputs as for `CNN`, of 6x6 or more (28x28 and 62 classes: 1,206,590 parameters).

    Args:
        in_shape: shape of a sample.
        classes: number of outputs.
        dropout: the two probabilities.
        hidden: size of the hidden layer.
    """

    def __init__(
        self, in_shape: tuple[int, ...], classes: int, dropout: tuple[float, float] = (0.25, 0.5), hidden: int = 128
    ) -> None:
        super().__init__()
        self.in_shape = (channels, height, width) = image_shape("emnist_cnn", in_shape, 6, "cnn")
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = (nn.Dropout(p) for p in dropout)
        self.hidden = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.conv1(as_images(x, self.in_shape)))
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv2(x)), 2)
        x = nn.functional.relu(self.hidden(self.dropout1(x).flatten(1)))
        return self.out(self.dropout2(x))


class LeNet(nn.Module):
    """The LeNet of FL-Simulator: two 5x5 convolutions of 64 channels without padding, each with ReLU and 2x2
    max-pooling, then linear layers of 384 and 192 with ReLU, and the last.

    Inputs as for `CNN`, of 16x16 or more (3x32x32 and 10 classes: 797,962 parameters).
    """

    def __init__(self, in_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.in_shape = (channels, height, width) = image_shape("lenet", in_shape, 16, "cnn")
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        self.hidden1 = nn.Linear(64 * sides[0] * sides[1], 384)
        self.hidden2 = nn.Linear(384, 192)
        self.out = nn.Linear(192, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = as_images(x, self.in_shape)
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(nn.functional.relu(conv(x)), 2)
        x = nn.functional.relu(self.hidden1(x.flatten(1)))
        return self.out(nn.functional.relu(self.hidden2(x)))
