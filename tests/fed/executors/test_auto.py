"""The rule by which `executor="auto"` stacks clients on a GPU, and models that it does not stack. Its other choices are
tested with the executors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam.fed.executors import LocalOptions, auto
from tests.helpers import oracle
from tests.helpers.fed_input import start
from tests.helpers.setups import setup_of


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))


@pytest.fixture
def serve_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stacked clients serve every model, without a GPU on which their trial would run."""
    monkeypatch.setattr(auto.stacked, "slots_of", lambda setup: setup.cohort)
    monkeypatch.setattr(auto.stacked, "why_not", lambda setup: None)


def reason(model: nn.Module, device: str = "cuda", cohort: int = 100, slots: int | None = None) -> str | None:
    return auto._not_stacked(setup_of(model, options=LocalOptions(slots=slots), device=device, cohort=cohort))


@pytest.mark.usefixtures("serve_cuda")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_convolutions_are_not_stacked(device: str) -> None:
    """Captured steps are as fast on a GPU, with the bits of `sequential`."""
    assert "convolutions" in str(reason(convolutions(), device=device))
    assert reason(nn.Linear(3, 2), device=device) is None


@pytest.mark.usefixtures("serve_cuda")
def test_what_is_never_stacked() -> None:
    assert "recurrent" in str(reason(nn.LSTM(3, 2)))


def test_the_reason_of_stacked_clients_is_passed_on(serve_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto.stacked, "why_not", lambda setup: "it draws")
    assert reason(nn.Linear(3, 2)) == "it draws"


def test_frozen_parameters_count() -> None:
    """The layers of a large model keep a core busy, however few of its parameters are trained."""
    model = nn.Sequential(nn.Linear(700, 760).requires_grad_(False), nn.Linear(760, 3))
    frozen, trained = 700 * 760 + 760, 760 * 3 + 3
    assert frozen + trained > 2**19
    assert f"the model has {frozen + trained} parameters, {frozen} of them frozen" in str(reason(model, device="cpu"))
    smaller = nn.Sequential(nn.Linear(680, 760).requires_grad_(False), nn.Linear(760, 3))
    assert "frozen" not in str(reason(smaller, device="cpu"))


# --- What the trial before round 1 finds is not stacked.


class Small(nn.Module):
    """A model of stacked clients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = oracle.smooth_model(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


class NoiseInSmallBatches(Small):
    """A model with noise in batches of less than eight samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x) if self.training and len(x) < 8 else x)


class Clamped(Small):
    """A model that writes its weights in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            p.data.clamp_(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [(NoiseInSmallBatches, "draws random numbers"), (Clamped, "writes trained parameters in place")],
)
def test_auto_takes_another_executor(model: type[nn.Module], words: str) -> None:
    """The last batch of a client has three samples, the batch of the first trial has ten."""
    clients = oracle.ragged_clients(torch.float32, (20, 23))
    options: dict[str, Any] = {"batch_size": 10, "participation": 1.0, "rounds": 2}
    results = [start(model(), clients, executor=name, **options) for name in ("auto", "sequential")]
    assert results[0].summary()["executor"] in ("threads", "sequential")
    assert all(map(torch.equal, *(result.model.parameters() for result in results)))
    with pytest.raises(ValueError, match=f"executor 'vmap' cannot serve here: .* {words}"):
        start(model(), clients, executor="vmap", **options)
    assert start(Small(), clients, **options).summary()["executor"] == "vmap"
