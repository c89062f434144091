"""LoRA (Hu et al., 2022) in a federation: only low-rank adapters next to frozen weights are trained and sent.

    python examples/lora.py

A model that reads upright digits stands in for a pre-trained one and is frozen; the clients' digits lie on their side,
and adapters learn to read them. `peft` does to a model of Hugging Face what `adapted` does here: `get_peft_model(...)`
freezes the rest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed


class LoRA(nn.Module):
    """`W x + b + (alpha / rank) B A x` with W and b as they were, B zero at the start."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)
        return output


def adapted(model: nn.Module) -> nn.Module:
    """Freeze every `nn.Linear` of the model, put an adapter next to each, and return the model."""
    for name, part in model.named_children():
        setattr(model, name, LoRA(part) if isinstance(part, nn.Linear) else adapted(part))
    return model


def pretrained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Return a model that has learnt upright digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def on_its_side(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.rot90(pair[0], 1, (2, 3)), pair[1]


def train(rounds: int = 30, steps: int = 60) -> tuple[fed.Result, int]:
    """Return the federated run, and the number of all parameters of the model."""
    data = fed.digits(clients=10, alpha=0.5)
    x, y = (torch.cat([client[i] for client in data]) for i in (0, 1))
    model = adapted(pretrained(x, y, steps))
    clients = [on_its_side(client) for client in data]
    result = fed.run(
        model, clients, fed.FedSAM(rho=0.05), rounds=rounds, participation=0.5, lr=0.05, test=on_its_side(data.test)
    )
    return result, sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    result, parameters = train()
    summary = result.summary()
    first, last = (result.history[i]["test_accuracy"] for i in (0, -1))
    print(f"accuracy on digits on their side: {first:.3f} after the first round, {last:.3f} after the last")
    print(f"trained and sent: {summary['parameters']} of {parameters} parameters")
