"""An exception at any line of a step: the weights are the original ones bit for bit, or the step was made; nothing in
between, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastsam import backends
from fastsam.backends import Backend
from fastsam_kernels import raw_calls, reference
from tests.helpers.interrupted_steps import CASES, F32, FAMILY, Case, Plan, sgd
from tests.helpers.interrupting import KERNELS, Interrupt, Tracer
from tests.helpers.sam_oracle import copies, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EVERY_CASE = [(name, "step", warm, "auto") for name in CASES for warm in (0, 2)]
EVERY_CASE += [("sgd", style, warm, "auto") for style in ("by_hand", "in_context", "look") for warm in (0, 2)]
EVERY_CASE += [("rmsprop", "by_hand", 2, "auto"), ("bfloat16", "by_hand", 2, "auto")]
EVERY_CASE += [("sgd", "step", 2, "foreach"), ("sgd", "step", 2, "reference"), ("bfloat16", "step", 2, "reference")]
EVERY_CASE += [("interval", style, 1, "auto") for style in ("step", "by_hand", "alone")]
EVERY_CASE += [(name, "step", warm, "auto") for name in ("wsam", "wsam bf16", "looksam") for warm in (1, 2)]
EVERY_CASE += [("friendly", "by_hand", 2, "auto"), ("friendly", "step", 2, "reference")]
EVERY_CASE += [("interval", "step", 2, "auto")]
EVERY_CASE += [("interval", "step", 1, backend) for backend in ("foreach", "reference")]
# A first step runs several hundred lines more, those that make the buffers: much the same in every style and for every
# base. So are a step's lines.
USUAL = [("sgd", "step", 0, "auto"), ("bfloat16", "by_hand", 2, "auto"), ("sgd", "step", 2, "foreach")]
USUAL += [("check_finite", "step", 2, "auto"), ("interval", "alone", 1, "auto"), ("looksam", "step", 2, "auto")]


# Each line costs a step or two, and a step has hundreds: in `make test` it is every eighth one, in `make test-slow`
# each.
EACH = [pytest.param(1, marks=pytest.mark.slow), 8]


@pytest.mark.parametrize(
    ("name", "style", "warm", "backend", "each"),
    [pytest.param(*case, 1, marks=pytest.mark.slow) for case in EVERY_CASE] + [(*case, 8) for case in USUAL],
)
def test_raising_at_every_line(name: str, style: str, warm: int, backend: str, each: int) -> None:
    """`warm`: steps before. The first step makes the buffers, the third uses what it finds.

    A step with the compiled CPU kernels or the reference is made or not made whatever line is interrupted, those around
    the kernels included.
    """
    plan = Plan(name, style, warm, backend)
    lines = plan.lines()
    assert lines > 50
    for line in range(0, lines, each):
        assert plan.interrupted(Tracer(line, plan.folders))


# The last two make several calls: one for each dtype, and one for each half of a decoupled step.
WITH_REFERENCE = [
    ("reference", name) for name in ("sgd", "adamw", "bfloat16", "check_finite", "two dtypes", "wsam bf16")
]


@pytest.mark.parametrize(("backend", "name"), [*WITH_REFERENCE, ("foreach", "bfloat16")])
@pytest.mark.parametrize("warm", [0, 2])
def test_the_reference_interrupted_in_its_update_writes_nothing(
    backend: str, name: str, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the state of a segment before its weights, and these after those of the segments before. `foreach` has
    its half precision from it."""
    build, dtypes = {**CASES, **FAMILY}[name]
    write, calls, last = reference._write, [], 0

    def interrupted(*operands: Any) -> None:
        write(*operands)
        calls.append(1)
        if len(calls) == last:
            raise Interrupt

    monkeypatch.setattr(reference, "_write", interrupted)
    undisturbed, case = (Case(lambda params: build(params, backend=backend), dtypes, warm) for _ in range(2))
    before, state = copies(case.params), case.state()
    calls.clear()
    undisturbed.step()
    last = len(calls)
    calls.clear()
    with pytest.raises(Interrupt):
        case.step()
    assert same_bits(before, case.params) and same_bits(state, case.state())


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("backend", ["reference", "foreach", "auto"])
def test_raising_inside_the_kernels(backend: str, warm: int, each: int) -> None:
    """The reference works tensor by tensor, so an interrupt can leave some weights perturbed and others not, and some
    updated."""

    def make() -> Case:
        return Case(lambda params: sgd(params, backend=backend), [F32], warm)

    make().step()  # imports what there is to import
    undisturbed = make()
    with Tracer(None, (KERNELS,)) as tracer:
        undisturbed.step()
    for line in range(0, tracer.lines, each):
        case = make()
        before = copies(case.params)
        with pytest.raises(Interrupt), Tracer(line, (KERNELS,)) as tracer_here:
            case.step()
        assert same_bits(before, case.params), f"raised at {tracer_here.where}"


@pytest.mark.parametrize("style", ["step", "by_hand", "in_context"])
@pytest.mark.parametrize("backend", ["reference", "foreach", "auto"])
def test_autograd_is_on_after_an_interrupt_where_torch_switches_it(backend: str, style: str) -> None:
    """In the entry or the exit of `torch.no_grad`, which then leaves it off."""
    plan = Plan("sgd", style, 2, backend)
    plan.folders = (torch.autograd.grad_mode.__file__,)
    lines = plan.lines()
    assert lines > 0 or backend == "auto"  # whose calls need no switch
    for line in range(lines):
        case = plan.make()
        with pytest.raises(Interrupt), Tracer(line, plan.folders):
            getattr(case, style)()
        on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert on, f"switched off at switch {line} of {lines}"


@pytest.mark.parametrize("name", ["sgd", "bfloat16"])
def test_an_interrupt_after_the_update_kernel_restores_the_weights(name: str, backend: Backend) -> None:
    """Ctrl-C is delivered when a kernel that Python calls returns: the weights go back, whatever it had done."""
    build, dtypes = CASES[name]
    case = Case(lambda params: build(params, backend=backend.name), dtypes, warm=1)
    before = copies(case.params)
    real = case.opt._engine.buckets[0].kernels

    class Interrupting:
        def __getattr__(self, op: str) -> Any:
            return getattr(real, op)

        raw_calls = update_calls = None  # no shorter way

        def update_(self, *args: Any, **options: Any) -> None:
            real.update_(*args, **options)
            raise KeyboardInterrupt

    case.opt._engine.buckets[0].kernels = Interrupting()  # type: ignore[assignment]
    case.opt._engine.buckets[0].moved()
    with pytest.raises(KeyboardInterrupt):
        case.step()
    case.opt._engine.buckets[0].kernels = real
    if name == "sgd":
        assert same_bits(before, case.params)
    else:  # the master copy has the new weights: the step was made
        masters = [case.opt.state_dict()["state"][i]["master"] for i in range(len(case.params))]
        assert same_bits([m.to(torch.bfloat16) for m in masters], case.params)
    case.step()


@pytest.mark.parametrize("where", ["all_fields", "_function"])  # before and after the addresses are others
def test_an_interrupt_while_a_call_is_made_leaves_none_to_make_again(where: str) -> None:
    """Those of the step before are of another kind, or have the addresses of a state that is gone by then."""
    if backends.select("auto", torch.device("cpu"), torch.float32).name != "native":
        pytest.skip("the compiled kernels alone are called past torch")

    @contextmanager
    def in_the_middle() -> Iterator[None]:
        def interrupted(*arguments: Any) -> Any:
            if where == "all_fields" or str(arguments[0]).startswith("update"):
                raise Interrupt(where)
            return found(*arguments)

        found = getattr(raw_calls, where)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(raw_calls, where, interrupted)
            yield

    assert Plan("interval", "step", 2, "auto").interrupted(in_the_middle())
