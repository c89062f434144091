"""Federated cases of `tools/bits.py`: every algorithm on every executor, with short runs on ragged clients.

`tools/bits_options.py` has the options of a run, and `tools/bits_rounds.py` the timed rounds. A case is one run. Its
hashes are of every weight, every tensor of the states of server and clients, and every key of the records. Executors
for GPUs run on the stand-in for CUDA of the tree that is measured. The numbers of captures and replays are in the
outcome too, and a run with `graph` that replays nothing fails.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import fake_devices
from tests.helpers.fake_cuda import FakeCuda

Outcome = dict[str, str]
Case = tuple[str, Callable[[], Outcome]]

SIZES = (7, 12, 1, 22, 12, 7, 5, 30)
COMMON: dict[str, Any] = {"rounds": 3, "participation": 0.8, "batch_size": 5, "local_epochs": 2}
COMMON |= {"momentum": 0.3, "weight_decay": 0.01, "sampler": "fixed"}
NO_MOMENTUM = {"momentum": 0.0, "weight_decay": 0.0}  # where an optimizer brings its own
EXECUTORS = ("sequential", "threads", "vmap", "streams", "graph")
ON_GPU = ("streams", "graph")
SLOTS = {"threads": 2, "vmap": 3, "streams": 3, "graph": 3}

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
LOOPS = ("FedRobust", "MOON", "FedRep", "Ditto", "pFedMe", "APFL")
NOT_CAPTURED = ("Centralised_SGD", "Centralised_SAM", "FedGMT", "FedNTD", "FedSOL")  # one client; objectives


# ---- models and clients


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a classifier of 6 features in 3 classes, in layers "0" and "2"."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def norm_model() -> nn.Module:
    """Make a classifier with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def clients(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Any]:
    """Make clients with these numbers of samples."""
    g = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]
    return [(x.to(dtype), y) for x, y in pairs]


WHOLE_BATCHES = partial(clients, (8, 16, 8, 12))  # in batches of 4, so that BatchNorm has no batch of one sample
BATCH_NORM: dict[str, Any] = {"data": WHOLE_BATCHES, "module": norm_model, "batch_size": 4}


# ---- a run and its outcome


class _LastRun(fed.Callback):
    """A callback that keeps the view of the run.

    It is the only place that knows where a tree keeps the states; no public name has the states of all clients.
    """

    run: Any = None  # stays None on a rank other than 0, which calls no callback

    def on_start(self, run: Any) -> None:
        self.run = run

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of every state after the last round."""
        if self.run is None:
            return
        state = self.run._state
        for name, value in state.server.items():
            yield f"server.{name}", value
        for number, value in enumerate(state.buffers):
            yield f"buffer.{number}", value
        for client, values in sorted(state.clients.items()):
            for name, value in values.items():
                yield f"client {client}.{name}", value


def train(
    algorithm: Callable[[], Any],
    executor: str,
    data: Callable[[], Any] = clients,
    module: Callable[[], nn.Module] = model,
    parts: Sequence[int] = (),
    **options: Any,
) -> Outcome:
    """Run and return the hashes of the weights, of all states of server and clients, and of the records.

    Args:
        algorithm (Callable): function that makes the algorithm.
        executor (str): name of the executor.
        data (Callable): function that makes the clients, by default ragged pairs of tensors.
        module (Callable): function that makes the model, by default a small float32 one.
        parts (Sequence[int]): rounds after which the run is ended and resumed.
        **options: further options of `fed.run`.
    """
    keywords = {**COMMON, "slots": SLOTS.get(executor), "test": clients((40,), seed=9)[0], **options}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if executor in ON_GPU:
            fake_devices.install(patch)
        captures = count_captures()
        for rounds in (*parts, keywords["rounds"]):
            keywords |= {"rounds": rounds, "callbacks": [last := _LastRun()], "executor": executor}
            if parts:
                keywords |= {"run_dir": Path(folder) / "run", "checkpoint_every": rounds}
            result = fed.run(module(), data(), algorithm(), **keywords)
            keywords["resume"] = bool(parts)
        outcome = outcome_of(result, last)
    return outcome | captures()


def outcome_of(result: fed.Result, last: _LastRun) -> Outcome:
    """Return the hash of each weight, of each tensor of a state, and of each key of the records."""
    tensors = {f"weight {name}": value for name, value in result.model.state_dict().items()}
    outcome = {name: hash_of(value) for name, value in (tensors | dict(last.tensors())).items()}
    for key in sorted({key for record in result.history for key in record if not key.startswith("seconds")}):
        values = [(record["round"], record[key]) for record in result.history if key in record]
        outcome[f"record {key}"] = _digest(repr(values).encode())
    return outcome


def hash_of(tensor: Tensor) -> str:
    """Return the hash of the type, the shape and the bits of a tensor."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _digest(f"{tensor.dtype} {list(tensor.shape)} ".encode() + bits)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def refusal(run: Callable[[], Outcome]) -> Outcome:
    """Return the type of the error with which a run is refused. Raises RuntimeError if it is not refused."""
    try:
        run()
    except ValueError as error:
        return {"refused": type(error).__name__}
    raise RuntimeError("this combination was refused and is not refused any more: take it out of the refused ones")


def cases_of(label: str, algorithm: Callable[[], Any], refused: Collection[str] = (), **options: Any) -> Iterator[Case]:
    """Yield a case for every executor. Executors in `refused` must refuse the run. `threads` resumes it."""
    for executor in EXECUTORS:
        case = partial(train, algorithm, executor, **options)
        if executor == "threads" and executor not in refused:
            case = partial(case, parts=[1])
        if executor == "graph":
            case = partial(replayed, case)
        yield f"{label}, {executor}", partial(refusal, case) if executor in refused else case


# ---- the stand-in for CUDA


def count_captures() -> Callable[[], Outcome]:
    """Return a function that counts the captures and replays from now on."""
    FakeCuda.graphs = []

    def counts() -> Outcome:
        graphs = FakeCuda.graphs
        return {"captures": str(len(graphs)), "replays": str(sum(graph.replays for graph in graphs))}

    return counts


def replayed(run: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a run that must replay captured work."""
    outcome = run()
    if outcome["replays"] == "0":
        raise RuntimeError("no captured step was replayed")
    return outcome


def train_captured(algorithm: Callable[[], Any], **options: Any) -> Outcome:
    """Run stacked clients of equal sizes, whose steps are captured, and return the outcome with the counts."""
    with pytest.MonkeyPatch.context() as patch:
        fake_devices.install_step_graphs(patch)
        data, keywords = partial(clients, [12] * 6), {"backend": "reference"}
        return train(algorithm, "vmap", data, **keywords | {"rounds": 4, "participation": 1.0} | options)


# ---- the cases


def options_of(cls: type) -> dict[str, Any]:
    """Return the options of `train` that an algorithm needs."""
    options: dict[str, Any] = dict(BATCH_NORM) if cls.__name__ == "FedBN" else {}
    return options | (NO_MOMENTUM if getattr(cls, "local_optimizer", None) else {})


def cases() -> Iterator[Case]:
    """Yield every algorithm on every kind of executor. Functions make the algorithms, so that a tree without one of
    them, or without one of its options, has only that case less."""
    for name, cls in ((cls.__name__, cls) for cls in fed.algorithms.registry.values()):
        refused = REFUSED.get(name, ())
        yield from cases_of(name, cls, refused, **options_of(cls))
        if name in ALGORITHMS:
            yield from cases_of(f"{name} with options", partial(cls, **ALGORITHMS[name]), refused, **options_of(cls))
        if "vmap" not in refused:
            case = partial(train_captured, cls, **options_of(cls))
            yield f"{name}, captured stacks", case if name in NOT_CAPTURED else partial(replayed, case)


REFUSED: dict[str, Sequence[str]] = {
    **dict.fromkeys(LOOPS, ("vmap", "graph")),
    "FedBN": ("vmap",),
}
