"""Layers and batches under `vmap`: the table in docs/executors_promises.md says what each does, and is compared with
them."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fastsam.fed import BatchLoss
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.clients.samples import fill_tree, tensors_of
from fastsam.fed.executors import stacked
from fastsam.fed.executors.gradient_passes import ModelPasses
from fastsam.fed.executors.slow_calls import SlowCalls
from fastsam.fed.executors.stacked_dropout import StackedDropout
from fastsam.fed.loop.trial import try_model
from tests.helpers.places import ROOT
from tests.helpers.setups import setup_of

ROWS = re.findall(
    r"^\| (served|once per client|refused) \| (.+?) \|", (ROOT / "docs/executors_promises.md").read_text(), re.M
)
TABLE = {name: kind for kind, names in ROWS for name in re.findall(r"`(\w+)`", names)}


class Call(nn.Module):
    """A layer, a function that calls it, and a head."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call, self.head = layer, call, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.call(self.layer, x).flatten(1))
        return result


class Case(NamedTuple):
    """A layer, the shape of a sample (integers for a vocabulary), the call, and the client made of x and y, whose
    batches have x first and y last."""

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 6)
    call: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x)
    vocabulary: int = 0
    client: Callable[[Tensor, Tensor], Any] | None = None


def first(layer: Any, x: Tensor) -> Tensor:
    result: Tensor = layer(x)[0]
    return result


def loss_of_tree(model: nn.Module, batch: Any) -> Tensor:
    x, *_, y = tensors_of(batch)
    return F.cross_entropy(model(x), y)


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


CASES = {
    "Linear": Case(lambda: nn.Linear(6, 5)),
    "Conv1d": Case(lambda: nn.Conv1d(4, 5, 3)),
    "Conv2d": Case(lambda: nn.Conv2d(2, 3, 3), (2, 6, 6)),
    "ConvTranspose2d": Case(lambda: nn.ConvTranspose2d(2, 3, 3), (2, 6, 6)),
    "MaxPool2d": Case(lambda: nn.MaxPool2d(2), (2, 6, 6)),
    "AvgPool2d": Case(lambda: nn.AvgPool2d(2), (2, 6, 6)),
    "LayerNorm": Case(lambda: nn.LayerNorm(6)),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4)),
    "InstanceNorm1d": Case(lambda: nn.InstanceNorm1d(4, affine=True)),
    "RMSNorm": Case(lambda: nn.RMSNorm(6)),
    "Embedding": Case(lambda: nn.Embedding(9, 5, padding_idx=0), (4,), vocabulary=9),
    "MultiheadAttention": Case(lambda: nn.MultiheadAttention(6, 2, batch_first=True), call=lambda m, x: m(x, x, x)[0]),
    "TransformerEncoderLayer": Case(lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)),
    "PReLU": Case(lambda: nn.PReLU()),
    "Bilinear": Case(lambda: nn.Bilinear(6, 6, 5), (6,), lambda m, x: m(x, x)),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(9, 5), (4,), vocabulary=9),
    "GRUCell": Case(lambda: nn.GRUCell(6, 5), (6,)),
    "LSTM": Case(lambda: nn.LSTM(6, 5, batch_first=True), call=first),
    "GRU": Case(lambda: nn.GRU(6, 5, batch_first=True), call=first),
    "RNN": Case(lambda: nn.RNN(6, 5, batch_first=True), call=first),
    "BatchNorm1d": Case(lambda: nn.BatchNorm1d(4)),
    "Dropout": Case(lambda: nn.Dropout(0.5)),
    "dict": Case(lambda: nn.Linear(6, 5), client=lambda x, y: {"x": x, "labels": y}),
    "list": Case(lambda: nn.Linear(6, 5), client=lambda x, y: TensorDataset(x, y, y)),
    "tuple": Case(lambda: nn.Linear(6, 5), client=lambda x, y: ({"inputs": [x, x]}, y)),
    "collate": Case(lambda: nn.Linear(6, 5), client=lambda x, y: DataLoader(TensorDataset(x, y), collate_fn=collate)),
}


def measure(case: Case) -> tuple[str, float]:
    """Return the kind of a layer under `vmap`, and the largest difference from passes of single clients."""
    torch.manual_seed(0)
    size = (8, *case.shape)
    x = torch.randint(case.vocabulary, size) if case.vocabulary else torch.randn(size, dtype=torch.float64)
    y = torch.arange(8) % 3
    model = Call(case.layer(), case.call).double()
    model(x)  # makes the head
    client, loss = ((x, y), F.cross_entropy) if case.client is None else (case.client(x, y), BatchLoss(loss_of_tree))
    population = prepare([client], None, x.dtype, torch.device("cpu"), takes_batches=case.client is not None)
    trial = try_model(model, population, loss, 8)
    facts = {
        "draws": trial.effects.draws,
        "changes_buffers": bool(trial.effects.changed_buffers),
        "example": trial.example,
    }
    setup = replace(setup_of(model, loss=loss, **facts), population=population)
    if stacked.why_not(setup) is not None:
        return "refused", 0.0
    replica, rows = stacked._trial_rows(setup)
    calls = SlowCalls()
    batch, template = tensors_of(trial.example), population.clients.template
    batches = [batch, tuple(t.flip(0) for t in batch)]
    seeds = torch.tensor([3, 4])
    keys = [] if setup.draws is None else [seeds[:, None].expand(-1, len(batch[0]))]
    losses, gradients = stacked.StackedPasses(replica, setup.layout, setup, calls).plain(
        rows, *(torch.stack(parts) for parts in zip(*batches, strict=True)), *keys
    )
    difference, plain = 0.0, ModelPasses(replica, setup.layout, setup.loss)
    for row, batch in enumerate(batches):
        replica.row.copy_(rows.z[row])
        with StackedDropout(seeds[row]):
            row_loss, row_gradients = plain.run(*fill_tree(template, batch))
        pairs = zip([losses, *gradients.tensors], [row_loss, *row_gradients.tensors], strict=True)
        difference = max(difference, *(float((a[row] - b).abs().max()) for a, b in pairs))
    return "once per client" if calls.names else "served", difference


@pytest.mark.parametrize("name", CASES)
def test_the_table_says_what_a_layer_does(name: str) -> None:
    kind, difference = measure(CASES[name])
    assert kind == TABLE[name] and difference < 1e-15


def test_every_layer_of_the_table_has_a_case() -> None:
    assert TABLE.keys() == CASES.keys()
