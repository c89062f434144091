"""The clock for a GPU, against a device that is emulated: a queue with a time of its own, which the host fills and does
not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import clocks
from bench.clocks import Machine

# microseconds: of the host for any call, of the device for a read and for what is timed
CALL, READ, BODY = 10.0, 250.0, 5.0


class Device:
    """log: what was queued, in its order."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.log: list[str] = []

    def queue(self, what: str, microseconds: float, call: float = CALL) -> float:
        """When it ends."""
        self.log.append(what)
        self.host += call
        self.device = max(self.device, self.host) + microseconds
        return self.device

    def wait(self) -> None:
        self.host = max(self.host, self.device)


class Event:
    device: Device

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = self.device.queue("event", 0.0, call=1.0)

    def elapsed_time(self, last: Event) -> float:
        return (last.at - self.at) / 1e3


class Memory:
    """Stands in for a tensor that is only read."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def max(self) -> None:
        self.device.queue(self.name, READ)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    Event.device = Device()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.device


@pytest.fixture
def machine(device: Device, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made: Any = object.__new__(Machine)
    made.device, made.cuda, made.cache_bytes = torch.device("cuda"), True, 60 << 20
    made._source, made._sweep = Memory(device, "read"), Memory(device, "sweep")
    monkeypatch.setattr(made, "wait", device.wait)
    return made  # type: ignore[no-any-return]


def replay(device: Device) -> Callable[[], object]:
    """A graph whose launch takes the host far longer than the device has to do for it."""
    return lambda: device.queue("body", BODY, call=100.0)


@pytest.mark.of_each_kind
def test_the_launch_of_a_replay_is_off_the_clock(machine: Machine, device: Device) -> None:
    for _ in range(3):
        assert machine.sample(replay(device), queued=True) == pytest.approx(BODY / 1e6)
    assert device.log == 3 * [*["read"] * clocks.READS, "event", "body", "event"]


def test_an_eager_call_has_its_launch_on_the_clock(machine: Machine, device: Device) -> None:
    assert machine.sample(replay(device)) > 100e-6, "what an idle device would do to a replay too"
    assert device.log == ["event", "body", "event"]


def test_what_sweeps_the_caches_comes_last_before_the_clock(machine: Machine, device: Device) -> None:
    assert machine.sample(replay(device), cold=True, queued=True) == pytest.approx(BODY / 1e6)
    assert device.log == [*["read"] * clocks.READS, "sweep", "event", "body", "event"]


def test_the_copy_is_measured_as_replays_are(machine: Machine, device: Device) -> None:
    class Target:
        def copy_(self, source: object) -> None:
            device.queue("copy", 500.0)

    made: Any = machine
    made._target, made._source.numel = Target(), lambda: 1 << 28
    assert machine.copy_bandwidth() == pytest.approx(2 * 4 * (1 << 28) / 500e-6)
