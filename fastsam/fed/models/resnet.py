"""ResNet-18 with group normalisation, the image model of the FedLESAM experiments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fastsam.fed.common.checks import choice
from fastsam.fed.models.small import as_images, image_shape

GROUPS = 2


class ResNet18GN(nn.Module):
    """torchvision's ResNet-18 with `GroupNorm(2, C)` for every BatchNorm (FL-Simulator, FedLESAM): 62 parameter
    tensors, no buffers.

    Stem "7x7": convolution of stride 2 with padding 3 and 3x3 max-pooling of stride 2, as published also for images of
    32 x 32; "3x3": convolution of stride 1, no pooling. Four stages of two basic blocks with 64, 128, 256 and 512
    channels, mean over the image, linear layer. Convolutions start as Kaiming-normal (fan out, ReLU), norms as the
    identity. Inputs [n, C, H, W] or, for one channel, [n, H, W]; 11,181,642 parameters for 3 channels and 10 classes,
    11,227,812 for 100.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        classes: int,
        stem: str = "7x7",
        groups: int = GROUPS,
        widths: Sequence[int] = (64, 128, 256, 512),
    ) -> None:
        super().__init__()
        choice("stem", stem, ("7x7", "3x3"))
        self.in_shape = image_shape("resnet18_gn", in_shape, 2, "mlp")
        first = widths[0]
        if stem == "7x7":
            self.conv1 = nn.Conv2d(self.in_shape[0], first, 7, stride=2, padding=3, bias=False)
            self.pool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(self.in_shape[0], first, 3, padding=1, bias=False)
            self.pool = nn.Identity()
        self.norm1 = nn.GroupNorm(groups, first)
        blocks = []
        for stage, width in enumerate(widths):
            in_channels = widths[max(0, stage - 1)]
            blocks += [Block(in_channels, width, 1 if stage == 0 else 2, groups), Block(width, width, 1, groups)]
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(nn.functional.relu(self.norm1(self.conv1(as_images(x, self.in_shape)))))
        return self.out(self.blocks(x).mean((2, 3)))


class Block(nn.Module):
    """Two 3x3 convolutions with norms around a skip connection, which is a 1x1 convolution with norm where the shape
    changes."""

    def __init__(self, in_channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or in_channels != width:
            self.skip = nn.Sequential(
                nn.Conv2d(in_channels, width, 1, stride=stride, bias=False), nn.GroupNorm(groups, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(y)) + self.skip(x))
