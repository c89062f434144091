"""Tests of models that draw random numbers, and of batches that are trees of tensors, under `streams` and `graph`.

Without a GPU the order of work is tested with a stand-in for CUDA.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fed_runs import digest

EXECUTORS = ("streams", "graph")
SIZES = (7, 10, 1, 12, 11)


class Drops(nn.Module):
    """A model with dropout, in evaluation mode too, so that passes for a first gradient draw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = oracle.smooth_model(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.4))


class Noise(torch.autograd.Function):
    """Noise on a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 0.1 * torch.randn_like(gradients[0])


class DrawsInBackward(Drops):
    def forward(self, x: Tensor) -> Tensor:
        return Noise.apply(super().forward(x))


class ReadsDict(nn.Module):
    """A model whose inputs are the entries of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = oracle.smooth_model(torch.float32)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.inner(x * scale[:, None])


def loss_of_dict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["scale"]), batch["label"])


def loss_of_tuple(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def as_dict(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "scale": 1 + x[:, 0].abs(), "label": y}


class Rows(Dataset):
    """A client whose samples are read one by one, under random numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = self.x[i] + 0.01 * torch.randn(6)
        return {"x": x, "scale": torch.tensor(1.5), "label": self.y[i]}


PAIRS = oracle.ragged_clients(torch.float32, SIZES)
ALGORITHMS = {
    "fedavg": fed.FedAvg(), "fedsam": fed.FedSAM(rho=0.05), "fedsmoo": fed.FedSMOO(rho=0.05),
    "mimelite": fed.MimeLite(), "fedlesam": fed.FedLESAM(rho=0.05), "fedntd": fed.FedNTD(),
}  # fmt: skip
DRAWS = {"dropout": Drops, "draws in the backward pass": DrawsInBackward}
TREES: dict[str, tuple[list[Any], fed.BatchLoss]] = {
    "dicts": ([as_dict(*pair) for pair in PAIRS], fed.BatchLoss(loss_of_dict)),
    "tuples": ([TensorDataset(*as_dict(*pair).values()) for pair in PAIRS], fed.BatchLoss(loss_of_tuple)),
    "data sets": ([Rows(*pair) for pair in PAIRS], fed.BatchLoss(loss_of_dict)),
}


def train(name: str, executor: str, model: type[nn.Module], clients: Any = PAIRS, **options: Any) -> str:
    keywords = {"rounds": 2, "batch_size": 5, "local_epochs": 2, "participation": 0.8} | options
    return digest(fed.run(model(), clients, ALGORITHMS[name], executor=executor, **keywords))


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("case", DRAWS)
def test_a_model_that_draws_has_the_numbers_of_the_plain_executor(case: str, name: str) -> None:
    DRAWS[case]()  # seeds torch's generator
    state = torch.get_rng_state()
    plain = train(name, "sequential", DRAWS[case])
    for executor in EXECUTORS:
        assert train(name, executor, DRAWS[case], slots=3) == train(name, executor, DRAWS[case], slots=1) == plain
    assert plain != train(name, "sequential", DRAWS[case], seed=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", ["fedsam", "mimelite"])
@pytest.mark.parametrize("case", TREES)
def test_batches_that_are_trees_of_tensors(case: str, name: str) -> None:
    clients, loss = TREES[case]
    plain = train(name, "sequential", ReadsDict, clients, loss=loss)
    for executor in EXECUTORS:
        assert train(name, executor, ReadsDict, clients, loss=loss, slots=3) == plain
    assert sum(graph.replays for graph in FakeCuda.graphs) > 0


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", ["dropout", "dicts"])
def test_their_streams_are_ordered(case: str, executor: str) -> None:
    """Two streams never touch one memory without a wait between. A replay does what was captured, also with the seed of
    another client."""
    model, clients, loss = Drops, PAIRS, "cross_entropy"
    if case == "dicts":
        model, (clients, loss) = ReadsDict, TREES["dicts"]
    options = {"backend": "reference", "loss": loss, "rounds": 1, "participation": 1.0}
    plain = train("fedsam", "sequential", model, clients, **options)
    with Watch():
        assert train("fedsam", executor, model, clients, slots=2, **options) == plain
    assert executor == "streams" or sum(graph.replays for graph in FakeCuda.graphs) > 0


class Recurrent(Drops):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 6, num_layers=2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers(x[None])[0][0])


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("model", "attribute", "value", "words"),
    [
        (Drops, "host", torch.default_generator, r"draws .* on the CPU in test_streams_models.py, line \d+, which a"),
        (Recurrent, "draws_in_graphs", True, "dropout between recurrent layers"),
        (Drops, "draws_in_graphs", False, "torch .* do not draw random numbers at an offset"),
    ],
)
def test_graph_refuses_draws_by_name(
    model: type[nn.Module], attribute: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCuda, attribute, value)
    with pytest.raises(ValueError, match=f"executor 'graph' cannot serve here: .*{words}"):
        train("fedavg", "graph", model)
    assert train("fedavg", "streams", model) == train("fedavg", "sequential", model)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*DRAWS, *TREES])
def test_on_a_gpu_the_bits_are_those_of_the_plain_executor(case: str) -> None:
    clients, loss = TREES.get(case, (PAIRS, "cross_entropy"))
    model = DRAWS.get(case, ReadsDict)
    for name in ("fedsam", "mimelite"):
        plain = train(name, "sequential", model, clients, loss=loss, device="cuda")
        for executor in EXECUTORS:
            assert train(name, executor, model, clients, loss=loss, device="cuda", slots=3) == plain
