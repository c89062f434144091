"""Local epochs of stacked clients as captured graphs, with a stand-in for CUDA: the bits of the same steps one by one,
in an order that holds."""

import pytest
import torch

from fastsam import fed
from fastsam.fed.executors import epoch_graphs
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fake_devices import install_epochs
from tests.helpers.fed_runs import digest

CASES = {
    "fedavg": fed.FedAvg(), "fedsam": fed.FedSAM(rho=0.05), "adaptive": fed.FedSAM(rho=0.05, adaptive=True),
    "fedgsam": fed.FedGSAM(rho=0.05), "fedsmoo": fed.FedSMOO(rho=0.05), "fedlesam": fed.FedLESAM(rho=0.05),
    "fedscam": fed.FedSCAM(rho=0.3), "scaffold": fed.SCAFFOLD(),
}  # fmt: skip
EVEN = (6,) * 3  # a whole batch and a partial one


@pytest.fixture
def capture_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs capture, in `FakeCuda.graphs`."""
    install_epochs(monkeypatch)


def train(algorithm: object, sizes: tuple[int, ...] = EVEN, clients: object = None, **options: object) -> str:
    clients = oracle.ragged_clients(torch.float32, sizes) if clients is None else clients
    keywords = {
        "rounds": 3, "batch_size": 4, "local_epochs": 2, "participation": 1.0, "momentum": 0.3, "slots": 3,
    } | options  # fmt: skip
    model = oracle.smooth_model(torch.float32)
    return digest(fed.run(model, clients, algorithm, executor="vmap", backend="reference", **keywords))


CLIPPED = {"clip_norm": 0.5, "weight_decay": 0.01}


QUICK = ("fedsmoo",)  # a Watch keeps all memory and looks at every operation; the others: `make test-slow`


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, marks=() if name in QUICK else pytest.mark.slow) for name in CASES),
        pytest.param("fedsam", CLIPPED, marks=pytest.mark.slow),
        pytest.param("fedlesam", CLIPPED, marks=pytest.mark.slow),
    ],
)
def test_a_captured_epoch_has_the_bits_of_its_steps(name: str, options: dict, request: pytest.FixtureRequest) -> None:
    """Every replay reads and writes the memory that the capture did, and waits for nothing; two streams touch nothing
    without a wait between."""
    plain = train(CASES[name], **options)
    request.getfixturevalue("capture_epochs")
    with Watch():
        assert train(CASES[name], **options) == plain
    assert [graph.replays for graph in FakeCuda.graphs] == [4]  # the first two epochs of a shape run without a graph


@pytest.mark.usefixtures("capture_epochs")
def test_an_epoch_is_captured_once_not_per_round() -> None:
    for rounds in (2, 4):
        train(fed.FedSAM(rho=0.05), rounds=rounds)
        assert len(FakeCuda.graphs) == 1 and FakeCuda.graphs[0].trace == []  # the trace is empty without a watch


def test_epochs_of_dicts_are_captured(request: pytest.FixtureRequest) -> None:
    clients = [{"x": x, "labels": y} for x, y in oracle.ragged_clients(torch.float32, EVEN)]
    loss = fed.BatchLoss(lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"]))
    plain = train(fed.FedSAM(rho=0.05), clients=clients, loss=loss)
    request.getfixturevalue("capture_epochs")
    with Watch():
        assert train(fed.FedSAM(rho=0.05), clients=clients, loss=loss) == plain
    assert [graph.replays for graph in FakeCuda.graphs] == [4]


@pytest.mark.usefixtures("capture_epochs")
def test_graphs_are_released_together_at_the_end_of_a_run() -> None:
    train(fed.FedSMOO(rho=0.05))
    assert FakeCuda.ends == ["synchronize", "end"]


@pytest.mark.slow
@pytest.mark.usefixtures("capture_epochs")
def test_clients_that_are_not_alike_train_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They step together while their batches have equal shapes; the remaining client uses a graph of its
    epoch_graphs."""
    ragged_sizes = (6, 7, 3)
    actual = train(fed.FedSAM(rho=0.05), ragged_sizes)
    monkeypatch.setattr(epoch_graphs, "epoch_graphs_of", lambda setup: None)
    assert train(fed.FedSAM(rho=0.05), ragged_sizes) == actual


@pytest.mark.usefixtures("capture_epochs")
def test_a_model_whose_passes_are_not_replayed_is_not_captured() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = oracle.smooth_model(torch.float32), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x)

    clients = oracle.ragged_clients(torch.float32, EVEN)
    options = {"rounds": 4, "batch_size": 4, "participation": 1.0, "slots": 3, "backend": "reference"}
    fed.run(Counts(), clients, fed.FedAvg(), executor="vmap", **options)
    assert FakeCuda.graphs == []


@pytest.mark.usefixtures("capture_epochs")
@pytest.mark.parametrize("algorithm", [fed.FedSOL(rho=0.5), fed.FedNTD()])
def test_objectives_are_not_captured(algorithm: fed.Algorithm) -> None:
    """They run through Python, which a capture might freeze."""
    train(algorithm)
    assert FakeCuda.graphs == []


@pytest.mark.usefixtures("capture_epochs")
def test_steps_that_a_measure_keeps_are_not_captured() -> None:
    train(fed.FedSAM(rho=0.05), measures=["perturbation_drift"])
    assert FakeCuda.graphs == []


@pytest.mark.slow
@pytest.mark.usefixtures("capture_epochs")
def test_no_more_graphs_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers of samples: two sorts of epoch_graphs, of which one has a graph."""
    monkeypatch.setattr(epoch_graphs, "MAX_GRAPHS", 1)
    plain = train(fed.FedAvg(), (6, 6, 3, 3), slots=2)
    assert len(FakeCuda.graphs) == 1
    monkeypatch.setattr(epoch_graphs, "epoch_graphs_of", lambda setup: None)
    assert train(fed.FedAvg(), (6, 6, 3, 3), slots=2) == plain


@pytest.mark.slow
@pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")
@pytest.mark.usefixtures("capture_epochs")
@pytest.mark.parametrize(("name", "graphs"), [("fedsam", 0), ("fedsmoo", 1)])
def test_row_programs_come_before_graphs(name: str, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch in one launch needs no graph; steps with duals are captured, including their row programs."""
    original, calls = RowSteps._train, []
    monkeypatch.setattr(RowSteps, "_train", lambda *operands: (calls.append(1), original(*operands)))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    clients = [(torch.randn(6, 64), torch.randint(4, (6,))) for _ in range(3)]
    fed.run(
        model, clients, CASES[name], executor="vmap", slots=3, rounds=3, batch_size=4, local_epochs=2, participation=1.0
    )
    assert bool(calls) == (graphs == 0) and len(FakeCuda.graphs) == graphs
