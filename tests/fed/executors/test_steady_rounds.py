"""Steady rounds of stacked clients on a GPU, with a stand-in for CUDA: equal steps are one replay, the host queues few
operations, and no pass runs through the model's Python code."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.fed.workload import Workload
from fastsam import backend, fed
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_devices import install_step_graphs

aten = torch.ops.aten
CLIENTS, ROUNDS, EAGER = 4, 5, 1  # the first steps of a shape are not captured


class LikeGpu(TorchDispatchMode):
    """Rounds the operands of ungrouped convolutions to TF32, and counts operations that no graph holds.

    cuDNN chooses its algorithm by the number of groups, which is the number of stacked clients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not FakeCuda.is_in_graph and not func.is_view
        if func is aten.convolution.default and args[-1] == 1:
            args = (*map(tf32, args[:2]), *args[2:])
        if func is aten.convolution_backward.default and args[9] == 1:
            args = (*map(tf32, args[:3]), *args[3:])
        return func(*args, **(kwargs or {}))


def tf32(t: Tensor) -> Tensor:
    """Return float32 numbers rounded to 10 bits after the point."""
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Counting(torch.nn.Module):
    """A model that counts the calls of its Python code."""

    calls = 0

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        Counting.calls += 1
        return self.inner(x)


def test_a_steady_round_of_a_cnn_is_a_replay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The CNN's maxima and kinks make one gradient in fifty of such rounding."""
    install_step_graphs(monkeypatch)
    load, rounds = Workload("cnn", clients=CLIENTS, cohort=CLIENTS), list[tuple[int, int]]()
    with LikeGpu() as mode:

        def note(record: Any) -> None:
            rounds.append((mode.count, Counting.calls))
            mode.count = Counting.calls = 0

        fed.run(
            Counting(load.make_model()), load.tensors(), fed.FedAvg(), rounds=ROUNDS, batch_size=16, participation=1.0,
            slots=CLIENTS, executor="vmap", backend="reference", eval_every=ROUNDS, progress=note,
        )  # fmt: skip
    assert [graph.replays for graph in FakeCuda.graphs] == [ROUNDS - EAGER]
    operations, forward_calls = rounds[EAGER + 1]
    assert operations <= (40 if backend("cpu") == "native" else 90) and forward_calls == 0
    assert "not replayed" not in caplog.text
