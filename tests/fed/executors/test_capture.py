"""A capture that fails: the caller's stream is back, and the error says why. A stand-in replaces torch's graphs.
Nothing is freed in a capture by Python's collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.cuda import CaptureError, Cuda
from tests.helpers.fake_cuda import FakeGenerator, PhiloxState


class Torch:
    """torch's captures: a capture with an error cannot be ended, which hides the error."""

    def __init__(self, monkeypatch: MonkeyPatch) -> None:
        self.stream, self.graphs = "before", list[Graph]()
        monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: Graph(self), raising=False)
        monkeypatch.setattr("torch.cuda.stream", self.use)

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        old_stream, self.stream = self.stream, stream
        yield
        self.stream = old_stream


class Graph:
    def __init__(self, world: Torch) -> None:
        self.world, self.events = world, list[Any]()
        world.graphs.append(self)

    def register_generator_state(self, state: FakeGenerator) -> None:
        self.events.append(state)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert self.world.stream == "a stream" and not gc.isenabled()
        self.events += [pool, capture_error_mode]

    def capture_end(self) -> None:
        self.events.append("end")
        if "error" in self.events:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("error", "records", "words"),
    [
        (ValueError("the model looks at its values"), CaptureError,
            "ValueError: the model looks at its values. Use executor='streams'"),
        (ClientError("client 3 failed"), ClientError, "client 3 failed"),
    ],
)  # fmt: skip
def test_a_capture_that_fails_says_why(error: Exception, records: type, words: str, monkeypatch: MonkeyPatch) -> None:
    world, cuda, stream = Torch(monkeypatch), Cuda(torch.device("cuda", 0)), "a stream"

    def work() -> None:
        world.graphs[-1].events.append("error")
        raise error

    with pytest.raises(records, match=words):
        cuda.capture(work, stream)  # type: ignore[arg-type]
    assert world.stream == "before" and gc.isenabled()
    assert cuda.capture(lambda: None, stream, "a pool") is world.graphs[1]  # type: ignore[arg-type]
    assert world.stream == "before" and gc.isenabled()
    assert [graph.events for graph in world.graphs] == [
        [None, "thread_local", "error", "end"], ["a pool", "thread_local", "end"],
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_draws_from_its_state(fails: bool, monkeypatch: MonkeyPatch) -> None:
    """The default generator has the state in the capture, and then its own again."""
    world, default, lane = Torch(monkeypatch), FakeGenerator(PhiloxState(1)), FakeGenerator(PhiloxState(2))
    monkeypatch.setattr(Cuda, "generator", lambda cuda: default)
    seeds = []

    def work() -> None:
        seeds.append(default.state.seed)
        if fails:
            raise ValueError("it was refused")

    with pytest.raises(CaptureError, match="refused") if fails else nullcontext():
        Cuda(torch.device("cuda", 0)).capture(work, "a stream", None, lane)  # type: ignore[arg-type]
    assert seeds == [2] and default.state.seed == 1
    assert world.graphs[0].events == [lane, None, "thread_local", "end"]


@pytest.mark.gpu
def test_replays_on_a_gpu_draw_at_an_offset() -> None:
    assert Cuda(torch.device("cuda", 0)).repeats_draws()
