"""Fixtures of short federated runs, for the conftest files of the folders that have them."""

import pytest

from fastsam.fed.executors import auto
from tests.helpers import fake_devices
from tests.helpers.fed_states import stand_in


@pytest.fixture(autouse=True)
def a_short_run_is_sequential(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the sequential executor for tests that name none.

    Recording passes for stacked clients would take longer than these few rounds. Tests of executors have every
    algorithm and option on every executor, and the default choice.
    """
    if "executors" not in (request.path.parent.name, request.path.stem.removeprefix("test_")):
        monkeypatch.setattr(auto, "rule", lambda setup: ("sequential", "the run is short"))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors for GPUs run on a stand-in for CUDA, in whose streams everything is done at once."""
    fake_devices.install(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client states and executors find a stand-in for a GPU with separate memory."""
    stand_in(monkeypatch)
