"""Short federated runs of a small model on ragged clients, and the bits that they end in."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import oracle
from tests.promises import cases

FLOAT = torch.float32
SIZES = (7, 12, 1, 22, 12, 7, 5, 30)  # batches of 5, of 2 and of 1: each shape is recorded
FIRST = {name: key for key, (name, _) in reversed(cases.METHODS.items())}  # one case per algorithm
OPTIONS: dict[str, Any] = {
    "rounds": 3, "participation": 0.8, "batch_size": 5, "momentum": 0.3, "weight_decay": 0.01, "local_epochs": 2,
}  # fmt: skip


def norm_model() -> nn.Module:
    """Return a small model with BatchNorm, whose weights depend on no generator."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def fixed_linear() -> nn.Module:
    """Return a linear model whose weights depend on no generator."""
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-2, 2, 18).view(3, 6))
        model.bias.zero_()
    return model


def overflow(x: Tensor) -> Tensor:
    """Return finite samples whose sums overflow in the first layer."""
    return x.clamp(-3, 3) * 1e38


class Drops(nn.Module):
    """Dropout that no module shows, in batches with a first feature larger than `threshold`."""

    def __init__(self, threshold: float = -math.inf) -> None:
        super().__init__()
        self.inner, self.threshold = oracle.smooth_model(FLOAT), threshold

    def forward(self, x: Tensor) -> Tensor:
        draws = bool((x[:, 0] > self.threshold).any())
        output: Tensor = self.inner(F.dropout(x, 0.4, self.training and draws))
        return output


def cross_entropy_until(number: int, end: Callable[[], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that calls `end` in its call of this number. To a run directory it is torch's cross_entropy."""
    calls = itertools.count(1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == number:
            end()
        return F.cross_entropy(output, target)

    loss.__module__, loss.__qualname__ = "torch.nn.functional", "cross_entropy"
    return loss


def fail(error: BaseException) -> NoReturn:
    """Raise an error, where only an expression can stand."""
    raise error


def run(
    algorithm: fed.Algorithm,
    executor: str,
    slots: int | None = None,
    model: nn.Module | None = None,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> fed.Result:
    model = oracle.smooth_model(FLOAT) if model is None else model
    data = oracle.ragged_clients(FLOAT, sizes)
    # An algorithm with an optimizer of its own has momentum and decay there.
    defaults = (
        OPTIONS
        if getattr(algorithm, "local_optimizer", None) is None
        else OPTIONS | {"momentum": 0.0, "weight_decay": 0.0}
    )
    return fed.run(model, data, algorithm, executor=executor, slots=slots, **(defaults | options))


def untimed_records(result: fed.Result) -> list[dict[str, Any]]:
    """Return the records of all rounds without their times."""
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in result.history]


def digest(result: fed.Result) -> str:
    """Return the SHA-256 of the weights and of the records without their times."""
    sha = hashlib.sha256()
    for p in result.model.parameters():
        sha.update(p.detach().numpy().tobytes())
    sha.update(repr(untimed_records(result)).encode())
    return sha.hexdigest()


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def excluded_clients(result: fed.Result) -> list[list[int]]:
    """Return the excluded clients of each round."""
    return [[client["client"] for client in record["excluded"]] for record in result.history]


def vector(model: nn.Module) -> Tensor:
    """Return all parameters of a model as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
