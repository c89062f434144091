"""Federated cases of `tools/bits.py` for the options of a run, on every executor; see `tools/bits_fed.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import Lion, fed
from tests.helpers import fed_states
from tests.helpers.rank_group import on_ranks
from tools.bits_fed import BATCH_NORM, LOOPS, NO_MOMENTUM, Case, Outcome, cases_of, clients, model, train

NOISE = {"privacy": fed.Privacy(clip=0.5, noise_multiplier=1.0), "momentum": 0.0}
LOCAL_NOISE = {"privacy": fed.Privacy(clip=0.5, noise_multiplier=1.0, noise="local"), "momentum": 0.0}
EVERYBODY = {"participation": 1.0}
STEPS = {"local_steps": 7, "local_epochs": 1}
KEEP = {"optimizer_state": "keep"}
STACKS = ("vmap",)
GRAPHS = ("graph",)


class OwnAlgorithm(fed.Algorithm):
    """An algorithm as a user writes one: SAM steps, and a count of its rounds in each client.

    A tree with another interface for users needs the same algorithm in that form here, by `hasattr(fed, ...)`.
    """

    def init_client(self, server: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(())}

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        return {"rounds": client["rounds"] + 1}, fed.Upload(mean={"delta": results.delta})

    if hasattr(fed, "SAM"):

        def local_step(self, server: Any, client: Any, round: Any) -> Any:
            return fed.SAM(rho=0.1)

    else:  # a tree from before steps

        def local_update(self, server: Any, client: Any, round: Any) -> Any:
            return fed.LocalUpdate(direction=fed.Direction.GRADIENT, rho=0.1)

        finish_client = finish


class OwnLoop(fed.Algorithm):
    """An algorithm with a client loop, which stops after four steps."""

    def train_client(self, client: Any, server: Any, state: Any, round: Any) -> None:
        for number, batch in enumerate(client.batches()):
            if number < 4:
                client.step(*batch)


class Dropout(nn.Module):
    """A model that draws random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.dropout(x, 0.4, self.training))


class OwnMeasure:
    """A measure of a user: the clients' steps, and the distance of their middle from the start."""

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        return (0, steps // 2)

    def clients(self, old_state: Any, results: Any, context: Any) -> dict[str, Any]:
        ends = [s[max(s)].w - s[0].w for s in results.snapshots]
        return {"steps": results.num_steps, "distance": [float(end.norm()) for end in ends]}

    def round(self, old_state: Any, new_state: Any, aggregate: Any, context: Any) -> dict[str, float]:
        return {f"my_{name}": aggregate.scalar(name) for name in ("steps", "distance")}


def image_model() -> nn.Module:
    """Make a small classifier of images of 2 channels and 6 x 6 pixels."""
    torch.manual_seed(0)
    head = (nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3))
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), *head)


def images(sizes: tuple[int, ...] = (7, 12, 1, 9)) -> list[Any]:
    """Make clients with these numbers of images."""
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 2, 6, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]


def infinite_for_one_sample(outputs: Tensor, y: Tensor) -> Tensor:
    """Return a loss that is infinite for batches of one sample, so that one of the clients is excluded."""
    return nn.functional.cross_entropy(outputs, y) / (len(y) > 1)


def raise_for_one_sample(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss, or raise an error for a batch of one sample."""
    if len(y) == 1:
        raise ValueError("one sample")
    return nn.functional.cross_entropy(outputs, y)


def mean_output(outputs: Tensor, y: Tensor) -> float:
    return float(outputs.mean())


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.01 * torch.randn(x.shape, generator=generator)


def augmented() -> fed.FederatedData:
    """Make clients of 7 to 40 batches of 5 samples, with augmentation: samples are gathered in blocks of 32 batches."""
    data = clients((200, 35, 180))
    return fed.FederatedData(data, data[0], classes=3, augment=jitter)


def dicts_with(labels: str) -> dict[str, Any]:
    """Return the options of `train` for clients that are dicts of tensors, with this name of the labels."""

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), batch[labels]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(*predict(model, batch))

    test, data = clients((40,), seed=9)[0], clients()
    return {
        "data": lambda: [{"x": x, labels: y} for x, y in data],
        "test": {"x": test[0], labels: test[1]},
        "loss": fed.BatchLoss(loss, predict),
    }


# name: (algorithm, options of the run, executors that refuse it). "data" and "module" are options of `train`.
OPTIONS: dict[str, tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "clip": ("FedLESAM", {"clip_norm": 0.05}),
    "clip of the linear part": ("FedProx", {"clip_norm": 0.05, "clip_scope": "linear", "weighting": "samples"}),
    "clip and a constant perturbation": ("FedLESAM_D", {"clip_norm": 0.05, "clip_scope": "linear"}),
    "no momentum": ("FedSAM", NO_MOMENTUM),
    "local steps": ("FedSMOO", {**STEPS, "drop_last": True}),
    "stored order": ("FedAvg", {"shuffle": False, "drop_last": True}),
    "schedules": ("FedSAM", {"lr": "0.2/round", "server_lr": "1/round"}),
    "samplers": ("FedAvg", {"sampler": "shuffled", "weighting": [3, 1, 4, 1, 5, 9, 2, 6]}),
    "available": ("FedSAM", {"available": lambda t: [] if t == 1 else [0, 2, 3, 5, 7]}),
    "median": ("FedCM", {"aggregation": "median", **EVERYBODY}),
    "trimmed mean": ("FedAvg", {"aggregation": "trimmed_mean:0.2", **EVERYBODY}),
    "multi-Krum": ("FedSAM", {"aggregation": "multi_krum:0.3", **EVERYBODY}),
    "norm filter": ("FedAvg", {"aggregation": "norm_filter", "weighting": "samples", **EVERYBODY}),
    "noise": ("FedAvg", NOISE),
    "noise of clients": ("FedSAM", {**LOCAL_NOISE, "aggregation": "median"}),
    "noise and a round without clients": (
        "FedAvgM",
        {**NOISE, "sampler": "bernoulli", "participation": 0.1, "rounds": 8},
    ),
    "noise and measures": ("FedSAM", {**NOISE, "measures": ["sharpness", "consistency"]}),
    "shortened updates": ("SCAFFOLD", {"privacy": fed.Privacy(clip=0.05)}),
    "compression": ("FedAvg", {"compression": fed.TopK(0.2)}),
    "compression and states": ("SCAFFOLD", {"compression": fed.TopK(0.3), "rounds": 4}),
    "bf16": ("FedSAM", {"precision": "bf16"}),
    "bf16 and a dual": ("FedSMOO", {"precision": "bf16"}),
    "measures": ("FedSAM", {"measures": ["train", "sharpness", "drifts", "perturbation_drift", "variances"]}),
    "measures of duals": ("FedSMOO", {"measures": ["dual_gap", "smoothness", "consistency"]}),
    "measures of a path": ("FedLESAM", {"measures": ["estimation_bias", "drifts"]}),
    "all other measures": ("FedAvg", {"measures": fed.NamedMeasures(["sharpness_ascent", "margin"], every=2)}),
    "an own measure": ("SCAFFOLD", {"measures": OwnMeasure()}),
    "personal head": ("FedSMOO", {"local_parameters": "2.*"}),
    "personal head with kept momentum": ("FedSAM", {"local_parameters": "2.*", **KEEP}),
    "kept momentum": ("SCAFFOLD", KEEP),
    "client test sets": ("FedSAM", {"client_test_split": "iid", "metrics": {"mean_output": mean_output}}),
    "excluded clients": ("FedSAM", {"loss": infinite_for_one_sample, "rounds": 4}),
    "client errors": ("SCAFFOLD", {"loss": raise_for_one_sample, "on_client_error": "exclude", **EVERYBODY}),
    "dropout": ("FedSAM", {"module": Dropout}),
    "averaged buffers": ("FedSAM", BATCH_NORM | {"buffers": "average"}, STACKS),
    "kept buffers": ("FedAvg", BATCH_NORM | {"buffers": "keep"}, STACKS),
    "local buffers": ("FedSAM", BATCH_NORM | {"buffers": "local"}, STACKS),
    "FedBN without momentum": ("FedBN", BATCH_NORM | NO_MOMENTUM, STACKS),
    "images": ("FedSAM", {"data": images, "test": images((40,))[0], "module": image_model}),
    "channels_last": (
        "FedSAM",
        {"data": images, "test": images((40,))[0], "module": image_model, "memory_format": "channels_last"},
        STACKS,
    ),
    "augmentation": ("FedSMOO", {"data": augmented, "rounds": 2}),
    "dicts": ("FedSAM", dicts_with("y") | KEEP),
    "dicts with a column of labels": ("FedAvg", dicts_with("labels")),  # the accuracies of clients are known
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.5, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.02),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.3),
    "Lion": partial(Lion, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),  # no rule of the kernels: torch takes the step
}
OWN_STEP = ("Adadelta",)


def cases() -> Iterator[Case]:
    """Yield the options of a run, the local optimizers, the kinds of clients, and runs of two processes."""
    for label, (name, options, *refused) in OPTIONS.items():
        yield from cases_of(label, algorithm_of(name), *refused, **options)
    for label, optimizer in OPTIMIZERS.items():
        refused = (*STACKS, *GRAPHS) if label in OWN_STEP else ()
        options = {"optimizer": optimizer, **NO_MOMENTUM}
        yield from cases_of(f"optimizer {label}", algorithm_of("FedSAM"), refused, **options)
        yield from cases_of(f"kept optimizer {label}", algorithm_of("FedAvg"), refused, **options, **KEEP)
    yield from cases_of("own algorithm", OwnAlgorithm)
    yield from cases_of("own loop", OwnLoop, (*STACKS, *GRAPHS))
    yield from _cases_of_loops()
    yield from _cases_of_clients()
    for executor in ("sequential", "vmap", "streams"):
        yield f"states on the host, {executor}", partial(train_with_device, algorithm_of("SCAFFOLD"), executor)
    for label in RANKS:
        yield f"two ranks: {label}", partial(train_on_ranks, label)


def algorithm_of(name: str) -> Callable[[], Any]:
    """Return a function that makes an algorithm with its defaults."""
    return lambda: getattr(fed, name)()


def _cases_of_loops() -> Iterator[Case]:
    """Yield client loops with dropout, with buffers, and with clipping."""
    for name in LOOPS:
        case = partial(train, algorithm_of(name), "sequential")
        yield f"{name}, dropout", partial(case, module=Dropout)
        yield f"{name}, kept buffers", partial(case, **BATCH_NORM, buffers="keep")
        yield f"{name}, clip and local steps", partial(case, clip_norm=0.05, **STEPS)


def _cases_of_clients() -> Iterator[Case]:
    """Yield kinds of clients, data types, backends, and 100 clients at once."""

    def datasets() -> list[Any]:
        return [torch.utils.data.TensorDataset(x, y) for x, y in clients()]

    def loaders() -> list[Any]:
        return [torch.utils.data.DataLoader([*zip(x, y, strict=True)], batch_size=4) for x, y in clients()]

    def lazy() -> fed.LazyClients:
        return fed.LazyClients(8, clients().__getitem__)

    double = {"data": partial(clients, dtype=torch.float64), "module": partial(model, torch.float64)}
    double["test"] = clients((40,), torch.float64, 9)[0]
    equal, unequal = partial(clients, [16] * 100), partial(clients, [12 + i % 7 for i in range(100)])
    for name in ("FedAvg", "FedSAM", "SCAFFOLD"):
        algorithm = algorithm_of(name)
        yield from cases_of(f"float64 {name}", algorithm, **double)
        for backend in ("foreach", "reference"):
            yield from cases_of(f"{backend} {name}", algorithm, backend=backend)
        yield from cases_of(f"lazy clients without sizes {name}", algorithm, STACKS, data=lazy)
        yield from cases_of(f"data sets {name}", algorithm, data=datasets)
        yield from cases_of(f"loaders {name}", algorithm, data=loaders)
        for label, data in {"100 clients": equal, "100 ragged clients": unequal}.items():
            yield f"{label} {name}, vmap", partial(train, algorithm, "vmap", data, slots=100, **EVERYBODY)
        yield f"100 clients {name}, vmap, own choice of slots", partial(train, algorithm, "vmap", equal, slots=None)


def train_with_device(algorithm: Callable[[], Any], executor: str) -> Outcome:
    """Run with a stand-in for a device of separate memory, so that states are kept on the host and are prefetched."""
    with pytest.MonkeyPatch.context() as patch:
        fed_states.stand_in(patch)
        return train(algorithm, executor, client_state="host", rounds=4)


# name: (algorithm, options)
RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "SCAFFOLD": ("SCAFFOLD", {}),
    "FedSMOO, threads": ("FedSMOO", {"executor": "threads", "slots": 2}),
    "samples": ("FedSAM", {"weighting": "samples"}),
    "buffers": ("FedSAM", BATCH_NORM | {"buffers": "average"}),
    "kept optimizers": ("FedAvg", {"optimizer": OPTIMIZERS["AdamW"], **NO_MOMENTUM, **KEEP}),
    "measures": ("FedSMOO", {"measures": ["dual_gap", "drifts"], **EVERYBODY}),
    "excluded clients": ("SCAFFOLD", {"loss": infinite_for_one_sample, **EVERYBODY}),
}


def train_on_ranks(label: str) -> Outcome:
    """Run on two processes. One process then resumes the complete run: it has the states of all clients."""
    with tempfile.TemporaryDirectory() as folder:
        weights = on_ranks(2, train_rank, label, Path(folder) / "run", patience=300.0)
        if not all(isinstance(answer, dict) for answer in weights):
            raise RuntimeError(f"two ranks answered {weights}")
        states = train_rank(0, label, Path(folder) / "run", resume=True)
    return states | {
        f"rank {rank} {name}": value for rank, answer in enumerate(weights) for name, value in answer.items()
    }


def train_rank(rank: int, label: str, folder: Path, resume: bool = False) -> Outcome:
    """Train on one rank and return the outcome; without `resume` only the weights, which all ranks have."""
    name, options = RANKS[label]
    outcome = train(algorithm_of(name), run_dir=folder, resume=resume, **{"executor": "sequential"} | options)
    return outcome if resume else {key: value for key, value in outcome.items() if key.startswith("weight")}
