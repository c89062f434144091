"""Steps of a training that are interrupted somewhere, and the promises that hold afterwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fastsam.backends import select
from tests.helpers.interrupting import KERNELS, PACKAGE, Interrupt, Tracer
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.trainings import Spec
from tests.helpers.variant_cases import Training


def step(training: Training, t: int) -> None:
    training.steps(range(t, t + 1))


def by_hand(training: Training, t: int) -> None:
    """Take a step in two halves, and restore the weights after an exception."""
    try:
        if training.opt.perturbs:
            training.ascend(t, zero_grad=True)
        training.backward(t)
        training.opt.second_step(zero_grad=True)
    except BaseException:
        engine = training.opt._engine
        if not engine.one_pass and engine.weight_state is not type(engine.weight_state).ORIGINAL:
            training.opt.restore()
        raise


def in_context(training: Training, t: int) -> None:
    training.backward(t)
    with training.opt.perturbed():
        training.backward(t)
        training.opt.step()


def look(training: Training, t: int) -> None:
    """Evaluate at the perturbed weights without a step."""
    training.backward(t)
    with training.opt.perturbed():
        training.backward(t)


STYLES: dict[str, Callable[[Training, int], None]] = {f.__name__: f for f in (step, by_hand, in_context, look)}


def state(training: Training) -> list[Tensor]:
    """Return the tensors of the state, except master copies that equal the weights, and empty memories.

    Both exist as soon as the optimizer has read the parameters.
    """
    tensors = []
    for i, entry in training.opt.state_dict()["state"].items():
        for name, value in sorted(entry.items()):
            is_trivial = name == "master" and torch.equal(value, training.params[i].float())
            if isinstance(value, Tensor) and not (is_trivial or (name == "sam_memory" and not value.any())):
                tensors.append(value)
    return tensors


def clean_weights(training: Training) -> list[Tensor]:
    """Return copies of the weights after `eval()`."""
    training.opt.eval()
    return copies(training.params)


class Plan:
    """A training after `warm` steps, its next step in one of the styles, and the result of an undisturbed step.

    The first step makes the buffers, the third uses what it finds.
    """

    def __init__(self, spec: Spec, style: str, warm: int, backend: str | None = None) -> None:
        self.spec, self.act, self.warm = spec, STYLES[style], warm
        self.options = {} if backend is None else {"backend": backend}
        # A step with the compiled CPU kernels or the reference is made or not made wherever it is interrupted, around
        # the kernels too.
        self.whole = select(spec.backend if backend is None else backend, torch.device("cpu"), spec.dtype).name in (
            "native",
            "reference",
        )
        self.folders = (PACKAGE, KERNELS) if self.whole else (PACKAGE,)
        self.act(self.make(), warm)  # modules are loaded at first use
        reference_training = self.make()
        self.act(reference_training, warm)
        self.stepped_weights, self.stepped_state = copies(reference_training.params), state(reference_training)
        # A variant of one pass perturbs along the momentum, which only `whole` backends promise.
        self.promises_clean_weights = spec.one_pass and not self.whole
        if self.promises_clean_weights:
            stepped = self.make()
            self.act(stepped, warm)
            self.clean_weights = [clean_weights(self.make()), clean_weights(stepped)]
        self.second = copies(reference_training.steps(range(warm + 1, warm + 2)).params)

    def make(self) -> Training:
        return self.spec.make(self.warm, **self.options)

    def lines(self) -> int:
        """Return how many lines of the code in `folders` the step runs."""
        training = self.make()
        with Tracer(None, self.folders) as tracer:
            self.act(training, self.warm)
        return tracer.lines

    def interrupted(self, interruption: AbstractContextManager[Any], anywhere: bool = False) -> bool:
        """Return True if the step inside of `interruption` was interrupted.

        Raises AssertionError if the step was neither made nor not made. With updates in the backward pass this holds
        for each parameter separately.

        Args:
            interruption: context manager that raises Interrupt.
            anywhere: the interrupt may come at any instant, and not only at the lines of `folders`. A backend that is
                not `whole` then promises only the weights, of a variant of one pass the clean ones.
        """
        training = self.make()
        old_weights, old_state, addresses = (
            copies(training.params),
            state(training),
            [p.data_ptr() for p in training.params],
        )
        try:
            with interruption:
                self.act(training, self.warm)
            return False
        except Interrupt as interrupt:
            place = f"raised at {interrupt}"
        assert addresses == [p.data_ptr() for p in training.params], f"a parameter is not at home: {place}"
        if self.spec.options == "in backward":
            for p, *results in zip(training.params, old_weights, self.stepped_weights):
                assert any(same_bits([p], [result]) for result in results), place
            return True
        if anywhere and self.promises_clean_weights:
            weights = clean_weights(training)
            assert any(same_bits(weights, results) for results in self.clean_weights), f"other clean weights: {place}"
            return True
        is_unchanged = same_bits(old_weights, training.params)
        assert is_unchanged or same_bits(self.stepped_weights, training.params), (
            f"neither the original nor the stepped: {place}"
        )
        if anywhere and not self.whole:
            return True
        assert same_bits(old_state if is_unchanged else self.stepped_state, state(training)), (
            f"of another state: {place}"
        )
        if self.spec.options == "stochastic":  # the next noise differs
            return True
        if is_unchanged:
            self.act(training, self.warm)
        assert same_bits(self.stepped_weights, training.params), f"the step after it is another: {place}"
        training.steps(range(self.warm + 1, self.warm + 2))
        assert same_bits(self.second, training.params), f"the second step after it is another: {place}"
        return True
