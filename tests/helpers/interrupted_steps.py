"""Steps of `FusedSAM` that are interrupted somewhere: what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fastsam import SAM, FusedSAM
from fastsam.backends import select
from fastsam.optim.variants import WSAM, FriendlySAM, LookSAM
from tests.helpers.interrupting import KERNELS, PACKAGE, Interrupt, Tracer
from tests.helpers.sam_oracle import backward, copies, landscape, make_parameters, same_bits


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
        try:
            backward(self.params, self.time)
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
        """All tensors of the state that say something: not a master copy that is no more than the weights, nor a memory
        of nothing, which are there from the first look at the parameters."""
        found = []
        for i, entry in self.opt.state_dict()["state"].items():
            for name, value in sorted(entry.items()):
                silent = name == "master" and torch.equal(value, self.params[i].float())
                if isinstance(value, torch.Tensor) and not (silent or (name == "sam_memory" and not value.any())):
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
Cases = dict[str, tuple[Callable[..., FusedSAM], list[torch.dtype]]]
CASES: Cases = {
    "sgd": (sgd, [F32]),
    "adamw": (adam, [F64]),
    "bfloat16": (sgd, [BF16]),
    "two dtypes": (sgd, [F32, F64]),
    "rmsprop": (rmsprop, [F32]),
    "check_finite": (finite, [F32]),
}
# After one step comes one that does not perturb.
FAMILY: Cases = {
    "interval": (interval, [F32]),
    "wsam": (wsam, [F32]),
    "wsam bf16": (wsam, [BF16]),
    "looksam": (looksam, [F32]),
    "friendly": (friendly, [F32]),
}


class Plan:
    """A case of the tables above with `warm` steps behind it, its next step in one of the styles, and what an
    undisturbed one gives.

    The first step makes the buffers, the third uses what it finds.
    """

    def __init__(self, name: str, style: str, warm: int, backend: str) -> None:
        self.name, self.style, self.warm, self.backend = name, style, warm, backend
        # A step with the compiled CPU kernels or the reference is made or not made wherever it is interrupted, around
        # the kernels too.
        self.whole = select(backend, torch.device("cpu"), F32).name in ("native", "reference")
        self.folders = (PACKAGE, KERNELS) if self.whole else (PACKAGE,)
        getattr(self.make(), style)()  # what is loaded at first use is no part of a step
        undisturbed = self.make()
        getattr(undisturbed, style)()
        self.stepped, self.stepped_state = copies(undisturbed.params), undisturbed.state()
        undisturbed.step()
        self.second = copies(undisturbed.params)

    def make(self) -> Case:
        build, dtypes = {**CASES, **FAMILY}[self.name]
        return Case(lambda params: build(params, backend=self.backend), dtypes, self.warm)

    def lines(self) -> int:
        """Of the code in `folders` that the step runs."""
        case = self.make()
        with Tracer(None, self.folders) as tracer:
            getattr(case, self.style)()
        return tracer.lines

    def interrupted(self, interruption: AbstractContextManager[Any], anywhere: bool = False) -> bool:
        """Whether a step inside of `interruption` was interrupted. Raises AssertionError where what it left is neither
        the step nor none.

        anywhere: not only at the lines of `folders`. Then a backend that is not `whole` promises the weights alone.
        """
        case = self.make()
        before, state = copies(case.params), case.state()
        try:
            with interruption:
                getattr(case, self.style)()
            return False
        except Interrupt as interrupt:
            where = f"raised at {interrupt}"
        if anywhere and not self.whole:
            kept = same_bits(before, case.params) or same_bits(self.stepped, case.params)
            assert kept, f"neither the original nor the stepped weights: {where}"
            return True
        if same_bits(before, case.params):
            assert same_bits(state, case.state()), f"state changed, weights not: {where}"
            getattr(case, self.style)()
        else:
            assert same_bits(self.stepped, case.params), f"neither the original nor the stepped weights: {where}"
            assert same_bits(self.stepped_state, case.state()), f"stepped, but not the state: {where}"
            case.time = self.warm + 1
        assert same_bits(self.stepped, case.params), f"the step after it is another: {where}"
        case.step()
        assert same_bits(self.second, case.params), f"the second step after it is another: {where}"
        return True
