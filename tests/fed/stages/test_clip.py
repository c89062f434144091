"""`privacy=fed.Privacy(clip=)` of clients with local parameters: it bounds what is sent, and nothing else."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.stages.clip import Clip
from fastsam.fed.update.results import ClientResults
from tests.helpers.fed_runs import same_bits

EXECUTORS = ("sequential", "vmap")


class Normed(nn.Module):
    """A small model whose normalisation layer stays with the clients of FedBN."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


def clients() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 4, generator=g).double(), torch.randint(3, (8,), generator=g)) for _ in range(3)]


def run(clip: float | None, algorithm: fed.Algorithm, **options: Any) -> fed.Result:
    torch.manual_seed(1)
    privacy = None if clip is None else fed.Privacy(clip=clip)
    options = {"rounds": 1, "participation": 1.0, "batch_size": 8, "lr": 2.0, "executor": "sequential"} | options
    return fed.run(Normed().double(), clients(), algorithm, privacy=privacy, **options)


def sent_delta(result: fed.Result, local: str) -> Tensor:
    """Return the change of the shared parameters of the global model, as one vector."""
    torch.manual_seed(1)
    start = Normed().double()
    pairs = zip(result.model.named_parameters(), start.parameters(), strict=True)
    return torch.cat([(p - q).detach().flatten() for (name, p), q in pairs if not name.startswith(local)])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("algorithm", "local", "options"),
    [(fed.FedAvg(), "head", {"local_parameters": "head"}), (fed.FedBN(), "norm", {})],
    ids=["local head", "FedBN"],
)
def test_the_clip_is_of_what_is_sent(algorithm: fed.Algorithm, local: str, options: Any, executor: str) -> None:
    """One client a round. The sent delta is shortened to the clip, and the local parameters are not touched."""
    for i in range(3):
        common: dict[str, Any] = {**options, "executor": executor, "sampler": lambda t, g, i=i: [i]}
        free = run(None, algorithm, **common)
        delta = sent_delta(free, local)
        norm = float(delta.norm())
        clipped = run(0.5 * norm, algorithm, **common)
        torch.testing.assert_close(sent_delta(clipped, local), 0.5 * delta, rtol=2e-5, atol=0)
        assert float(sent_delta(clipped, local).norm()) <= 0.5 * norm * (1 + 1e-12)
        parts = [result.client_model(i).get_submodule(local) for result in (free, clipped)]
        assert same_bits(*parts)
        loose = run(1.001 * norm, algorithm, **common)
        assert same_bits(loose.model, free.model) and same_bits(loose.client_model(i), free.client_model(i))


def test_outliers_are_of_what_is_sent() -> None:
    """Client 0 moves its local head far, and what it sends as far as the others do."""
    clip = Clip(math.inf, torch.tensor([False, False, True]))
    delta = torch.tensor([[3.0, 4.0, 100.0], [4.0, 3.0, 1.0]])
    results = ClientResults((0, 1), delta.clone(), (1, 1), (1, 1), torch.zeros(2), (1, 1))
    assert clip.process_results(results, None) == pytest.approx([5.0, 5.0])  # type: ignore[arg-type]
    assert torch.equal(results.delta, delta)
