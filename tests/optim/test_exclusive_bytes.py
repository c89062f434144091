"""The bytes that `FusedSAM(assume_no_alias=True)` saves, and half-precision weights, whose master copies are then not
compared with them."""

import copy

import pytest
import torch

from bench.kernel_cases import OPS
from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam.optim import storage_swap
from fastsam_kernels import direct_calls
from tests.helpers.sam_cases import HALF, SGD, SHAPES, Model, first_half, halves, native, train
from tests.helpers.sam_oracle import copies, make_parameters, same_bits
from tests.helpers.traffic import needs_interpreter, record_traffic

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("write", ["copy_", "load_state_dict", "data", "loaded twice"])
def test_written_half_precision_weights_are_taken_over(write: str, backend: Backend) -> None:
    """All that a version counter or another memory shows."""
    results = []
    for exclusive in (True, False):
        model = Model(HALF, backend.device)
        opt = FusedSAM(model.params, SGD, lr=0.1, momentum=0.9, backend=backend.name, assume_no_alias=exclusive)
        train(model, opt, range(2))
        states = opt.state_dict(), Model(HALF, backend.device, seed=5).state_dict()
        train(model, opt, range(2, 4))
        if write == "copy_":
            with torch.no_grad():
                model.params[1].copy_(torch.ones(8))
        elif write == "data":
            model.params[1].data = torch.ones(8, dtype=HALF, device=backend.device)
        else:
            model.load_state_dict(states[1])
            if write == "loaded twice":
                opt.load_state_dict(states[0])
        train(model, opt, range(4, 6))
        results.append(model.params)
    assert same_bits(*results)


@needs_interpreter
def test_thirty_bytes_with_a_master_copy() -> None:
    """The kernels access 30 bytes in a step, and 36 if writes of users have to be noticed."""
    params = make_parameters([(128, 64), (4096,)], HALF)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, backend="triton", assume_no_alias=True)

    def step() -> float:
        with record_traffic({}) as traffic:
            for half in (opt.first_step, opt.second_step):
                for p in params:
                    p.grad = torch.randn(p.shape).to(HALF)
                half()
        return traffic.bytes / sum(p.numel() for p in params)

    step()
    assert 30 < step() < 1.02 * 30
    with torch.no_grad():
        params[1].mul_(2)
    assert 36 < step() < 1.02 * 36


@native
def test_thirty_six_bytes_with_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass does not write the weights' storage; the second neither reads nor writes the perturbed weights.

    The interpreter does not see compiled kernels, so this is shown by experiment. The calls are a separate perturbation
    and an update of the weights.
    """
    monkeypatch.setattr(storage_swap, "MIN_MEAN_NUMEL_CPU", 0)
    params, calls, real = make_parameters(SHAPES, torch.float32), [], direct_calls._function
    monkeypatch.setattr(direct_calls, "_function", lambda name: lambda *args: calls.append(name) or real(name)(*args))
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, rho=0.2, assume_no_alias=True)
    halves(opt, params)
    plain, plain_opt = copy.deepcopy((params, opt))
    calls.clear()
    memory, old_weights = [p.detach() for p in params], copies(params)
    first_half(opt, params, 1)
    first_half(plain_opt, plain, 1)
    assert same_bits(memory, old_weights)
    perturbed_weights = [p.detach() for p in params]
    for p, q in zip(params, plain, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(p)
    for p in perturbed_weights:
        p.fill_(torch.nan)
    opt.second_step()
    plain_opt.second_step()
    assert same_bits(params, plain) and all(p.isnan().all() for p in perturbed_weights)
    assert calls == ["norm_perturb", "norm_perturb", "update", "update"]
    assert sum(OPS[name].bytes_per_parameter for name in ("norm", "perturb_separate", "update")) == 36
