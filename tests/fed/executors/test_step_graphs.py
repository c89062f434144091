"""Local steps of stacked clients as captured graphs, with a stand-in for CUDA: the bits of the same steps one by one,
in an order that holds, and few graphs."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.fed.executors import step_graphs
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.attending import Reader, texts
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fake_devices import install_step_graphs
from tests.helpers.fed_runs import digest

FLOAT = torch.float32
CASES = {
    "fedavg": fed.FedAvg(), "fedsam": fed.FedSAM(rho=0.05), "adaptive": fed.FedSAM(rho=0.05, adaptive=True),
    "fedgsam": fed.FedGSAM(rho=0.05), "fedsmoo": fed.FedSMOO(rho=0.05), "fedlesam": fed.FedLESAM(rho=0.05),
    "fedscam": fed.FedSCAM(rho=0.3), "fedswa": fed.FedSWA(), "scaffold": fed.SCAFFOLD(),
}  # fmt: skip
EQUAL = (6,) * 3  # a whole batch and a partial one
UNEQUAL = (6, 15, 9, 12, 3)  # more clients than slots


@pytest.fixture(autouse=True)
def capture_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs capture, in `FakeCuda.graphs`."""
    install_step_graphs(monkeypatch)


def train(
    algorithm: Any, sizes: tuple[int, ...] = EQUAL, clients: Any = None, model: Any = None, **options: Any
) -> str:
    clients = oracle.ragged_clients(FLOAT, sizes) if clients is None else clients
    keywords = {
        "rounds": 3, "batch_size": 4, "local_epochs": 2, "participation": 1.0, "momentum": 0.3, "slots": 3,
    } | options  # fmt: skip
    model = oracle.smooth_model(FLOAT) if model is None else model
    return digest(fed.run(model, clients, algorithm, executor="vmap", backend="reference", **keywords))


def uncaptured(monkeypatch: pytest.MonkeyPatch, work: Callable[[], str]) -> str:
    """Return the result of a run that captures nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(step_graphs, "MAX_GRAPHS", 0)
        result = work()
    assert FakeCuda.graphs == []
    return result


def num_replays() -> int:
    return sum(graph.replays for graph in FakeCuda.graphs)


CLIPPED = {"clip_norm": 0.5, "weight_decay": 0.01}
QUICK = ("fedsmoo",)  # a Watch keeps all memory and looks at every operation; the others: `make test-slow`


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, marks=() if name in QUICK else pytest.mark.slow) for name in CASES),
        pytest.param("fedsam", CLIPPED, marks=pytest.mark.slow),
        pytest.param("fedlesam", CLIPPED, marks=pytest.mark.slow),
    ],
)
def test_captured_steps_have_the_bits_of_steps_that_are_not(
    name: str, options: dict, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every replay reads and writes the memory that the capture did, and waits for nothing; two streams touch nothing
    without a wait between."""
    plain = uncaptured(monkeypatch, lambda: train(CASES[name], sizes, **options))
    with Watch():
        assert train(CASES[name], sizes, **options) == plain
    assert num_replays() >= 4


def test_a_step_is_captured_once_not_per_round() -> None:
    counts = []
    for rounds in (2, 6):
        train(fed.FedSAM(rho=0.05), UNEQUAL, rounds=rounds)
        counts.append(len(FakeCuda.graphs))
        assert FakeCuda.graphs[0].trace == []  # the trace is empty without a watch
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("samples", "replays"), [(32, 1), (28, 3), (30, 4)], ids=["8", "4 + 2 + 1", "7 and a part"])
def test_equal_steps_are_replayed_together(samples: int, replays: int) -> None:
    """Powers of two of the whole batches that all clients have left."""
    counts = list[int]()
    train(
        fed.FedAvg(), (samples, samples), local_epochs=1, rounds=4, slots=2,
        progress=lambda record: counts.append(num_replays()),
    )  # fmt: skip
    assert counts[3] - counts[2] == replays


def test_batches_of_dicts_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [{"x": x, "labels": y} for x, y in oracle.ragged_clients(FLOAT, UNEQUAL)]
    loss = fed.BatchLoss(lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"]))

    def work() -> str:
        return train(fed.FedSAM(rho=0.05), clients=clients, loss=loss)

    assert uncaptured(monkeypatch, work) == work()
    assert num_replays() >= 4


def test_graphs_are_released_together_at_the_end_of_a_run() -> None:
    train(fed.FedSMOO(rho=0.05), UNEQUAL)
    assert FakeCuda.ends == ["synchronize"] + ["end"] * len(FakeCuda.graphs)


def test_a_model_whose_passes_are_not_replayed_is_not_captured() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = oracle.smooth_model(FLOAT), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x)

    train(fed.FedAvg(), model=Counts(), rounds=4)
    assert FakeCuda.graphs == []


@pytest.mark.parametrize("algorithm", [fed.FedSOL(rho=0.5), fed.FedNTD()])
def test_objectives_are_not_captured(algorithm: fed.Algorithm) -> None:
    """They run through Python, which a capture might freeze."""
    train(algorithm)
    assert FakeCuda.graphs == []


def test_steps_that_a_measure_keeps_are_not_captured() -> None:
    train(fed.FedSAM(rho=0.05), measures=["perturbation_drift"])
    assert FakeCuda.graphs == []


def test_no_more_graphs_than_are_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says that other sorts of steps are slower, once."""
    plain = uncaptured(monkeypatch, lambda: train(fed.FedAvg(), UNEQUAL))
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    with caplog.at_level("WARNING", logger="fastsam.fed"):
        assert train(fed.FedAvg(), UNEQUAL) == plain
    assert len(FakeCuda.graphs) == 2
    assert [m.startswith("2 sorts of steps are captured") for m in caplog.messages].count(True) == 1


def bad_batch(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that refuses batches of three samples."""
    if len(y) == 3:
        raise ValueError("a batch of three")
    return torch.nn.functional.cross_entropy(scores, y)


def test_captures_stay_where_clients_are_excluded() -> None:
    train(fed.FedSAM(rho=0.05), (16, 16, 7, 16), loss=bad_batch, on_client_error="exclude", max_excluded=0.5, rounds=5)
    assert num_replays() >= 4


def test_few_graphs_for_unequal_clients() -> None:
    """20 of 100 clients a round, of 8 to 120 samples, in batches of 16."""
    draw, graphs = torch.Generator().manual_seed(0), list[int]()
    sizes = tuple(torch.randint(8, 121, (100,), generator=draw).tolist())
    options = {"rounds": 30, "batch_size": 16, "local_epochs": 1, "participation": 0.2, "slots": 20}
    train(
        fed.FedAvg(), sizes, clients=oracle.ragged_clients(FLOAT, sizes),
        progress=lambda record: graphs.append(len(FakeCuda.graphs)), **options,
    )  # fmt: skip
    assert graphs[-1] <= 32 and graphs[-1] - graphs[2] <= 4, graphs


@pytest.mark.slow
def test_a_steady_round_of_a_transformer_has_few_operations_of_the_host() -> None:
    """20 unequal clients; an operation that no graph holds costs the host some microseconds."""
    draw, counts = torch.Generator().manual_seed(0), list[int]()
    clients = texts(tuple(torch.randint(4, 33, (20,), generator=draw).tolist()), 8)
    with Watch() as watch:
        train(
            fed.FedAvg(), clients=clients, model=Reader(is_masked=False), rounds=6, local_epochs=1, slots=20,
            batch_size=8, progress=lambda record: (counts.append(watch.host_operations), watch.alive.clear()),
        )  # fmt: skip
    rounds = [after - before for before, after in pairwise(counts)]
    assert rounds[-1] <= 200, rounds


@pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")
@pytest.mark.parametrize(("name", "graphs"), [("fedsam", 0), ("fedsmoo", 3)])
def test_row_programs_come_before_graphs(name: str, graphs: int) -> None:
    """All steps in one launch need no graph; steps with their own `__call__` are captured, including row programs, for
    each size of a batch."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    clients = [(torch.randn(n, 64), torch.randint(4, (n,))) for n in (6, 9, 13)]
    options = {"rounds": 3, "batch_size": 4, "local_epochs": 2, "participation": 1.0}
    fed.run(model, clients, CASES[name], executor="vmap", slots=3, **options)
    assert len(FakeCuda.graphs) == graphs
