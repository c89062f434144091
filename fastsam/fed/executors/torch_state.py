"""The state of an optimizer of torch as tensors by name, so that it can stay with a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

NUMBER = "number"  # last word of the name of a Python number


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
