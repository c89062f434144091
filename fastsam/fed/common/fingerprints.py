"""Descriptions of runs as JSON. They must be equal when a run is resumed, and on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from numbers import Real
from typing import Any

import torch
from torch import nn


def describe(value: Any) -> Any:
    """Return `value` for a JSON file: callables by their name, other objects by their type and fields."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Real):  # numpy's numbers
        return float(value)
    if isinstance(value, (list, tuple)):
        return [describe(v) for v in value]
    if isinstance(value, dict):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, partial):
        return {"partial": describe(value.func), "args": describe(value.args), "keywords": describe(value.keywords)}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}", **hyperparameters(value)}


def hyperparameters(algorithm: Any) -> dict[str, Any]:
    """Return the public attributes of an algorithm (or another object) for reports."""
    return {
        name: describe(value)
        for name, value in sorted(getattr(algorithm, "__dict__", {}).items())
        if not name.startswith("_")
    }


def references(function: Any) -> dict[str, Any]:
    """Return the objects that a callable refers to, by name: globals, closure variables, defaults and attributes, and
    the references of functions among its attributes."""
    if isinstance(function, partial):
        arguments = {str(place): value for place, value in enumerate(function.args)} | function.keywords
        return references(function.func) | arguments
    if inspect.ismethod(function):
        return references(function.__func__) | {"self": function.__self__}
    if not inspect.isfunction(function):
        attributes = {} if isinstance(function, type) else dict(getattr(function, "__dict__", {}))
        for value in [value for value in attributes.values() if inspect.isfunction(value) or inspect.ismethod(value)]:
            attributes |= references(value)
        return attributes
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a closure that is not filled yet
        return {}
    signature = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}
    return {**variables.globals, **variables.nonlocals, **defaults}


def structure(model: nn.Module) -> list[Any]:
    """Return the names, shapes and types of a model's parameters and buffers, and whether each is trained."""
    parameters = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]
    return parameters + [[n, list(b.shape), str(b.dtype)] for n, b in model.named_buffers()]


def digest(model: nn.Module) -> str:
    """Return a hash of the bytes of a model's parameters and buffers."""
    hasher = blake2b(digest_size=16)
    for tensor in (*model.parameters(), *model.buffers()):
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key, dotted in nested tables, in which two identities differ, with both values, or None."""
    for key in [*new, *(k for k in old if k not in new)]:
        old_value, new_value = old.get(key), new.get(key)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            inner = difference(old_value, new_value)
            if inner is not None:
                return f"{key}.{inner[0]}", *inner[1:]
        elif old_value != new_value:
            return key, old_value, new_value
    return None
