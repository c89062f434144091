"""CUDA graphs: captured steps, replayed after the schedule changed."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.fed.executors.cuda import Cuda
from fastsam_kernels.hparams import HParam
from tests.helpers.gpu_step import DEVICE, Step, same
from tests.helpers.places import ROOT


def capture_graph(body: object, warm_up: int = 2) -> torch.cuda.CUDAGraph:
    """Return a graph of `body`, after `warm_up` ordinary calls on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            body()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()  # type: ignore[operator]
    return graph


@pytest.mark.parametrize("rows", [1, 2])
def test_replays_are_the_eager_steps(kernels: ModuleType, rows: int) -> None:
    """Bit for bit, also after learning rate and radius were written; tickets are ready for every replay."""
    eager_step, graph_step = (Step([200_000, 33, 8193], rows) for _ in range(2))
    graph = capture_graph(lambda: graph_step.run(kernels))
    for _ in range(2):
        eager_step.run(kernels)
    for lr, rho in ((0.1, 0.05), (0.01, 0.05), (0.01, 0.5), (0.2, 0.0)):
        for step in (eager_step, graph_step):
            step.hparams[..., HParam.LR], step.hparams[..., HParam.RHO] = lr, rho
        eager_step.run(kernels)
        graph.replay()
        assert same(graph_step.read(), eager_step.read()), (lr, rho)


def test_two_graphs_and_eager_steps_share_nothing(kernels: ModuleType) -> None:
    """Replayed on two streams at once, with eager steps on a third."""
    steps = [Step([1_000_000, 7], seed=seed) for seed in range(3)]
    single_steps = [Step([1_000_000, 7], seed=seed) for seed in range(3)]
    graphs = [capture_graph(lambda s=s: s.run(kernels)) for s in steps[:2]]
    for _ in range(2):
        steps[2].run(kernels)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graphs[i].replay() if i < 2 else steps[2].run(kernels)
    torch.cuda.synchronize()
    for step in single_steps:
        for _ in range(22):
            step.run(kernels)
    assert all(same(a.read(), b.read()) for a, b in zip(steps, single_steps, strict=True))


FAILS = """
import torch
from fastsam.fed.executors.cuda import CaptureError, Cuda

cuda = Cuda(torch.device("cuda", torch.cuda.current_device()))
first, second = cuda.stream(), cuda.stream()
numbers = torch.ones(4, device="cuda")

def looks():
    float(numbers.sum())

def raises():
    second.wait_stream(first)
    with cuda.use(second):
        numbers.mul_(2)
        raise ZeroDivisionError("the reason")

try:
    cuda.capture({work}, first)
except CaptureError as error:
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    print(error)
"""


@pytest.mark.parametrize(("work", "reason"), [("looks", "captur"), ("raises", "ZeroDivisionError: the reason")])
def test_a_capture_that_fails_says_why(work: str, reason: str) -> None:
    """CUDA refuses, or Python raises while a second stream is captured. A new process, because no capture may
    follow."""
    command = [sys.executable, "-c", FAILS.replace("{work}", work)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "the step cannot be captured as a CUDA graph" in process.stdout and reason in process.stdout, process.stderr


@pytest.mark.parametrize("waits", [False, True])
def test_what_waits_for_the_device_is_seen_without_a_capture(waits: bool) -> None:
    numbers = torch.ones(4, device=DEVICE)
    with Cuda(torch.device(DEVICE)).no_wait():
        numbers.mul_(2)
        if waits:
            with pytest.raises(RuntimeError, match="synchroniz"):
                float(numbers.sum())
    assert numbers.sum().item() == 8


BASES = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 1e-2}),
}


def train(backend: str, base: str, uses_graph: bool) -> list[Tensor]:
    """Eight whole training steps: forward and backward twice, perturbation, update; lr and rho change on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).to(DEVICE)
    x, y = torch.randn(32, 20, device=DEVICE), torch.randn(32, 5, device=DEVICE)
    optimizer, options = BASES[base]
    lr, rho = torch.tensor(0.05, device=DEVICE), torch.tensor(0.1, device=DEVICE)
    opt = FusedSAM(model.parameters(), optimizer, lr=lr, rho=rho, backend=backend, **options)

    def closure() -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        opt.step(closure)

    replay = capture_graph(step).replay if uses_graph else None
    if replay is None:
        for _ in range(2):
            step()
    weights = []
    for i in range(6):
        if i == 2:
            lr.fill_(0.005)
        if i == 4:
            rho.fill_(0.5)
        x.normal_(generator=torch.Generator(DEVICE).manual_seed(i))
        (replay or step)()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).cpu())
    return weights


@pytest.mark.parametrize("base", BASES)
def test_a_whole_training_step(backend: str, base: str) -> None:
    eager_weights, graph_weights = (train(backend, base, graph) for graph in (False, True))
    for i, (a, b) in enumerate(zip(eager_weights, graph_weights, strict=True)):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=lambda text, i=i: f"step {i}: {text}")
    assert not torch.equal(eager_weights[0], eager_weights[-1])
