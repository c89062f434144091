"""Four small clients, and the same samples in everything that a client may be."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset, default_collate

from fastsam import fed
from tests.helpers.fed_runs import vector


class Rows(Dataset[Any]):
    """Samples one by one. kind: how a sample is built."""

    def __init__(self, x: Tensor, y: Tensor, kind: str = "pair") -> None:
        self.x, self.y, self.kind, self.reads = x, y, kind, 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        x, y = self.x[i], int(self.y[i])
        return {"pair": (x, y), "dict": {"x": x.numpy(), "label": y}, "nested": ({"a": x[:3], "b": x[3:]}, y)}[
            self.kind
        ]


class OfParts(nn.Module):
    """A model of two inputs, the halves of x."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        output: Tensor = self.inner(torch.cat([a, b], 1))
        return output


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Return clients of 10, 11, 12 and 13 samples."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(10 + i, 6, generator=g), torch.arange(10 + i) % 3) for i in range(4)]


def in_another_collate(items: list[Any]) -> Any:
    return default_collate(items)


KINDS = {
    "TensorDataset": lambda x, y: TensorDataset(x, y),
    "Subset": lambda x, y: Subset(TensorDataset(x.flip(0), y.flip(0)), list(range(len(y)))[::-1]),
    "Dataset": Rows,
    "Subset of a Dataset": lambda x, y: Subset(Rows(torch.cat([x, x]), torch.cat([y, y])), list(range(len(y)))),
    "DataLoader": lambda x, y: DataLoader(Rows(x, y), batch_size=3, shuffle=True, drop_last=True),
    "DataLoader of a part": lambda x, y: DataLoader(
        Rows(torch.cat([x, -x]), torch.cat([y, y])), sampler=SubsetRandomSampler(range(len(y)))
    ),
    "list of samples": lambda x, y: [(row, int(label)) for row, label in zip(x, y, strict=True)],
    "arrays": lambda x, y: [x.numpy(), y.numpy()],
}


def run(clients: Any, **options: Any) -> fed.Result:
    test = pairs()[3]
    trained_model = options.pop("model", None) or model()
    settings: dict[str, Any] = {"rounds": 2, "participation": 1.0, "test": test, "batch_size": 4, "lr": 0.1}
    return fed.run(trained_model, clients, fed.FedSAM(rho=0.05), **settings | options)


def weights(result: fed.Result) -> Tensor:
    return vector(result.model)
