"""A comparison of bits: an executor's weights after two runs, and the weights of `sequential`."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bench.fed.workload import BATCH, CLASSES, Workload, cnn
from fastsam import fed

ROUNDS = 4  # rounds: the first steps run without a graph, a later one is captured, and more replay it
CLIENTS = 8
Data = list[Any]


def batch_norm() -> nn.Module:
    """Return a small convolution with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(648, CLASSES)
    )


def dropout_cnn() -> nn.Module:
    """Return the CNN of the benchmark with dropout."""
    torch.manual_seed(0)
    layers = list(cnn())
    return nn.Sequential(*layers[:-1], nn.Dropout(0.5), layers[-1])


class Masked(nn.Module):
    """A model whose batches are dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(784, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x.flatten(1) * mask.flatten(1))


def dict_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a batch that is a dict."""
    return nn.functional.cross_entropy(model(batch["x"], batch["mask"]), batch["labels"])


def _pairs(device: str) -> Data:
    """Return clients of several sizes, most of them with a partial batch."""
    data = Workload("cnn", clients=CLIENTS, device=device).tensors()
    return [(x[: len(x) - 5 * (i % 3)], y[: len(y) - 5 * (i % 3)]) for i, (x, y) in enumerate(data)]


def _dicts(device: str) -> Data:
    """Return clients whose batches are dicts, in host memory, as loaders have them."""
    return [{"x": x, "mask": (x > 0).float(), "labels": y} for x, y in _pairs("cpu")]


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return cnn()


# Model, data, algorithm and options of each comparison.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Data], str, dict[str, Any]]] = {
    "FedAvg": (_plain, _pairs, "fedavg", {}), "FedSAM": (_plain, _pairs, "fedsam", {}),
    "SCAFFOLD": (_plain, _pairs, "scaffold", {}), "BatchNorm": (batch_norm, _pairs, "fedavg", {"buffers": "average"}),
    "dropout": (dropout_cnn, _pairs, "fedavg", {}),
    "dicts": (Masked, _dicts, "fedavg", {"loss": fed.BatchLoss(dict_loss)}),
}  # fmt: skip


def compare(device: str, case: str, executor: str) -> dict[str, Any]:
    """Return True as "equal" if both runs of an executor end with the bits of `sequential`, and the largest
    difference."""
    expected, results = _plain_state(device, case), [_state(device, case, executor) for _ in range(2)]
    return {
        "equal": all(torch.equal(expected, result) for result in results),
        "difference": max(float((expected - result).abs().max()) for result in results),
    }


@cache
def _plain_state(device: str, case: str) -> Tensor:
    return _state(device, case, "sequential")


def _state(device: str, case: str, executor: str) -> Tensor:
    """Return weights and buffers after a run, in one vector."""
    model, data, algorithm, options = CASES[case]
    result = fed.run(
        model().to(device), data(device), fed.algorithms.registry[algorithm](), rounds=ROUNDS, batch_size=BATCH,
        lr=0.05, eval_every=ROUNDS, participation=1.0, progress=False, executor=executor, device=device, **options,
    )  # fmt: skip
    return torch.cat([tensor.flatten().double().cpu() for tensor in result.model.state_dict().values()])
