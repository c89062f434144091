"""A capture that fails: the caller's stream is back, and the error says why. A stand-in replaces torch's graphs."""

from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.cuda import CaptureError, Cuda


class Torch:
    """torch's captures: a capture with an error cannot be ended, which hides the error and keeps its stream."""

    def __init__(self, monkeypatch: MonkeyPatch) -> None:
        self.stream = "before"
        places = {
            "torch.cuda.CUDAGraph": object, "torch.cuda.graph": lambda *a, **k: Context(self, **k),
            "torch.cuda.current_stream": lambda device: self.stream, "torch.cuda.set_stream": self._set,
        }  # fmt: skip
        for name, value in places.items():
            monkeypatch.setattr(name, value, raising=False)

    def _set(self, stream: str) -> None:
        self.stream = stream


class Context:
    def __init__(self, world: Torch, stream: str, capture_error_mode: str) -> None:
        self.world, self.stream = world, stream

    def __enter__(self) -> None:
        self.old_stream, self.world.stream = self.world.stream, self.stream

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.world.stream = self.old_stream


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
        raise error

    with pytest.raises(records, match=words):
        cuda.capture(work, stream)  # type: ignore[arg-type]
    assert world.stream == "before"
    cuda.capture(lambda: None, stream)  # type: ignore[arg-type]
    assert world.stream == "before"
