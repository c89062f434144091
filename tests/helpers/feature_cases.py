"""Values of the features of a federated run, and random choices of several features at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import oracle

DTYPE = torch.float64
BATCH = 5
SIZES = {"unequal": (7, 16, 1, 23, 12), "equal": (10,) * 5}
WHOLE_BATCHES = (5, 15, 10, 20, 10)  # in place of unequal sizes if a small batch has no loss
TEST_SIZE = 40
IGNORED = -100


@dataclass(frozen=True)
class Features:
    """The features of a run, each by the name of its value. The defaults are the run without features."""

    model: str = "dense"
    loss: str = "mean"
    algorithm: str = "fedavg"
    personal: bool = False
    compression: bool = False
    clip: bool = False
    metric: str = "none"
    schedule: str = "none"
    optimizer: str = "none"
    sizes: str = "unequal"
    weighting: str = "uniform"
    measure: str = "none"
    resumed: bool = False
    executor: str = "sequential"


class Words(nn.Module):
    """A classifier of sequences of words with a padding index."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.output = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.output(self.words(x).mean(1).tanh())
        return output


def norm_model() -> nn.Module:
    """Return a small model with BatchNorm. A bias before it would have a gradient of zero, which Adagrad amplifies."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).to(DTYPE)


@dataclass(frozen=True)
class ModelKind:
    """A model, the name of its last layer, and the shape of its samples."""

    make: Callable[[], nn.Module]
    head: str
    shape: tuple[int, ...]
    has_words: bool = False


MODELS = {
    "dense": ModelKind(oracle.smooth_model, "2", (6,)),
    "embedding": ModelKind(Words, "output", (5,), has_words=True),
    "convolution": ModelKind(oracle.pooling_model, "5", (2, 6, 6)),
    "dropout": ModelKind(oracle.dropout_model, "3", (6,)),
    "batch norm": ModelKind(norm_model, "3", (6,)),
}
CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.2], dtype=DTYPE)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "ignored labels": F.cross_entropy,
    "dicts": F.cross_entropy,
}
ALGORITHMS = {
    "fedavg": ("FedAvg", {}),
    "fedsam": ("FedSAM", {"rho": 0.1}),
    "fedprox": ("FedProx", {"phi": 0.5}),
    "scaffold": ("SCAFFOLD", {}),
    "fedcm": ("FedCM", {"alpha": 0.3}),
    "mofedsam": ("MoFedSAM", {"rho": 0.1, "beta": 0.3}),
    "fedgamma": ("FedGAMMA", {"rho": 0.1}),
    "fednova": ("FedNova", {}),
    "fedavgm": ("FedAvgM", {"beta": 0.6}),
    "fedadam": ("FedAdam", {"tau": 0.1}),
    "fednsam": ("FedNSAM", {"rho": 0.1, "gamma": 0.6}),
    "fedlesam": ("FedLESAM", {"rho": 0.1}),
    "fedexp": ("FedExP", {"eps": 1e-3}),
    "mimelite": ("MimeLite", {"beta": 0.3}),
}
KEEP = {"optimizer_state": "keep"}
# The rate of the first round, and keywords of `fed.run` and of torch's optimizer.
OPTIMIZERS: dict[str, tuple[float, dict[str, Any], Callable[..., torch.optim.Optimizer] | None]] = {
    "none": (0.1, {}, None),
    "momentum": (0.05, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}, None),
    "clipped": (0.1, {"clip_norm": 0.3}, None),
    "SGD with momentum": (
        0.05, {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.5)}, partial(torch.optim.SGD, momentum=0.5),
    ),
    "AdamW": (0.02, {"optimizer": "AdamW", "lr": 0.02}, torch.optim.AdamW),
    "AdamW with its rate": (
        0.03, {"optimizer": partial(torch.optim.AdamW, lr=0.03, weight_decay=0.1)},
        partial(torch.optim.AdamW, weight_decay=0.1),
    ),
    "Adagrad": (0.01, {"optimizer": "Adagrad"}, torch.optim.Adagrad),
    "momentum, kept": (0.05, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01, **KEEP}, None),
    "AdamW, kept": (0.02, {"optimizer": "AdamW", "lr": 0.02, **KEEP}, torch.optim.AdamW),
}  # fmt: skip
# The factors of the local rate and of the server's rate in a round, and keywords of `fed.run`.
SCHEDULES: dict[str, tuple[Callable[[int], tuple[float, float]], dict[str, Any]]] = {
    "none": (lambda t: (1.0, 1.0), {}),
    "decay": (lambda t: (0.7**t, 1.0), {"lr_decay": 0.7}),
    "server": (lambda t: (1.0, 1 / (t + 1) ** 0.5), {"server_lr": "1/sqrt(round)"}),
}
METRICS: dict[str, dict[str, Callable[[Tensor, Tensor], Any]]] = {
    "none": {},
    "spread": {"spread": lambda outputs, y: (outputs.max(1).values - outputs.min(1).values).mean()},
    "hits": {"hits": lambda outputs, y: (outputs.argmax(1) == y).double().sum()},
}
ON_GPU = ("streams", "graph")  # executors that run on a stand-in for CUDA
EXECUTORS = ("sequential", "threads", "vmap", *ON_GPU, "auto")
VALUES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS), "loss": tuple(LOSSES), "algorithm": tuple(ALGORITHMS), "personal": (False, True),
    "compression": (False, True), "clip": (False, True), "metric": tuple(METRICS), "schedule": tuple(SCHEDULES),
    "optimizer": tuple(OPTIMIZERS), "sizes": tuple(SIZES), "weighting": ("uniform", "samples"),
    "measure": ("none", "train", "consistency"), "resumed": (False, True), "executor": EXECUTORS,
}  # fmt: skip


def draw(seed: int) -> Features:
    """Return a run with two or three features besides its executor, drawn at random."""
    rng = random.Random(seed)
    default = Features()
    names = [f.name for f in fields(default) if f.name != "executor"]
    changes = {
        name: rng.choice([value for value in VALUES[name] if value != getattr(default, name)])
        for name in rng.sample(names, rng.choice((2, 3)))
    }
    return replace(default, executor=rng.choice(EXECUTORS), **changes)


def samples(kind: ModelKind, n: int, seed: int, has_ignored: bool) -> tuple[Tensor, Tensor]:
    """Return n random samples of a model. With `has_ignored` some labels are ignored, less than a batch."""
    generator = torch.Generator().manual_seed(seed)
    if kind.has_words:
        x = torch.randint(0, 9, (n, *kind.shape), generator=generator)
    else:
        x = torch.randn(n, *kind.shape, generator=generator, dtype=DTYPE)
    y = torch.randint(0, 3, (n,), generator=generator)
    if has_ignored:
        y[1:BATCH] = IGNORED
    return x, y


def data_of(features: Features) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return the clients' samples and the test set as pairs."""
    kind, has_ignored = MODELS[features.model], features.loss == "ignored labels"
    sizes = SIZES[features.sizes]
    if features.sizes == "unequal" and (has_ignored or features.model == "batch norm"):
        sizes = WHOLE_BATCHES
    clients = [samples(kind, n, seed, has_ignored) for seed, n in enumerate(sizes, 1)]
    return clients, samples(kind, TEST_SIZE, 100, False)


def algorithm_of(features: Features) -> fed.Algorithm:
    """Return the algorithm of a run."""
    name, options = ALGORITHMS[features.algorithm]
    algorithm: fed.Algorithm = getattr(fed, name)(**options)
    return algorithm
