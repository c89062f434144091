"""Federated cases of `tools/bits.py`: short runs of small models on ragged clients, and timed rounds."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastsam import fed

SIZES = (7, 12, 1, 22, 12, 7, 5, 30)
COMMON: dict[str, Any] = {"rounds": 3, "participation": 0.8, "batch_size": 5, "local_epochs": 2}
COMMON |= {"momentum": 0.3, "weight_decay": 0.01, "sampler": "fixed"}
NOISE = {"privacy": fed.Privacy(clip=0.5, noise_multiplier=1.0), "momentum": 0.0}
LOCAL_NOISE = {"privacy": fed.Privacy(clip=0.5, noise_multiplier=1.0, noise="local"), "momentum": 0.0}
EVERYBODY = {"participation": 1.0}
STEPS = {"local_steps": 7, "local_epochs": 1}


class OwnAlgorithm(fed.Algorithm):
    """An algorithm as a user writes one: SAM steps, and a count of its rounds in each client."""

    def init_client(self, server: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(())}

    def local_update(self, server: Any, client: Any, round: Any) -> fed.LocalUpdate:
        return fed.LocalUpdate(direction=fed.Direction.GRADIENT, rho=0.1)

    def finish_client(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        return {"rounds": client["rounds"] + 1}, fed.Upload(mean={"delta": results.delta})


class Dropout(nn.Module):
    """A model that draws random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.dropout(x, 0.4, self.training))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a classifier of 6 features in 3 classes, in layers "0" and "2"."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def build_normed() -> nn.Module:
    """Make a classifier with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def clients(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Any]:
    """Make clients with these numbers of samples."""
    g = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]
    return [(x.to(dtype), y) for x, y in pairs]


def infinite_for_one_sample(outputs: Tensor, y: Tensor) -> Tensor:
    """Return a loss that is infinite for batches of one sample, so that one of the clients is excluded."""
    return nn.functional.cross_entropy(outputs, y) / (len(y) > 1)


def mean_output(outputs: Tensor, y: Tensor) -> float:
    return float(outputs.mean())


# Options of the algorithms whose defaults leave out a part of them; all others run with their defaults too.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "Centralised_SAM": {"adaptive": True, "eta": 0.01},
    "FedAdam": {"bias_correction": True},
    "FedCM": {"momentum_K": "epochs"},
    "FedGF": {"rho": 0.2, "rho_g": 0.3, "threshold": 0.15, "window": 2},
    "FedGSAM": {"rho": 0.3, "alpha": 0.4, "rho_min": 0.1, "lr_min": 0.01},
    "FedNSAM": {"perturb": "momentum"},
    "FedRobust": {"ascent_steps": 2, "eta_2": 0.5, "form": "full", "radius": (0.2, 0.1)},
    "FedSAM": {"rho": "linear(0.3, 0.1, 3)", "adaptive": True},
    "FedSCAM": {"rho": 0.6, "beta": 2.0, "kappa": 3.0, "pilots": 1},
    "FedSMOO": {"rho": 0.2, "phi": 0.3, "s_rule": "mu_all"},
    "MOON": {"mu": 2.0, "features": "0"},
    "MimeLite": {"beta": 0.3, "momentum_form": "heavy_ball"},
}
LOOPS = ("FedRobust", "FedGMT", "FedNTD", "FedSOL", "MOON", "FedRep", "Ditto", "pFedMe", "APFL")
NOT_STACKED = (*LOOPS, "FedBN")

# name: (algorithm, options of the run). "model", "sizes" and "slots" are options of `train` below.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("FedLESAM", {"clip_norm": 0.05}),
    "clip of the linear part": ("FedProx", {"clip_norm": 0.05, "clip_scope": "linear", "weighting": "samples"}),
    "clip and a constant perturbation": ("FedLESAM_D", {"clip_norm": 0.05, "clip_scope": "linear"}),
    "no momentum": ("FedSAM", {"momentum": 0.0, "weight_decay": 0.0}),
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
    "noise and a round without clients": ("FedAvgM", {**NOISE, "sampler": "bernoulli", "participation": 0.1}),
    "noise and measures": ("FedSAM", {**NOISE, "measures": ["sharpness", "consistency"]}),
    "shortened updates": ("SCAFFOLD", {"privacy": fed.Privacy(clip=0.05)}),
    "measures": ("FedSAM", {"measures": ["train", "sharpness", "drifts", "perturbation_drift", "variances"]}),
    "measures of duals": ("FedSMOO", {"measures": ["dual_gap", "smoothness", "consistency"]}),
    "measures of a path": ("FedLESAM", {"measures": ["estimation_bias", "drifts"]}),
    "personal head": ("FedSMOO", {"local_parameters": "2.*"}),
    "client test sets": ("FedSAM", {"client_test_split": "iid", "metrics": {"mean_output": mean_output}}),
    "states on disk": ("SCAFFOLD", {"client_state": "disk"}),
    "excluded clients": ("FedSAM", {"loss": infinite_for_one_sample, "rounds": 4}),
}
BATCH_NORM: dict[str, tuple[str, dict[str, Any]]] = {
    "averaged buffers": ("FedSAM", {"buffers": "average"}),
    "kept buffers": ("FedAvg", {"buffers": "keep"}),
    "local buffers": ("FedSAM", {"buffers": "local"}),
    "buffers of FedBN": ("FedBN", {}),
}


def train(
    algorithm: Any,
    executor: str,
    data: Any = None,
    module: nn.Module | None = None,
    parts: Sequence[int] = (),
    **options: Any,
) -> str:
    """Run and return the hashes of the weights, of all states of server and clients, and of the records.

    Args:
        algorithm (fed.Algorithm): the algorithm.
        executor (str): name of the executor.
        data: the clients, by default ragged pairs of tensors.
        module (nn.Module | None): the model, by default a small float32 one.
        parts (Sequence[int]): rounds after which the run is ended and resumed.
        **options: further options of `fed.run`.
    """
    keywords = {**COMMON, "executor": executor, "test": clients((40,), seed=9)[0], **options}
    with tempfile.TemporaryDirectory() as folder:
        for rounds in (*parts, keywords["rounds"]):
            keywords |= {"rounds": rounds, "run_dir": Path(folder) / "run", "checkpoint_every": rounds}
            data = clients() if data is None else data
            try:
                result = fed.run(model() if module is None else module, data, algorithm, **keywords)
            except Exception as error:
                return f"raised {type(error).__name__}: {str(error).splitlines()[0]}"
            keywords["resume"] = True
        states = b"".join(path.read_bytes() for path in sorted((Path(folder) / "run/checkpoint").glob("*.safetensors")))
    weights = b"".join(t.detach().numpy().tobytes() for t in result.model.state_dict().values())
    records = [sorted((k, v) for k, v in record.items() if not k.startswith("seconds")) for record in result.history]
    outcome = {"weights": weights, "states": states, "records": repr(records).encode()}
    return " ".join(f"{name}={hashlib.sha256(content).hexdigest()[:12]}" for name, content in outcome.items())


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of every federated case, and a function that trains it and returns its hashes."""
    yield from _cases_of_algorithms()
    yield from _cases_of_options()
    yield from _cases_of_clients()


def _cases_of_algorithms() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield every algorithm on every kind of executor, and resumed."""
    for cls in fed.algorithms.registry.values():
        name = cls.__name__
        batch_norm = (
            {"data": clients((8, 16, 8, 12)), "module": build_normed(), "batch_size": 4} if name == "FedBN" else {}
        )
        for i, options in enumerate([{}, ALGORITHMS[name]] if name in ALGORITHMS else [{}]):
            algorithm, label = cls(**options), f"{name} {'with options ' if i else ''}"
            yield f"{label}sequential", partial(train, algorithm, "sequential", **batch_norm)
            if name not in NOT_STACKED and not name.startswith("Centralised"):
                yield f"{label}vmap", partial(train, algorithm, "vmap", slots=3)
        yield f"{name} threads resumed", partial(train, cls(), "threads", slots=3, parts=[1], **batch_norm)


def _cases_of_options() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the options of a run, on the executors that serve them."""
    for label, (name, options) in OPTIONS.items():
        for executor in ("sequential", "vmap"):
            yield f"{label}, {executor}", partial(train, getattr(fed, name)(), executor, **options)
        yield f"{label}, threads", partial(train, getattr(fed, name)(), "threads", slots=2, parts=[1], **options)
    for label, (name, options) in BATCH_NORM.items():
        for executor in ("sequential", "threads"):
            case = partial(train, getattr(fed, name)(), executor, clients((8, 16, 8, 12)), build_normed(), **options)
            yield f"{label}, {executor}", partial(case, batch_size=4)
    for executor in ("sequential", "threads"):
        yield f"dropout, {executor}", partial(train, fed.FedSAM(), executor, module=Dropout())
        yield f"own algorithm, {executor}", partial(train, OwnAlgorithm(), executor)
    yield "own algorithm, vmap", partial(train, OwnAlgorithm(), "vmap", slots=3)
    for name in LOOPS:
        case, batch_norm = partial(train, getattr(fed, name)(), "sequential"), clients((8, 16, 8, 12))
        yield f"{name}, dropout", partial(case, module=Dropout())
        yield f"{name}, kept buffers", partial(case, batch_norm, build_normed(), batch_size=4, buffers="keep")
        yield f"{name}, clip and local steps", partial(case, clip_norm=0.05, **STEPS)


def _cases_of_clients() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield kinds of clients, data types, backends, and 100 clients at once."""
    datasets = [torch.utils.data.TensorDataset(x, y) for x, y in clients()]
    loaders = [torch.utils.data.DataLoader([*zip(x, y, strict=True)], batch_size=4) for x, y in clients()]
    equal_clients, unequal_clients = clients([16] * 100), clients([12 + i % 7 for i in range(100)])
    for name in ("FedAvg", "FedSAM", "SCAFFOLD"):
        algorithm = getattr(fed, name)()
        for executor in ("sequential", "vmap"):
            double = {"data": clients(dtype=torch.float64), "module": model(torch.float64)}
            double["test"] = clients((40,), torch.float64, 9)[0]
            yield f"float64 {name}, {executor}", partial(train, algorithm, executor, **double)
            for backend in ("foreach", "reference"):
                yield f"{backend} {name}, {executor}", partial(train, algorithm, executor, backend=backend)
        for executor in ("sequential", "threads"):
            for label, data in {
                "lazy clients": fed.LazyClients(8, clients().__getitem__),
                "data sets": datasets,
            }.items():
                yield f"{label} {name}, {executor}", partial(train, algorithm, executor, data)
        yield f"loaders {name}", partial(train, algorithm, "sequential", loaders)
        for label, data in {"100 clients": equal_clients, "100 ragged clients": unequal_clients}.items():
            yield f"{label} {name}, vmap", partial(train, algorithm, "vmap", data, slots=100, **EVERYBODY)
        yield f"100 clients {name}, vmap, own choice of slots", partial(train, algorithm, "vmap", equal_clients)


def timings() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield rounds of 20 and of 100 among 100 clients, as functions that return processor seconds a round."""
    for name in ("FedAvg", "FedSAM"):
        for executor in ("sequential", "vmap"):
            for cohort in (20, 100):
                yield f"{name}, {executor}, {cohort} clients", partial(seconds_per_round, name, executor, cohort)
    for name in LOOPS:
        yield f"{name}, sequential, 20 clients", partial(seconds_per_round, name, "sequential", 20)


def seconds_per_round(name: str, executor: str, cohort: int) -> float:
    """Train a small model on 100 clients and return the median processor time of a round, without the first two."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    data = [(torch.randn(64, 64), torch.randint(10, (64,))) for _ in range(100)]
    marks: list[float] = []
    rounds = 2 + (10 if executor == "sequential" else 60) * 20 // cohort
    fed.run(
        module, data, getattr(fed, name)(), rounds=rounds, participation=cohort / 100, sampler="fixed",
        executor=executor, eval_every=rounds, progress=lambda record: marks.append(time.process_time()),
    )  # fmt: skip
    return statistics.median(end - start for start, end in pairwise(marks[1:]))
