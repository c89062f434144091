"""Interrupts at the places that no line of the code stands for: in torch's switches, in the kernels, in the making of a
call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastsam import FusedSAM, backends
from fastsam.backends import Backend
from fastsam.optim.variants import SAM
from fastsam_kernels import direct_calls, reference
from tests.helpers.interrupted_steps import Plan, state
from tests.helpers.interrupting import KERNELS, Interrupt, Tracer
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.trainings import Spec

pytestmark = pytest.mark.usefixtures("poisoned_memory")
F32, F64, HALF = torch.float32, torch.float64, torch.bfloat16
SGD = Spec("sam", "sgd", F32, "plain")
# The last makes several calls, one for each half of a decoupled step.
SPECS = [SGD, Spec("sam", "adamw", F64, "plain"), SGD._replace(dtype=HALF), Spec("wsam", "sgd", HALF, "plain")]


@pytest.mark.parametrize(
    ("backend", "spec"), [*(("reference", spec) for spec in SPECS), ("foreach", SPECS[2])], ids=str
)
@pytest.mark.parametrize("checks_finite", [False, True])
@pytest.mark.parametrize("warm", [0, 2])
def test_the_reference_interrupted_in_its_update_writes_nothing(
    backend: str, spec: Spec, warm: int, checks_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference writes the state of a segment before its weights, and segments one after the other.

    `foreach` calls the reference for half precision.
    """
    write, calls, last = reference._write, [], 0

    def interrupted_write(*operands: Any) -> None:
        write(*operands)
        calls.append(1)
        if len(calls) == last:
            raise Interrupt

    monkeypatch.setattr(reference, "_write", interrupted_write)
    expected, training = (spec.make(warm, backend=backend, skip_nonfinite=checks_finite) for _ in range(2))
    old_weights, old = copies(training.params), state(training)
    calls.clear()
    expected.steps(range(warm, warm + 1))
    last = len(calls)
    calls.clear()
    with pytest.raises(Interrupt):
        training.steps(range(warm, warm + 1))
    assert same_bits(old_weights, training.params) and same_bits(old, state(training))


def test_raising_inside_kernels_of_torchs_functions() -> None:
    """They work tensor by tensor, so an interrupt can leave some weights perturbed and others not, and some updated."""
    spec = SGD._replace(options="foreach")
    with Tracer(None, (KERNELS,)) as tracer:
        spec.make(2)
    expected = spec.make(1)
    with Tracer(None, (KERNELS,)) as tracer:
        expected.steps(range(1, 2))
    for line in range(0, tracer.lines, 8):
        training = spec.make(1)
        old_weights = copies(training.params)
        with pytest.raises(Interrupt), Tracer(line, (KERNELS,)) as tracer_here:
            training.steps(range(1, 2))
        assert same_bits(old_weights, training.params), f"raised at {tracer_here.where}"


@pytest.mark.parametrize("style", ["step", "by_hand", "in_context"])
@pytest.mark.parametrize("backend", ["reference", "foreach", "auto"])
def test_autograd_is_on_after_an_interrupt_where_torch_switches_it(backend: str, style: str) -> None:
    """In the entry or the exit of `torch.no_grad`, which then leaves it off."""
    plan = Plan(SGD, style, 2, backend)
    plan.folders = (torch.autograd.grad_mode.__file__,)
    lines = plan.lines()
    assert lines > 0 or backend == "auto"  # calls of `auto` need no switch
    for line in range(lines):
        training = plan.make()
        with pytest.raises(Interrupt), Tracer(line, plan.folders):
            plan.act(training, plan.warm)
        is_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert is_enabled, f"switched off at switch {line} of {lines}"


@pytest.mark.parametrize("dtype", [F32, HALF], ids=str)
def test_an_interrupt_after_the_update_kernel_restores_the_weights(dtype: torch.dtype, backend: Backend) -> None:
    """Ctrl-C is delivered when a kernel that Python calls returns: the weights go back, whatever it had done."""
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    params, opt = training = SGD._replace(dtype=dtype).make(1, backend=backend.name)
    old_weights, bucket = copies(params), opt._engine.buckets[0]
    real = bucket.kernels

    class InterruptingKernels:
        def __getattr__(self, op: str) -> Any:
            return getattr(real, op)

        direct_calls = update_calls = None  # no shorter way

        def update_(self, *args: Any, **options: Any) -> None:
            real.update_(*args, **options)
            raise KeyboardInterrupt

    bucket.kernels = InterruptingKernels()  # type: ignore[assignment]
    for part in bucket._selections.values():
        part.direct_calls.clear()
    with pytest.raises(KeyboardInterrupt):
        training.steps(range(1, 2))
    bucket.kernels = real
    if dtype == F32:
        assert same_bits(old_weights, params)
    else:  # the master copy has the new weights: the step was made
        masters = [opt.state_dict()["state"][i]["master"] for i in range(len(params))]
        assert same_bits([m.to(HALF) for m in masters], params)
    training.steps(range(1, 2))


@pytest.mark.parametrize("function_name", ["pad_state", "_function"])  # before and after the addresses are others
def test_an_interrupt_while_a_call_is_made_leaves_none_to_make_again(function_name: str) -> None:
    """Cached calls of the step before have a different kind, or addresses of a state that has been freed."""
    if backends.select("auto", torch.device("cpu"), torch.float32).name != "native":
        pytest.skip("the compiled kernels alone are called past torch")

    @contextmanager
    def in_the_middle() -> Iterator[None]:
        def interrupted_call(*arguments: Any) -> Any:
            if function_name == "pad_state" or str(arguments[0]).startswith("update"):
                raise Interrupt(function_name)
            return function(*arguments)

        function = getattr(direct_calls, function_name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct_calls, function_name, interrupted_call)
            yield

    assert Plan(SGD._replace(variant="every other"), "step", 2).interrupted(in_the_middle())


def test_an_interrupted_second_step_leaves_no_flag_for_later_steps() -> None:
    """A step that does not perturb may be made without a first half, which would clear the flag."""
    results = []
    for is_finishing in (False, True):
        p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        opt = FusedSAM([p], torch.optim.SGD, lr=0.1, variant=SAM(interval=3))

        def closure(p: torch.nn.Parameter = p) -> torch.Tensor:
            loss = p.square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        opt._engine.is_finishing = is_finishing
        opt.step()
        opt.step(closure)  # with gradients cleared, and not a trainer's closure
        results.append(p)
    assert same_bits(*([p] for p in results))
