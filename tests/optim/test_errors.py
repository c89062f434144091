"""Calls out of order, bad gradients, parameters and base optimizers: a clear error, and nothing lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import MSAM, SAM, FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import SGD, closure_of
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_calls_out_of_order(backend: Backend) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    with pytest.raises(RuntimeError, match="second_step\\(\\) without first_step\\(\\)"):
        opt.second_step()
    with pytest.raises(RuntimeError, match="no closure.*step\\(closure\\)"):
        opt.step()
    with pytest.raises(RuntimeError, match="nothing to restore"):
        opt.restore()
    assert same_bits(before, params)
    backward(params, 0)
    opt.first_step()
    perturbed = copies(params)
    for call in (opt.first_step, lambda: opt.step(closure_of(params)), lambda: opt.perturbed().__enter__()):
        with pytest.raises(RuntimeError, match="restore\\(\\)"):
            call()
        assert same_bits(perturbed, params), "a call out of order changes nothing"
    opt.restore()
    assert same_bits(before, params)


@pytest.mark.parametrize("base", [SGD, torch.optim.RMSprop])
@pytest.mark.parametrize(("call", "method"), [(1, "first_step"), (2, "second_step"), (2, "restore")])
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_closure_that_makes_the_step_itself(
    exclusive: bool, call: int, method: str, base: Any, backend: Backend
) -> None:
    params = make_parameters([(5,), (3,)], torch.float32, backend.device)
    opt = FusedSAM(params, base, lr=0.1, rho=0.3, backend=backend.name, exclusive=exclusive)
    opt.step(closure_of(params))
    calls: list[list[torch.Tensor]] = []

    def closure() -> float:
        backward(params, 0)
        calls.append(copies(params))
        if len(calls) == call:
            getattr(opt, method)()
            calls.append(copies(params))
        return 0.0

    with pytest.raises(RuntimeError, match="closure made a part of the step itself; leave first_step"):
        opt.step(closure)
    # Wholly made, where the closure made it; otherwise not made.
    assert same_bits(params, calls[-1] if method == "second_step" else calls[0])
    opt.step(closure_of(params))


@pytest.mark.parametrize("waiting", [SAM(), SAM(every=2), MSAM()], ids=["SAM", "every", "MSAM"])
def test_two_optimizers_between_their_halves_over_one_parameter(waiting: SAM, backend: Backend) -> None:
    params = make_parameters([(3,), (4,), (5,)], torch.float32, backend.device)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "backend": backend.name}
    first = FusedSAM(params[:2], SGD, sam=waiting, **options)
    shares, apart = FusedSAM(params[1:], SGD, **options), FusedSAM(params[2:], SGD, **options)
    begin, end = (first.step, first.eval) if isinstance(waiting, MSAM) else (first.first_step, first.second_step)
    for _ in range(2):
        before = copies(params[1:2])
        backward(params, 0)
        begin()
        apart.first_step()
        apart.second_step()
        with pytest.raises(RuntimeError, match="another FusedSAM has perturbed some of these parameters"):
            shares.first_step()
        end()
        assert not same_bits(before, params[1:2]), "its update is made"
        shares.first_step()
        with pytest.raises(RuntimeError, match=r"Call its second_step\(\) or restore\(\) first"):
            (first.train if isinstance(waiting, MSAM) else begin)()
        shares.restore()
        first.train()
    first.eval()
    shares.first_step()
    del shares
    FusedSAM(params[1:], SGD, **options).first_step()  # one that is gone is in nobody's way


def test_complex_gradients(backend: Backend) -> None:
    p = make_parameters([(5,)], torch.float32, backend.device)[0]
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch cannot have a gradient of another dtype than its parameter's")
    opt = FusedSAM([p], SGD, lr=0.1, backend=backend.name)
    p.grad_dtype = torch.complex64
    p.grad = torch.ones(5, dtype=torch.complex64, device=backend.device)
    before = copies([p])
    with pytest.raises(RuntimeError, match="gradient of parameter 0 is complex"):
        opt.first_step()
    assert same_bits(before, [p])


def test_gradients_of_another_precision(backend: Backend) -> None:
    p = make_parameters([(5,)], torch.float32, backend.device)[0]
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch cannot have a gradient of another dtype than its parameter's")
    opt = FusedSAM([p], SGD, lr=1.0, rho=0.0, backend=backend.name)
    p.grad_dtype = torch.bfloat16
    p.grad = torch.full((5,), 0.5, dtype=torch.bfloat16, device=backend.device)
    before = p.detach().clone()
    opt.first_step()
    opt.second_step()
    assert torch.equal(p.detach(), before - 0.5)


def test_bad_parameters() -> None:
    a, b = make_parameters([(6,), (4,)], torch.float32)
    whole = torch.randn(4, 6)
    view = torch.nn.Parameter(whole[:, :3])
    disjoint, overlapping = torch.nn.Parameter(whole[:, 3:]), torch.nn.Parameter(whole[1:, 2:5])
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty parameter list"),
        ([a, b, a], ValueError, "duplicate parameters"),
        ([{"params": [a]}, {"params": [b, a]}], ValueError, "more than one parameter group"),
        ([nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)], ValueError, "torch.int64"),
        ([nn.Parameter(torch.ones(3, dtype=torch.complex64))], ValueError, "view_as_real"),
        ([nn.Parameter(torch.ones(1).expand(5))], ValueError, "expanded"),
        ([a, nn.Parameter(a.data)], ValueError, "shares memory"),
        ([a, nn.Parameter(a.data[2:4])], ValueError, "shares memory"),
        ([view, overlapping], ValueError, "shares memory"),
        ([a, nn.Parameter(torch.ones(3, device="meta"))], ValueError, "several devices"),
        ([nn.Parameter(torch.ones(3, device="meta"))], RuntimeError, "meta"),
        (a, TypeError, "iterable"),
        ([torch.ones(3).to_sparse().requires_grad_()], ValueError, "sparse"),
        ([a * 2], ValueError, "non-leaf"),
    ]
    for params, error, message in cases:
        with pytest.raises(error, match=message):
            FusedSAM(params, SGD, lr=0.1)
    FusedSAM([view, disjoint], SGD, lr=0.1)  # columns of one matrix: interleaved, and no element in common


@pytest.mark.parametrize("given", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), None, 3])
def test_what_is_no_collection_of_parameters(given: Any) -> None:
    hint = (
        r"got (Linear|Sequential); pass model\.parameters\(\)"
        if isinstance(given, nn.Module)
        else "got (NoneType|int)$"
    )
    with pytest.raises(TypeError, match=f"params must be parameters or parameter groups, {hint}"):
        FusedSAM(given, SGD, lr=0.1)


def test_a_closure_that_is_no_function(backend: Backend) -> None:
    params = make_parameters([(5,)], torch.float32, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    before = copies(params)
    with pytest.raises(TypeError, match="closure must be a function that computes the loss .*, got 5"):
        opt.step(5)  # type: ignore[arg-type]
    assert same_bits(before, params)


def test_two_devices() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device; the meta device stands for the second one in test_bad_parameters")
    with pytest.raises(ValueError, match="several devices"):
        FusedSAM([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cuda"))], SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_sharded_parameters(tmp_path: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        partial, shard = (nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [p])) for p in (Partial(), Shard(0)))
        with pytest.raises(
            TypeError, match=r"parameter 1 is a DTensor placed as .*Partial.*call redistribute\(\) first"
        ):
            FusedSAM([nn.Parameter(torch.ones(2)), partial], SGD, lr=0.1)
        FusedSAM([shard], SGD, lr=0.1)
        with pytest.raises(ValueError, match="several devices"):
            FusedSAM([shard, nn.Parameter(torch.ones(2, device="meta"))], SGD, lr=0.1)
        for options, why in (
            ({"stochastic_rounding": True}, "random bits"),
            ({"exclusive": True}, "memory belongs"),
        ):
            with pytest.raises(ValueError, match=why):
                FusedSAM([shard], SGD, lr=0.1, **options)
            opt = FusedSAM([nn.Parameter(torch.ones(2))], SGD, lr=0.1, **options)
            with pytest.raises(ValueError, match=why):
                opt.add_param_group({"params": [shard]})
            assert len(opt.param_groups) == 1
    finally:
        torch.distributed.destroy_process_group()
    flat = nn.Parameter(torch.ones(4))
    flat._is_flat_param = True  # what FullyShardedDataParallel marks its parameters with
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel \(FSDP1\).*use torch.distributed.fsdp.fully_shard"):
        FusedSAM([flat], SGD, lr=0.1)


def test_bases_that_cannot_be() -> None:
    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(TypeError, match="a class such as torch.optim.SGD"):
        FusedSAM(params, SGD(params, lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Adadelta has options of its own called rho"):
        FusedSAM(params, torch.optim.Adadelta)
    with pytest.raises(ValueError, match="LBFGS calls a closure several times"):
        FusedSAM(params, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="unexpected keyword"):
        FusedSAM(params, SGD, lr=0.1, betas=(0.9, 0.99))
    with pytest.raises(TypeError, match=r"must make a torch.optim.Optimizer"):
        FusedSAM(params, lambda groups, **options: object())  # type: ignore[arg-type,return-value]


def test_a_backend_that_cannot_serve() -> None:
    params = make_parameters([(3,)], torch.float32, "cpu")
    from fastsam import backends

    missing = [b for b in backends.table() if b.device == "cuda" and not b.available and b.name == "native"]
    if missing:
        with pytest.raises(RuntimeError, match="cannot serve"):
            backends.select("native", torch.device("cuda"), torch.float32)
    with pytest.raises(ValueError, match="'auto', 'native', 'triton', 'foreach', 'reference'"):
        FusedSAM(params, SGD, lr=0.1, backend="cuda")


def test_a_function_that_makes_the_base(backend: Backend) -> None:
    params = make_parameters([(3,)], torch.float32, backend.device)
    opt = FusedSAM(params, partial(SGD, momentum=0.9, nesterov=True), lr=0.1, backend=backend.name)
    assert opt.param_groups[0]["nesterov"] is True
    opt.step(closure_of(params))
    assert "momentum_buffer" in opt.state[params[0]]
