"""Streams, torch.compile with its own code generator, and mixed precision, on a GPU."""

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.optim import storage_swap
from tests.helpers.gpu_step import DEVICE, Step, same


def test_steps_on_several_streams(kernels: ModuleType) -> None:
    """Steps on each stream have the bits of steps without other streams, so no scratch memory is shared."""
    parallel_steps, single_steps = ([Step([700_000, 3, 8193], 1 + i % 2, seed=i) for i in range(6)] for _ in range(2))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in parallel_steps]
    for _ in range(15):
        for step, stream in zip(parallel_steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step.run(kernels)
    torch.cuda.synchronize()
    for step in single_steps:
        for _ in range(15):
            step.run(kernels)
    assert all(same(a.read(), b.read()) for a, b in zip(parallel_steps, single_steps, strict=True))


def losses(backend: str, is_compiled: bool, **options: object) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(DEVICE)
    x, y = torch.randn(64, 16, device=DEVICE), torch.randn(64, 4, device=DEVICE)
    opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, rho=0.1, backend=backend)

    def loss_of() -> Tensor:
        return (model(x) - y).square().mean()

    def step() -> Tensor:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        opt.first_step(zero_grad=True)
        loss_of().backward()
        opt.second_step()
        return loss.detach()

    compiled_step = torch.compile(step) if is_compiled else step
    return [float((step if i < 2 else compiled_step)()) for i in range(8)]


def test_compiled_training_steps(backend: str) -> None:
    torch._dynamo.reset()
    eager_losses, compiled_losses = losses(backend, False), losses(backend, True)
    torch.testing.assert_close(torch.tensor(compiled_losses), torch.tensor(eager_losses), rtol=1e-4, atol=1e-5)
    assert len(set(eager_losses)) == 8


@pytest.mark.parametrize("streams", [1, 2])
def test_weights_whose_memory_is_exchanged(monkeypatch: pytest.MonkeyPatch, backend: str, streams: int) -> None:
    """Steps with swapped storage have the bits of ordinary steps, also if the optimizer runs on a different stream."""
    monkeypatch.setattr(storage_swap, "MIN_MEAN_NUMEL_CUDA", 0)
    passes, updates = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for exchanges in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).to(DEVICE)
        x, y = torch.randn(64, 256, device=DEVICE), torch.randn(64, 64, device=DEVICE)
        opt = FusedSAM(
            model.parameters(), torch.optim.AdamW, lr=1e-3, rho=0.1, backend=backend, assume_no_alias=exchanges
        )
        torch.cuda.synchronize()
        addresses = [p.data_ptr() for p in model.parameters()]
        for _ in range(10):
            for half in (opt.first_step, opt.second_step):
                with torch.cuda.stream(passes):
                    (model(x) - y).square().mean().backward()
                stream = passes if streams == 1 else updates
                stream.wait_stream(passes)
                with torch.cuda.stream(stream):
                    half(zero_grad=True)
                    is_swapped = [p.data_ptr() for p in model.parameters()] != addresses
                    assert is_swapped == (exchanges and backend == "native" and half == opt.first_step)
                passes.wait_stream(stream)
        torch.cuda.synchronize()
        results.append([p.detach().cpu() for p in model.parameters()])
    assert same(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scaler_skips_and_goes_on(backend: str, dtype: torch.dtype) -> None:
    """With a GradScaler: a step whose second gradient overflows restores the weights; the others train."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3).to(DEVICE)
    opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, backend=backend)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0)
    x = torch.randn(16, 8, device=DEVICE)
    for i in range(4):
        old_weight = model.weight.detach().clone()
        for second in (False, True):
            with torch.autocast(DEVICE, dtype):
                loss = model(x).float().square().mean() * (torch.inf if i == 2 and second else 1.0)
            opt.zero_grad()
            scaler.scale(loss).backward()
            if not second:
                opt.first_step()
        scaler.step(opt)
        scaler.update()
        assert torch.equal(model.weight, old_weight) == (i == 2)
        assert model.weight.isfinite().all()
