"""Learning rates that change from round to round: a formula, a function of the round, a scheduler of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastsam.fed.algorithms.schedule import check_scheduled, formula
from fastsam.fed.common.checks import number
from fastsam.fed.common.import_paths import is_import_path

# A number, a formula of `round` (from 1), or a function of the round (from 0).
Rate = float | str | Callable[[int], float]


def check_formula(name: str, value: Any) -> None:
    """Raise ValueError for a string that is not a formula. In a config it may be an import path."""
    if isinstance(value, str) and not is_import_path(value):
        check_scheduled(name, value)


def rate_at(name: str, rate: Rate, index: int, variables: Mapping[str, float], **bounds: float) -> float:
    """Return the rate in round `index` (from 0). A formula may have `round` and the names in `variables`.

    Raises:
        ValueError: it has no value, or its value is out of bounds, which are as in `number`.
    """
    if isinstance(rate, str):
        value: Any = formula(name, rate, index, variables)
    elif callable(rate):
        try:
            value = rate(index)
        except Exception as error:
            raise ValueError(f"{name} failed in round {index + 1}: {type(error).__name__}: {error}") from error
    else:
        return rate
    return number(f"{name} in round {index + 1}", value, **bounds)


class TorchSchedule:
    """A learning rate that a scheduler of `torch.optim.lr_scheduler` sets, one of its steps a round:
    `lr=fed.TorchSchedule(0.1, lambda opt: CosineAnnealingLR(opt, T_max=50, eta_min=0.001))`.

    Args:
        lr: rate that the scheduler begins with.
        make: function of an optimizer that returns the scheduler.

    Raises:
        ValueError: the scheduler needs more than the number of the round (`ReduceLROnPlateau`).
    """

    def __init__(self, lr: float, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        self.lr, self.make = number("lr", lr, at_least=0), make
        if not callable(make):
            raise ValueError(f"TorchSchedule takes a function from an optimizer to its scheduler, got {make!r}")
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.lr)
        self._scheduler = make(self._optimizer)
        self._rates: list[float] = []
        if not callable(getattr(self._scheduler, "step", None)):
            raise ValueError(
                f"TorchSchedule takes a function that makes a scheduler of torch, got {self._scheduler!r} from it"
            )

    def __call__(self, round: int) -> float:
        """Return the rate in round `round` (from 0)."""
        while len(self._rates) <= round:
            self._rates.append(float(self._optimizer.param_groups[0]["lr"]))
            self._optimizer.step()  # without a gradient nothing happens; torch warns of a scheduler that goes first
            self._scheduler.step()
        return self._rates[round]
