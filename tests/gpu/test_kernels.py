"""The kernels on a GPU: launches, synchronisation, sizes that only a GPU holds, opcheck, bits."""

from types import ModuleType

import pytest
import torch
from torch.utils._pytree import tree_map_only

from fastsam import FusedSAM
from fastsam.fed.executors.cuda import Cuda
from fastsam_kernels import native
from tests.helpers import native_step
from tests.helpers.gpu_step import DEVICE, Step, hparams_of, same

RESNET_LIKE = [64 * 9 * (1 + i) for i in range(60)] + [1000, 512 * 1000]


@pytest.fixture
def native_kernels() -> ModuleType:
    reason = native.why_not("cuda")
    if reason is not None:
        pytest.skip(f"native on CUDA: {reason}")
    return native


def test_three_launches_and_nothing_else(native_kernels: ModuleType) -> None:
    """norm, perturb and update of 62 tensors: three kernels, no copy, no memset."""
    step = Step(RESNET_LIKE)
    step.run(native_kernels)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.run(native_kernels)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 3 and all("fastsam" in name for name in on_device), on_device


def test_a_steady_step_is_three_launches_and_does_not_wait(backend: str) -> None:
    """FusedSAM with a learning rate that changes in every step: a step puts three kernels on the device, and only the
    learning rate is copied to it."""
    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in RESNET_LIKE]
    opt = FusedSAM(params, torch.optim.SGD, lr=0.1, momentum=0.9, rho=0.05, backend=backend)
    grads = [torch.randn_like(p) for p in params]

    def step(i: int) -> None:
        opt.param_groups[0]["lr"] = 0.1 / (i + 1)
        for half in (opt.first_step, opt.second_step):
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            half()

    for i in range(3):
        step(i)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with Cuda(torch.device(DEVICE)).no_wait():
            for i in range(3, 8):
                step(i)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [name for name in on_device if "Memcpy" in name]
    assert all("HtoD" in name for name in copies) and len(copies) <= 5, copies
    assert len(on_device) - len(copies) == 5 * 3, on_device


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_bits_every_time(kernels: ModuleType, rows: int) -> None:
    """Many blocks in whatever order: twenty runs, one result."""
    expected = None
    for _ in range(20):
        step = Step([3_000_001, 77, 0, 200_000], rows)
        step.run(kernels)
        result = step.read()
        assert expected is None or same(result, expected)
        expected = result


def test_the_same_bits_as_the_cpu_kernels(native_kernels: ModuleType) -> None:
    """Given the same norm, CUDA has the CPU's bits: both compile csrc/kernel_math.h without contraction."""
    if native.why_not("cpu") is not None:
        pytest.skip(f"native on the CPU: {native.why_not('cpu')}")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        steps = [Step([100_003, 5, 8192], 2, dtype=dtype, device=device) for device in (DEVICE, "cpu")]
        for step in steps:
            device = step.sumsq.device.type
            step.sumsq.copy_(torch.tensor([3.0, 7.0]))
            native_kernels.perturb_(step.params, step.backup, step.g1, step.table, step.hparams, step.sumsq, True)
            operands = step.params, step.backup, step.g2, step.table, hparams_of(2, device)
            native_kernels.update_(*operands, "sgd", [step.momentum], init_state=True, write_master=True)
        assert same(steps[0].read(), steps[1].read()), dtype


def test_a_hundred_million_parameters(kernels: ModuleType) -> None:
    """Against torch in float64: blocks of several sweeps, and thousands of partial sums."""
    n = 100_000_003
    step = Step([n])
    w, g1, g2 = (t[0].double() for t in (step.params, step.g1, step.g2))
    step.run(kernels)
    torch.testing.assert_close(step.sumsq[0], g1.square().sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(step.params[0].double(), w - 0.1 * (g2 + 1e-2 * w), rtol=1e-6, atol=1e-6)
    assert torch.equal(step.backup[0, :n].double(), w)


def test_more_elements_than_an_int_counts(kernels: ModuleType) -> None:
    n = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip(f"needs {8 * n >> 30} GiB of free GPU memory")
    params, g = (torch.full((n,), value, dtype=torch.bfloat16, device=DEVICE) for value in (1.0, 0.5))
    backup = torch.zeros(1, n, dtype=torch.bfloat16, device=DEVICE)
    sumsq, table = torch.zeros(1, dtype=torch.float64, device=DEVICE), torch.tensor([[0, n, 0, 0]])
    hparams = hparams_of(RHO=float(n) ** 0.5)  # with |g| = 0.5 each element moves by 1
    kernels.norm_(sumsq, [g], [], table, hparams)
    assert sumsq.item() == 0.25 * n
    kernels.perturb_([params], backup, [g], table, hparams, sumsq, True)
    assert (params == 2).all() and (backup == 1).all()
    kernels.restore_([params], backup, table)
    assert (params == 1).all()


@pytest.mark.parametrize("name", ["norm_", "perturb_", "restore_", "update_norm_", "update_"])
def test_opcheck(native_kernels: ModuleType, name: str) -> None:
    operands = native_step.Step(shapes=[(33,), (5, 7), ()])
    op, args = native_step.calls(operands)[name]
    cuda_args = tree_map_only(torch.Tensor, lambda t: t if t is operands.table else t.to(DEVICE), args)
    torch.library.opcheck(op, cuda_args)


def test_tickets_of_many_outputs(native_kernels: ModuleType) -> None:
    """More outputs than there are tickets: a call then brings its own."""
    g, table, hparams = torch.ones(1000, device=DEVICE), torch.tensor([[0, 1000, 0, 0]]), hparams_of()
    sums = torch.zeros(70_000, dtype=torch.float64, device=DEVICE)
    for i in range(0, len(sums)):
        native_kernels.norm_(sums[i : i + 1], [g], [], table, hparams)
    assert (sums == 1000).all()


def test_another_device(native_kernels: ModuleType) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    step = Step([5000, 3], device="cuda:1")
    expected = Step([5000, 3], device="cuda:0")
    for s in (step, expected):
        s.run(native_kernels)
    assert same(step.read(), expected.read())
