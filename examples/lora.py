"""LoRA (Hu et al., 2022) in a federation: plain averaging, FFA-LoRA, FedSA-LoRA and FedEx-LoRA, by peft.

    pip install peft
    python examples/lora.py

A model that reads upright digits stands in for a pre-trained one. The clients' digits are rotated, and adapters
learn to read them. A model of Hugging Face takes the same functions: docs/lora.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed

RANK, ALPHA = 4, 8
SCALE = ALPHA / RANK  # factor of B A in the forward pass
RATES = {"SGD": 0.05, "AdamW": 5e-3}


def adapted(model: nn.Module) -> nn.Module:
    """Return the model with an adapter next to every `nn.Linear`. All other parameters are frozen."""
    from peft import LoraConfig, get_peft_model

    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers)
    result: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    return result


def freeze_a(model: nn.Module) -> nn.Module:
    """Freeze the random matrices A: the mean of B A is then mean(B) A (FFA-LoRA, Sun et al., ICLR 2024)."""
    for name, p in model.named_parameters():
        p.requires_grad_("lora_B" in name)
    return model


class ServerLinear(nn.Linear):
    """A linear layer whose weights have no gradient, so that only the server moves them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), self.bias)


def move_by_server(model: nn.Module) -> nn.Module:
    """Let the server move the weights next to the adapters."""
    for part in model.modules():
        base = getattr(part, "base_layer", None)
        if isinstance(base, nn.Linear):
            base.__class__ = ServerLinear
            base.weight.requires_grad_(True)
    return model


@dataclass(frozen=True)
class FedExLoRA(fed.Algorithm):
    """Exact averages of adapters (Singhal et al., ACL 2025).

        W <- W + scale * (mean(B_i A_i) - mean(B_i) mean(A_i)),  A <- mean(A_i),  B <- mean(B_i)

    Clients take steps of SAM if rho is positive. The weights W are trainable parameters without a gradient
    (`ServerLinear`), and a client's row of W carries its product.
    """

    rho: float = 0.0
    scale: float = SCALE

    def uses_server_lr(self) -> bool:
        return False

    def local_step(self, server: fed.State, client: fed.State, round: fed.Round) -> fed.Step:
        return fed.SAM(rho=self.rho) if self.rho else fed.Step()

    def finish(
        self, server: fed.State, client: fed.State, results: fed.ClientResults, round: fed.Round
    ) -> tuple[fed.State, fed.Upload]:
        delta = results.delta.clone()
        uploads, ends = round.layout.unflatten(delta), round.layout.unflatten(server["w"] + results.delta)
        for w, a, b in triples(round.layout):
            uploads[w].copy_(self.scale * product(ends[b], ends[a]))
        return client, fed.Upload(mean={"delta": delta})

    def step_server(self, server: fed.State, aggregate: fed.Aggregate, round: fed.Round) -> fed.State:
        delta = aggregate.mean("delta").clone()
        change, old = round.layout.unflatten(delta), round.layout.unflatten(server["w"].double())
        for w, a, b in triples(round.layout):
            change[w].sub_(self.scale * product(old[b] + change[b], old[a] + change[a]))
        return {**server, "w": fed.apply_update(server["w"], delta)}


def triples(layout: fed.ParameterLayout) -> Iterator[tuple[str, str, str]]:
    """Yield the names of W, A and B of every adapter."""
    for name in layout.names:
        if "lora_A" in name:
            yield name.partition("lora_A")[0] + "base_layer.weight", name, name.replace("lora_A", "lora_B")


def product(b: Tensor, a: Tensor) -> Tensor:
    """Return B A of each row. A sum over the rank has the same bits for any number of rows."""
    columns, rows = b.unbind(-1), a.unbind(-2)
    return torch.stack([x.unsqueeze(-1) * y.unsqueeze(-2) for x, y in zip(columns, rows, strict=True)]).sum(0)


class Method(NamedTuple):
    """A way to average adapters: a function of the model, the algorithm for a radius, and options of the run."""

    prepare: Callable[[nn.Module], nn.Module]
    algorithm: Callable[[float], fed.Algorithm]
    options: dict[str, Any] = {}  # noqa: RUF012  (read only)


def averaging(rho: float) -> fed.Algorithm:
    return fed.FedSAM(rho=rho) if rho else fed.FedAvg()


METHODS = {
    "plain": Method(lambda model: model, averaging),
    "FFA-LoRA": Method(freeze_a, averaging),
    # B stays with its client (Guo et al., ICLR 2025).
    "FedSA-LoRA": Method(lambda model: model, averaging, {"local_parameters": "*lora_B*"}),
    "FedEx-LoRA": Method(move_by_server, FedExLoRA),
}


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


def rotated(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.rot90(pair[0], 1, (2, 3)), pair[1]


def train(
    method: str, optimizer: str = "SGD", rho: float = 0.05, rounds: int = 30, steps: int = 60, executor: str = "auto"
) -> fed.Result:
    """Return the run of a method, with steps of SAM if rho is positive."""
    data = fed.digits(clients=10, alpha=0.5)
    x, y = (torch.cat([client[i] for client in data]) for i in (0, 1))
    prepare, algorithm, options = METHODS[method]
    model = prepare(adapted(pretrained(x, y, steps)))
    return fed.run(
        model, [rotated(client) for client in data], algorithm(rho), rounds=rounds, participation=0.5,
        sampler="bernoulli", optimizer=optimizer, lr=RATES[optimizer], test=rotated(data.test), executor=executor,
        **options,
    )  # fmt: skip


def sent(method: str, model: nn.Module) -> int:
    """Return the number of parameters that a client sends in a round. In FedEx-LoRA the server can compute B A."""
    names = {"plain": ("lora_",), "FFA-LoRA": ("lora_B",), "FedSA-LoRA": ("lora_A",), "FedEx-LoRA": ("lora_",)}[method]
    return sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in names))


if __name__ == "__main__":
    print("method      optimizer  rho   accuracy  parameters sent")
    for method in METHODS:
        for optimizer, rho in (("SGD", 0.05), ("AdamW", 0.0), ("AdamW", 0.05)):
            result = train(method, optimizer, rho)
            # A personal model is tested on its client's validation samples.
            key = "client_accuracy_mean" if METHODS[method].options else "test_accuracy"
            accuracy = result.history[-1][key]
            print(f"{method:11} {optimizer:9}  {rho:<4}  {accuracy:.3f}     {sent(method, result.model)}")
