"""CIFAR-10 and CIFAR-100 with SGD and SAM, ResNet-18 and WideResNet-28-10, on a GPU. It has not been run on one yet:
its figures are in no table of this project.

    python examples/cifar.py --download                                  # CIFAR-10, ResNet-18, SAM, 200 epochs
    python examples/cifar.py --method sgd --epochs 400                   # SGD for the time of SAM
    python examples/cifar.py --data cifar100 --model wrn --rho 0.1 --method late --seed 1

Settings of Foret et al. (ICLR 2021): momentum 0.9, a cosine from learning rate 0.1 to 0, weight decay 0.0005, flips and
crops, rho 0.05 for CIFAR-10 and 0.1 for CIFAR-100. The test set is read once, after training.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import SAM, FusedSAM, fed, variants
from fastsam.fed.data.augment import FlipCrop

METHODS = ("sgd", "sam", "asam", "msam", "interval", "late")


class WideBlock(nn.Module):
    """A residual block of Zagoruyko and Komodakis (BMVC 2016): batch norm, ReLU and convolution, twice."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(y)))) + shortcut
        return out


def wide_resnet(classes: int, depth: int = 28, factor: int = 10) -> nn.Module:
    """Return WideResNet-28-10 for images of 32 x 32."""
    layers, inputs = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)], 16
    for stage, channels in enumerate((16 * factor, 32 * factor, 64 * factor)):
        for block in range((depth - 4) // 6):
            layers.append(WideBlock(inputs, channels, 2 if stage and not block else 1))  # type: ignore[arg-type]
            inputs = channels
    head = (nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(*layers, *head)


def resnet18(classes: int) -> nn.Module:
    """Return torchvision's ResNet-18 with the first layer for images of 32 x 32."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


MODELS = {"resnet18": resnet18, "wrn": wide_resnet}


def make_optimizer(model: nn.Module, method: str, rho: float, steps: int) -> torch.optim.Optimizer:
    """Return the optimizer of a method for a training of `steps` steps."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), **options)
    variant = {
        "sam": SAM(rho), "asam": SAM(rho, adaptive=True), "msam": variants.MSAM(rho), "interval": SAM(rho, interval=2),
        "late": SAM(rho, start=round(0.75 * steps)),
    }[method]  # fmt: skip
    # model=: the second pass leaves the running statistics of BatchNorm unchanged
    return FusedSAM(model.parameters(), torch.optim.SGD, variant=variant, model=model, **options)


def train(model: nn.Module, x: Tensor, y: Tensor, method: str, rho: float, epochs: int, batch: int, seed: int) -> None:
    """Train on images x `[n, 3, 32, 32]` with labels y, in bfloat16 by autocast on a GPU."""
    steps, rng = epochs * (len(x) // batch), torch.Generator().manual_seed(seed)
    optimizer, augment = make_optimizer(model, method, rho, steps), FlipCrop(crop=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        total = torch.zeros((), device=x.device)
        for places in torch.randperm(len(x), generator=rng).split(batch)[: len(x) // batch]:
            images, labels = augment(x[places.to(x.device)], rng), y[places.to(x.device)]

            def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
                optimizer.zero_grad()
                with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                    loss = F.cross_entropy(model(images), labels)
                loss.backward()
                return loss

            total += optimizer.step(closure).detach()
            schedule.step()
        print(f"epoch {epoch + 1}: training loss {total.item() * batch / len(x):.3f}", flush=True)
    if isinstance(optimizer, FusedSAM):  # methods of one pass leave the weights perturbed
        optimizer.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "cifar100"), default="cifar10")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--method", choices=METHODS, default="sam")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = getattr(fed, options.data)(options.data_dir, clients=1, split="iid", download=options.download)
    (x, y), test = (tuple(part.to(device) for part in pair) for pair in (data[0], data.test))
    model = MODELS[options.model](100 if options.data == "cifar100" else 10).to(device)
    train(model, x, y, options.method, options.rho, options.epochs, options.batch, options.seed)
    print(f"{options.data} {options.model} {options.method}: test accuracy {accuracy(model, *test):.4f}")


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the fraction of right labels."""
    model.eval()
    right = [(model(a).argmax(1) == b).sum() for a, b in zip(x.split(500), y.split(500), strict=True)]
    return float(sum(right)) / len(y)


if __name__ == "__main__":
    main()
