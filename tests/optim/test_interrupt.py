"""An exception at any line of a step: the weights are the original ones bit for bit, or the step was made; nothing in between, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import SAM, FusedSAM
from fastsam.backends import Backend, select
from fastsam.optim.variants import WSAM, FriendlySAM, LookSAM
from fastsam_kernels import reference
from tests.helpers.interrupting import KERNELS, PACKAGE, Interrupt, Tracer
from tests.helpers.sam_oracle import backward, copies, landscape, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case:
    """An optimizer in mid-training, and what its next step should give."""

    def __init__(self, build: Callable[[list[nn.Parameter]], FusedSAM], dtypes: list[torch.dtype], warm: int) -> None:
        self.params = [make_parameters([(5, 3)], dtype, seed=i)[0] for i, dtype in enumerate(dtypes)]
        self.params += [make_parameters([(4,)], dtypes[0], seed=9)[0]]
        self.opt = build(self.params)
        self.time = 0
        for _ in range(warm):
            self.step()

    def closure(self) -> torch.Tensor:
        loss = landscape(self.params, self.time)
        loss.backward()
        return loss

    def step(self) -> None:
        self.opt.step(self.closure)
        self.time += 1

    def by_hand(self) -> None:
        """The other style. The step is over when `second_step` is."""
        backward(self.params, self.time)
        try:
            self.opt.first_step(zero_grad=True)
            backward(self.params, self.time)
            self.opt.second_step(zero_grad=True)
        except BaseException:
            if self.opt._engine.phase is not type(self.opt._engine.phase).IDLE:
                self.opt.restore()
            raise
        self.time += 1

    def alone(self) -> None:
        """The second half of a step that does not perturb."""
        backward(self.params, self.time)
        self.opt.second_step(zero_grad=True)
        self.time += 1

    def in_context(self) -> None:
        backward(self.params, self.time)
        with self.opt.perturbed():
            backward(self.params, self.time)
            self.opt.step()
        self.time += 1

    def look(self) -> None:
        """No step at all."""
        backward(self.params, self.time)
        with self.opt.perturbed():
            backward(self.params, self.time)

    def state(self) -> list[torch.Tensor]:
        """All tensors of the state. A master copy that is no more than the weights says nothing: there is none before the first step."""
        found = []
        for i, entry in self.opt.state_dict()["state"].items():
            for name, value in sorted(entry.items()):
                if isinstance(value, torch.Tensor) and not (
                    name == "master" and torch.equal(value, self.params[i].float())
                ):
                    found.append(value)
        return found


def sgd(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return FusedSAM(params, torch.optim.SGD, lr=0.1, momentum=0.9, **options)


def adam(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return FusedSAM(params, torch.optim.AdamW, lr=0.1, **options)


def rmsprop(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return FusedSAM(params, torch.optim.RMSprop, lr=0.1, **options)


def finite(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return sgd(params, check_finite=True, **options)


def interval(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return sgd(params, sam=SAM(every=2), **options)


def wsam(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return sgd(params, sam=WSAM(), **options)


def looksam(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return sgd(params, sam=LookSAM(k=2), **options)


def friendly(params: list[nn.Parameter], **options: Any) -> FusedSAM:
    return sgd(params, sam=FriendlySAM(), **options)


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CASES = {
    "sgd": (sgd, [F32]),
    "adamw": (adam, [F64]),
    "bfloat16": (sgd, [BF16]),
    "two dtypes": (sgd, [F32, F64]),
    "rmsprop": (rmsprop, [F32]),
    "check_finite": (finite, [F32]),
}
# After one step comes one that does not perturb.
FAMILY = {
    "interval": (interval, [F32]),
    "wsam": (wsam, [F32]),
    "wsam bf16": (wsam, [BF16]),
    "looksam": (looksam, [F32]),
    "friendly": (friendly, [F32]),
}


EVERY_CASE = [(name, "step", warm, "auto") for name in CASES for warm in (0, 2)]
EVERY_CASE += [("sgd", style, warm, "auto") for style in ("by_hand", "in_context", "look") for warm in (0, 2)]
EVERY_CASE += [("rmsprop", "by_hand", 2, "auto"), ("bfloat16", "by_hand", 2, "auto")]
EVERY_CASE += [("sgd", "step", 2, "foreach"), ("sgd", "step", 2, "reference"), ("bfloat16", "step", 2, "reference")]
EVERY_CASE += [("interval", style, 1, "auto") for style in ("step", "by_hand", "alone")]
EVERY_CASE += [(name, "step", warm, "auto") for name in ("wsam", "wsam bf16", "looksam") for warm in (1, 2)]
EVERY_CASE += [("friendly", "by_hand", 2, "auto"), ("friendly", "step", 2, "reference")]
EVERY_CASE += [("interval", "step", 1, backend) for backend in ("foreach", "reference")]
# A first step runs several hundred lines more, those that make the buffers: much the same in every style and for every base. So are a step's lines.
USUAL = [("sgd", "step", 0, "auto"), ("bfloat16", "by_hand", 2, "auto"), ("sgd", "step", 2, "foreach")]
USUAL += [(name, "step", 2, "auto") for name in ("sgd", "two dtypes", "check_finite")] + [
    ("sgd", "in_context", 2, "auto")
]
USUAL += [("interval", "alone", 1, "auto"), ("looksam", "step", 2, "auto"), ("friendly", "by_hand", 2, "auto")]


# Each line costs a step or two, and a step has hundreds: in `make test` it is every third one, in `make test-slow` each.
EACH = [pytest.param(1, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize(
    ("name", "style", "warm", "backend", "each"),
    [pytest.param(*case, 1, marks=pytest.mark.slow) for case in EVERY_CASE] + [(*case, 3) for case in USUAL],
)
def test_raising_at_every_line(name: str, style: str, warm: int, backend: str, each: int) -> None:
    """`warm`: steps before. The first step makes the buffers, the third uses what it finds.

    A step with the compiled CPU kernels or the reference is made or not made whatever line is interrupted, those around the kernels included.
    """
    build, dtypes = {**CASES, **FAMILY}[name]
    whole = select(backend, torch.device("cpu"), F32).name in ("native", "reference")
    folders = (PACKAGE, KERNELS) if whole else (PACKAGE,)

    def make() -> Case:
        return Case(lambda params: build(params, backend=backend), dtypes, warm)

    getattr(make(), style)()  # what is loaded at first use is no part of a step
    undisturbed = make()
    with Tracer(None, folders) as tracer:
        getattr(undisturbed, style)()
    stepped, stepped_state = copies(undisturbed.params), undisturbed.state()
    undisturbed.step()
    assert tracer.lines > 50

    for line in range(0, tracer.lines, each):
        case = make()
        before, state = copies(case.params), case.state()
        with pytest.raises(Interrupt), Tracer(line, folders) as tracer_here:
            getattr(case, style)()
        where = tracer_here.where
        if same_bits(before, case.params):
            assert same_bits(state, case.state()), f"state changed, weights not: raised at {where}"
            getattr(case, style)()
        else:
            assert same_bits(stepped, case.params), f"neither the original nor the stepped weights: raised at {where}"
            assert same_bits(stepped_state, case.state()), f"stepped, but not the state: raised at {where}"
            case.time = warm + 1
        assert same_bits(stepped, case.params), f"the step after it is another: raised at {where}"
        case.step()
        assert same_bits(undisturbed.params, case.params), f"the second step after it is another: raised at {where}"


@pytest.mark.parametrize("name", ["sgd", "adamw", "bfloat16", "check_finite"])
@pytest.mark.parametrize("warm", [0, 2])
def test_the_reference_interrupted_in_its_update_writes_nothing(
    name: str, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the state of a segment before its weights, and these after those of the segments before."""
    build, dtypes = CASES[name]
    case = Case(lambda params: build(params, backend="reference"), dtypes, warm)
    before, state, write, calls = copies(case.params), case.state(), reference._write, []

    def interrupted(*operands: Any) -> None:
        write(*operands)
        calls.append(1)
        if len(calls) == len(case.params):
            raise Interrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(reference, "_write", interrupted)
        case.step()
    assert same_bits(before, case.params) and same_bits(state, case.state())


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("backend", ["reference", "foreach", "auto"])
def test_raising_inside_the_kernels(backend: str, warm: int, each: int) -> None:
    """The reference works tensor by tensor, so an interrupt can leave some weights perturbed and others not, and some updated."""

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


@pytest.mark.parametrize("bad_pass", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_closure_that_raises(name: str, bad_pass: int, backend: Backend) -> None:
    build, dtypes = CASES[name]
    case = Case(lambda params: build(params, backend=backend.name), dtypes, warm=1)
    before, state, calls = copies(case.params), case.state(), []

    def closure() -> torch.Tensor:
        calls.append(copies(case.params))
        loss = case.closure()
        if len(calls) == bad_pass:
            raise KeyboardInterrupt("in the closure")
        return loss

    with pytest.raises(KeyboardInterrupt, match="in the closure"):
        case.opt.step(closure)
    assert len(calls) == bad_pass
    assert bad_pass == 1 or not same_bits(calls[1], before), "the second pass was perturbed"
    assert same_bits(before, case.params)
    assert same_bits(state, case.state())
    case.opt.step(case.closure)


def test_an_exception_inside_perturbed(backend: Backend) -> None:
    params = make_parameters([(50,), (3, 3)], torch.float32, backend.device)
    opt = sgd(params, backend=backend.name)
    before = copies(params)
    backward(params, 0)
    with pytest.raises(ValueError, match="inside"), opt.perturbed():
        assert not same_bits(before, params)
        raise ValueError("inside")
    assert same_bits(before, params)


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
