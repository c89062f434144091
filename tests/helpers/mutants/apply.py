"""Runs a module with one piece of its text replaced. The file is not touched: the functions of the changed text are put
in place in memory.

The text is compiled, and every function or method whose code differs takes the new code object; afterwards the old one
comes back.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any


class Stale(Exception):
    """A mutant no longer fits the text of its module."""


def _codes(code: CodeType, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CodeType]]:
    """The code objects of the functions in a module's or a class body's code, by their qualified names."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            here = (*path, constant.co_name)
            yield here, constant
            if not constant.co_flags & inspect.CO_OPTIMIZED:
                # the body of a class; inside functions their own code counts
                yield from _codes(constant, here)


def _function(module: ModuleType, path: tuple[str, ...]) -> FunctionType | None:
    """The function behind a name: through decorators, properties and classmethods."""
    found: Any = module
    for name in path:
        if not hasattr(found, name):
            return None
        found = inspect.getattr_static(found, name)
    found = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    return found if isinstance(found, FunctionType) else None


@contextmanager
def replaced(name: str, old: str, new: str) -> Iterator[None]:
    """The module `name` with `new` for `old` in its functions. Raises Stale unless `old` occurs once and a function
    changes by it."""
    module = importlib.import_module(name)
    text = inspect.getsource(module)
    if text.count(old) != 1:
        raise Stale(f"{name} has {old!r} {text.count(old)} times, expected once: bring the table of mutants up to date")
    path = module.__file__ or name
    before = dict(_codes(compile(text, path, "exec", dont_inherit=True)))
    changed = dict(_codes(compile(text.replace(old, new), path, "exec", dont_inherit=True)))
    pairs = [(_function(module, at), code) for at, code in changed.items() if code != before.get(at)]
    swaps = [(f, f.__code__, code) for f, code in pairs if f is not None]
    if not swaps:
        raise Stale(f"{name}: no function changes when {old!r} becomes {new!r}")
    try:
        for f, _, code in swaps:
            f.__code__ = code
        yield
    finally:
        for f, original, _ in swaps:
            f.__code__ = original
