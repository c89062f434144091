"""Lookups in tables (`nn.Embedding`, `F.one_hot`) of stacked clients: the gradients and errors of single clients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.executors import record
from tests.helpers.fed_runs import vector

WORDS = 10


class Words(nn.Module):
    """A classifier of sequences of words."""

    def __init__(self, look_up: Callable[..., Tensor] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.output, self.look_up = nn.Embedding(WORDS, 4, **options), nn.Linear(4, 3), look_up
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.words(x) if self.look_up is None else self.look_up(x, self.words.weight)
        return self.output(vectors.mean(1))


def clients(sizes: tuple[int, ...] = (7, 10, 3, 12)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, WORDS, (n, 5), generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def train(model: nn.Module, executor: str, data: Any = None, **options: Any) -> fed.Result:
    keywords = {"rounds": 3, "participation": 1.0, "batch_size": 4, "lr": 0.5} | options
    return fed.run(model, data or clients(), fed.FedSAM(rho=0.05), executor=executor, **keywords)


def one_hot(x: Tensor, weight: Tensor) -> Tensor:
    return F.one_hot(x, WORDS).to(weight.dtype) @ weight


TABLES: dict[str, Callable[[], nn.Module]] = {
    "plain": Words,
    "padding": lambda: Words(padding_idx=2),
    "padding, counted from the end": lambda: Words(padding_idx=-1),
    "gradients by frequency": lambda: Words(scale_grad_by_freq=True, padding_idx=1),
    "torch.embedding": lambda: Words(lambda x, weight: torch.embedding(weight, x, 3)),
    "F.embedding": lambda: Words(lambda x, weight: F.embedding(x, weight, padding_idx=-2)),
    "unit vectors": lambda: Words(one_hot),
}


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_are_those_of_single_clients(name: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not replays:
        monkeypatch.setattr(record.Replays, "run", lambda *args: None)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        plain = vector(train(TABLES[name]().to(dtype), "sequential").model)
        stacked = vector(train(TABLES[name]().to(dtype), "vmap").model)
        assert (plain - stacked).abs().max() <= tolerance


def test_a_table_that_a_lookup_writes_is_refused() -> None:
    """torch scales rows of the table in place."""
    with pytest.raises(ValueError, match="executor 'vmap' cannot serve here: .*writes trained parameters in place"):
        train(Words(max_norm=0.5, padding_idx=0), "vmap")


def test_an_operation_that_would_mix_rows_is_refused() -> None:
    """torch's batching rule of index_fill takes an index of -1 of one row for an element of the row before."""
    model = Words(lambda x, weight: weight.index_fill(0, x[:, 0], 0.0)[x])
    with pytest.raises(ValueError, match="executor 'vmap' cannot serve here: .*index_fill of several rows"):
        train(model, "vmap")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("index", [WORDS, -1])
def test_an_index_outside_of_the_table_raises(index: int, name: str) -> None:
    """In the plain executor, and in the middle row of a stacked pass: in round 1, and in a replayed pass of round 3."""
    data = clients((8,) * 4)
    data[1][0][7, 2] = index
    words = r"client .*1.* in round {}.*(out of range|out of bounds|smaller than|non-negative)"
    for executor, dtype in (("sequential", torch.float64), ("vmap", torch.float64), ("vmap", torch.float32)):
        with pytest.raises(fed.ClientError, match=words.format(1)):
            train(TABLES[name]().to(dtype), executor, data)
        with pytest.raises(fed.ClientError, match=words.format(3)):
            train(TABLES[name]().to(dtype), executor, data, sampler=lambda t, generator: [0, 1 if t == 2 else 3, 2])


class Scales(Words):
    """A model in float32 with an operation that no row program has, before its lookup."""

    def __init__(self) -> None:
        super().__init__(padding_idx=2)
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        scales = F.group_norm((self.output.bias * 2)[None], 1)[0]
        return super().forward(x) * scales


def test_a_recording_that_stops_before_the_lookup() -> None:
    """Two rows have the shape of the recording for a row program, which stops and has seen no lookup."""
    model = Scales()
    result = train(model, "vmap", clients((8, 8)), slots=2)
    assert torch.equal(result.model.words.weight[2], model.words.weight[2]), "padding has no gradient"
    assert (vector(result.model) - vector(train(model, "sequential", clients((8, 8))).model)).abs().max() <= 1e-6
