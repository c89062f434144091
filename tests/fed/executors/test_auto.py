"""The rule by which `executor="auto"` stacks clients on a GPU. Its other choices are tested with the executors."""

import pytest
from torch import nn

from fastsam.fed.executors import LocalOptions, auto
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
