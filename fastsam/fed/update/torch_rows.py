"""A row whose updates are steps of an optimizer of torch that the kernels do not have, and that optimizer's state as
tensors by name, so that it can stay with a client."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.row_memory import RunFacts, StepFacts
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Shifted

_REMEDY = "Use SGD, Adam, AdamW, Adagrad, RMSprop or Lion, or another algorithm"
NUMBER = "number"  # last word of the name of a Python number


class TorchRows(Rows):
    """A row whose updates are steps of an optimizer of torch. Each client has a new optimizer. Its state is new too,
    unless the step has one.

    The optimizer gets `a*g + q + prox*w` as gradient. The kernels perturb the weights.
    """

    def __init__(self, setup: RunFacts) -> None:
        super().__init__(setup)
        make = setup.options.optimizer
        assert make is not None
        self._make = make
        self._optimizer: torch.optim.Optimizer | None = None
        self._lr, self._a, self._prox = 0.0, 1.0, 0.0
        self._parameters = [nn.Parameter(view) for view in self.layout.views(self.z[0])]

    def begin(self, step: StepFacts, w: Tensor, lr: float) -> None:
        """See `Rows.begin`. Raises ValueError for shifted weights, because the optimizer's weight decay belongs to
        weights that are not shifted."""
        if isinstance(step, Shifted):
            raise ValueError(f"weights that are shifted for the whole round need one of the kernels' rules. {_REMEDY}")
        self._lr, self._a, self._prox = lr, float(step.a), float(step.prox or 0.0)
        super().begin(step, w, lr)

    def restart(self, start: Tensor) -> None:
        """See `Rows.restart`. The next update makes a new optimizer."""
        self._optimizer, state, self._first_state = None, self._first_state, {}
        super().restart(start)
        self._first_state = state

    def set_rates(self, rates: Sequence[float], index: Tensor | None = None) -> None:
        """Raise ValueError: the optimizer of a client has one rate."""
        raise ValueError(f"a learning rate that changes within a round needs one of the kernels' rules. {_REMEDY}")

    def update(self, g: Gradients, g1: Gradients | None = None, shift: Tensor | None = None) -> None:
        """See `Rows.update`. Raises ValueError for a second gradient."""
        if g1 is not None:
            raise ValueError(f"an update with two gradients needs one of the kernels' rules. {_REMEDY}")
        if self.w is not None:
            self.z.copy_(self.w)
        if self._optimizer is None:
            rate = {} if math.isnan(self._lr) else {"lr": self._lr}  # NaN if the optimizer takes no rate
            self._optimizer = self._make(self._parameters, **rate)
            if self._first_state:
                load_tensors(self._optimizer, {name: x[0] for name, x in self._first_state.items()})
        offsets = self.layout.views(self["q"][0]) if self._has_q else None
        for slot, gradient in zip(g.slots, g.tensors, strict=True):
            parameter = self._parameters[slot]
            v = gradient if self._a == 1 else self._a * gradient
            v = v if offsets is None else v + offsets[slot]
            parameter.grad = v if not self._prox else v.add(parameter.detach(), alpha=self._prox)
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        if self.w is not None:
            self.w.copy_(self.z)
        self.is_moved = False

    @property
    def vectors(self) -> int:
        """See `Rows.vectors`. The state of the optimizer is counted in vectors of the weights."""
        state = sum(x.numel() for x in self.optimizer_state().values())
        return super().vectors + round(state / self.layout.numel)

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `Rows.optimizer_state`."""
        if self._optimizer is None:
            return {name: x.clone() for name, x in self._first_state.items()}
        return {name: x[None] for name, x in tensors_of(self._optimizer).items()}


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of an optimizer's state, and of the numbers that changed in its groups, by name.

    The learning rate is not among them, because it belongs to the round.

    Raises:
        ValueError: the state has values that are neither tensors nor numbers.
    """
    result: dict[str, Tensor] = {}
    for words, value in _values(optimizer):
        if isinstance(value, Tensor):
            result[words] = value.detach().clone()
        elif isinstance(value, (bool, int, float)):
            result[f"{words} {NUMBER}"] = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
        elif value is not None:
            raise ValueError(
                f"optimizer_state='keep' needs an optimizer that keeps tensors and numbers. {type(optimizer).__name__} "
                f"keeps a {type(value).__name__} as {words.split()[-1]!r}. Use optimizer_state='reset'"
            )
    return result


def _values(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the values of the state, named by parameter and key, and the changed numbers of the groups."""
    stored = optimizer.state_dict()
    for i, state in stored["state"].items():
        yield from ((f"{i} {key}", value) for key, value in state.items())
    for i, group in enumerate(stored["param_groups"]):
        for key, value in group.items():
            is_number = isinstance(value, (bool, int, float))
            if is_number and key != "lr" and not (key in optimizer.defaults and optimizer.defaults[key] == value):
                yield f"group {i} {key}", value


def load_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give a new optimizer the state that `tensors_of` returned."""
    stored: dict[str, Any] = {**optimizer.state_dict(), "state": {}}
    for name, x in tensors.items():
        words = name.removesuffix(f" {NUMBER}")
        value = x if words == name else x.item()
        if words.startswith("group "):
            _, i, key = words.split(" ", 2)
            stored["param_groups"][int(i)][key] = value
        else:
            i, key = words.split(" ", 1)
            stored["state"].setdefault(int(i), {})[key] = value
    optimizer.load_state_dict(stored)
