"""Functions of the ranks of tests/fed/sums/test_ranks.py; see `rank_group`."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.algorithms.base import Upload
from fastsam.fed.sums.fixed_point import FixedPointAggregate
from fastsam.fed.sums.ranks import Ranks, join_ranks
from tests.helpers import oracle
from tests.helpers.fed_ranks import SIZES
from tests.helpers.fed_rundir import Alarm
from tests.helpers.fed_runs import cross_entropy_until, digest, fail, norm_model
from tests.helpers.sums import add_client_


class Sometimes(fed.FedAvg):
    """Keeps a state in even rounds only, and uploads a name that only clients with an odd number of samples have."""

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        _, upload = super().finish(server, client, results, round)
        state = {} if round.index % 2 else {"h": results.delta.clone()}
        total = {"odd": results.delta} if results.num_samples[0] % 2 else {}  # the executor closes them one by one
        return state, Upload(upload.mean, total)


class Poisoned:
    """A loss that is not finite for inputs above a bound: some clients are excluded."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        return loss * float("nan") if float(output.detach().abs().max()) > self.bound else loss


class Raised(Poisoned):
    """A loss that raises there."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if not bool((loss := super().__call__(output, target)).isfinite()):
            raise ValueError("beyond the bound")
        return loss


CASES: dict[str, dict[str, Any]] = {
    "fewer clients than ranks": {"participation": 0.1, "sampler": "fixed", "algorithm": fed.SCAFFOLD()},
    "state that comes and goes": {"algorithm": Sometimes(), "rounds": 5, "participation": 0.9},
    "buffers": {"model": norm_model, "buffers": "average", "algorithm": fed.FedSAM(rho=0.05), "batch_size": 8,
        "sizes": (8, 16, 24, 8)},
    "measures": {
        "algorithm": fed.FedSMOO(rho=0.05), "participation": 1.0,
        "measures": ["consistency", "drifts", "smoothness", "perturbation_drift", "dual_gap", "sharpness"],
    },
    "excluded": {"algorithm": fed.SCAFFOLD(), "loss": Poisoned(0.8), "participation": 1.0},
    "client error": {"algorithm": fed.SCAFFOLD(), "loss": Raised(0.8), "participation": 1.0,
        "on_client_error": "exclude"},
    "noise": {
        "algorithm": fed.FedSAM(rho=0.05), "participation": 0.3,
        "privacy": fed.Privacy(clip=0.01, noise_multiplier=1.0, accountant=None),
    },
    "noise of the clients": {
        "algorithm": fed.FedAvg(), "participation": 0.9,
        "privacy": fed.Privacy(clip=0.01, noise_multiplier=1.0, noise="local", accountant=None),
    },
    "outlier": {"algorithm": fed.FedAvg(), "participation": 1.0, "poison": 1e6, "model": lambda: nn.Linear(6, 3)},
    "checkpoints now and then": {"algorithm": fed.SCAFFOLD(), "checkpoint_every": 3, "rounds": 4},
    "stopped": {"algorithm": fed.SCAFFOLD(), "rounds": 9, "callbacks": [Alarm(2, fed.Stop("by the test"))]},
    "some available": {"algorithm": fed.SCAFFOLD(), "rounds": 4, "available": lambda t: [] if t == 1 else range(t, 6)},
    "own weights": {"algorithm": fed.FedSAM(), "weighting": lambda i: i + 1},
    "kept optimizers": {"algorithm": fed.FedAvg(), "optimizer": "AdamW", "lr": 0.01, "optimizer_state": "keep"},
    "kept optimizers of torch": {"algorithm": fed.FedAvg(), "optimizer": "Adadelta", "optimizer_state": "keep"},
    "threads": {"algorithm": fed.FedDyn(), "executor": "threads", "slots": 2},
}  # fmt: skip


def train(rank: int, case: dict[str, Any], run_dir: Path | None = None, **more_options: Any) -> tuple[str, float, int]:
    """Return the hash of a run, its state in megabytes, and the number of excluded clients and outliers."""
    defaults: Any = {"rounds": 3, "batch_size": 5, "participation": 0.6, "executor": "sequential"}
    options = defaults | case | more_options
    clients = oracle.ragged_clients(torch.float32, options.pop("sizes", SIZES))
    clients[3] = (options.pop("poison", 1.0) * clients[3][0], clients[3][1])
    torch.manual_seed(0)
    model = options.pop("model", lambda: oracle.smooth_model(torch.float32))()
    result = fed.run(model, clients, options.pop("algorithm"), run_dir=run_dir, test=clients[0], **options)
    problems = sum(len(r["excluded"]) + len(r["outliers"]) for r in result.history)
    return digest(result), result.summary()["state_megabytes"], problems


def train_all(rank: int, folder: Path | None) -> dict[str, Any]:
    folders = {name: folder and folder / name.replace(" ", "-") for name in CASES}
    return {name: train(rank, case, folders[name]) for name, case in CASES.items()}


def other_directories(rank: int, folder: Path) -> Any:
    """Train with a different directory on each rank, and without a directory on rank 2."""
    directory = [folder / "first", folder / "second", None][rank]
    return train(rank, {"algorithm": fed.SCAFFOLD(), "rounds": 2}, directory)[0]


def fails_on_rank_1(rank: int, folder: Path) -> Any:
    """Train with a loss that raises an error on rank 1 in a later round."""
    loss = cross_entropy_until(20 if rank == 1 else 0, lambda: fail(ValueError("bad labels")))
    return train(rank, {"algorithm": fed.SCAFFOLD(), "rounds": 4, "loss": loss}, folder)


def interrupt_run(rank: int, folder: Path) -> Any:
    """Send Ctrl-C on rank 0 after the second round, inside another `join_ranks` as in a command."""

    def progress(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt("by the user")

    with join_ranks():
        return train(rank, {"algorithm": fed.SCAFFOLD(), "rounds": 4, "progress": progress}, folder)


def resume_run(rank: int, folder: Path, rounds: int) -> Any:
    return train(rank, {"algorithm": fed.SCAFFOLD(), "rounds": rounds}, folder, resume=True)


def robust(rank: int) -> Any:
    return train(rank, {"algorithm": fed.FedAvg(), "aggregation": "median"})


def other_weights(rank: int) -> Any:
    def model() -> nn.Module:
        torch.manual_seed(rank)
        return nn.Linear(6, 3)

    return train(rank, {"algorithm": fed.FedAvg(), "model": model})


def own_dice(rank: int) -> Any:
    """Train with a sampler that draws from a generator of its process."""
    dice = random.Random(rank)
    return train(rank, {"algorithm": fed.SCAFFOLD(), "sampler": lambda t, g: dice.sample(range(len(SIZES)), 4)})[0]


W = torch.zeros(3)


class CollectiveCounter:
    """While it lasts: the collectives of this process, by name."""

    NAMES = ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "send_object_list", "barrier")

    def __enter__(self) -> Counter[str]:
        calls: Counter[str] = Counter()

        def count_calls(name: str, work: Any) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                calls[name] += 1
                return work(*arguments, **keywords)

            return call

        self.originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, work in self.originals.items():
            setattr(dist, name, count_calls(name, work))
        return calls

    def __exit__(self, *error: object) -> None:
        for name, work in self.originals.items():
            setattr(dist, name, work)


def exchange_states(rank: int) -> list[dict[str, Any]]:
    """Return sums of six rounds of eight clients; only the last rank has "late", in rounds 3 and 4."""
    ranks = Ranks(rank, dist.get_world_size()) if dist.is_initialized() else Ranks()
    records = []
    for t in range(6):
        aggregate = FixedPointAggregate(8, 3)
        client_ids = [i for i in range(8) if i % ranks.size == ranks.rank]
        for i in client_ids:
            x = torch.tensor([0.1, -3.0, 1e-7]) * (i + 1 + t)
            is_late = t in (3, 4) and i == 7
            total, number = ({"late": x[:2]}, {"late": 0.1}) if is_late else ({}, {})
            assert add_client_(aggregate, i % 3 + 1, {"a": x}, total, {"loss": 0.1 * i, **number}) is None
        with CollectiveCounter() as calls:
            if ranks.size > 1:
                aggregate.add_ranks(ranks, W)
        record = {"mean a": aggregate.mean("a").tolist(), "number loss": aggregate.scalar("loss")}
        record |= {
            "clients": aggregate.num_clients,
            "weight": aggregate.weight,
            "number late": aggregate.scalar("late"),
        }
        try:
            record["total late"] = aggregate.sum("late").tolist()
        except KeyError as error:
            record["nobody"] = str(error)
        records.append({"sums": record, "calls": dict(calls)})
    return records


def of_other_shape(rank: int) -> Any:
    ranks = Ranks(rank, dist.get_world_size())
    aggregate = FixedPointAggregate(2, 1)
    add_client_(aggregate, 1, {"a": torch.ones(3 + rank)}, {}, {})
    aggregate.add_ranks(ranks, W)


def collectives(rank: int, rounds: int) -> dict[str, int]:
    """Return the number of calls of each collective in a run of `rounds` rounds."""
    with CollectiveCounter() as calls:
        train(rank, {"algorithm": fed.SCAFFOLD(), "rounds": rounds, "participation": 1.0, "sizes": (4, 4, 4, 4)})
    return dict(calls)
