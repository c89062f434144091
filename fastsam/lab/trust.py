"""Trust of import paths: the user's own files, and packages that were named on the command line.

A config is text from anywhere, and importing what it names runs it. Therefore an import path may lead only to the
user's own files, and not to everything that is installed. Otherwise `os:system`, with a command among its options,
would be a data set. The standard library and the builtins are never allowed, not even through a module of the user that
imports them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

_trusted_names: ContextVar[tuple[str, ...]] = ContextVar("named", default=())
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


class TrustError(ValueError):
    """An import path names code that is not the user's own; the message says how it may be named all the same."""


@contextmanager
def trust_names(*names: str) -> Iterator[None]:
    """Trust these names of import paths inside: top-level packages ("torchvision"), files or folders
    ("/shared/lab.py").

    Raises TrustError for a module of the standard library.
    """
    for name in names:
        if name.partition(".")[0] in sys.stdlib_module_names or name.partition(".")[0] == "builtins":
            raise TrustError(
                f"--trust {name}: a config may not use the standard library. Write your own function around it"
            )
    token = _trusted_names.set((*_trusted_names.get(), *names))
    try:
        yield
    finally:
        _trusted_names.reset(token)


def check_file(path: Path, label: str) -> None:
    """Raise TrustError for a file that is neither the user's own nor named."""
    real = path.resolve()
    if _is_standard(real):
        raise TrustError(f"{label}: {path} belongs to the standard library, and a config may not use it")
    if not (_is_own(real) or is_named(real)):
        raise TrustError(f"{label}: {path} is not your own file; look at it, and if you trust it add --trust {path}")


def check_module(name: str, label: str) -> None:
    """Raise TrustError unless a module is the user's own file or in a package that was named. Import nothing."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "builtins":
        raise TrustError(
            f"{label}: {name} belongs to the standard library, and a config may not use it. Your own file of this name "
            f"is {name}.py:NAME"
        )
    places = _places(top)
    if top in _trusted_names.get() or places is None or all(_is_own(place) or is_named(place) for place in places):
        return
    raise TrustError(
        f"{label}: the package {top} ({places[0]}) is not your own file. If you trust it, add --trust {top}"
    )


def check_object(value: Any, path: str, label: str) -> None:
    """Raise TrustError unless a callable is defined in the user's own files or in a package that was named.

    A name in a trusted file may refer to a function of another package: `from joblib import load`. The check looks
    through methods, partials and wrappers of functions. A function of the user is trusted whatever it wraps. A model or
    loss belongs to the file that made it, whatever its class is.
    """
    if isinstance(value, nn.Module):
        return
    visited_ids: set[int] = set()
    while callable(value) and id(value) not in visited_ids:
        visited_ids.add(id(value))
        inner = _called_by(value)
        home, place = _definition(value)
        if not isinstance(value, partial) and _is_defined_by_user(home, place, path):
            return
        if inner is None:
            name = f"{home or '?'}.{getattr(value, '__qualname__', type(value).__qualname__)}"
            top = home.partition(".")[0]
            if top in sys.stdlib_module_names or top == "builtins":
                raise TrustError(f"{label}: {path} is {name} in the standard library, and a config may not use it")
            raise TrustError(
                f"{label}: {path} is {name}, which is not defined in your own file. If you trust it, add --trust "
                f"{top or path.rpartition(':')[0]}; or wrap it in a function of your file"
            )
        value = inner


def _called_by(value: Any) -> Any:
    """Return the function that a partial, a method or a wrapper calls, None for anything else."""
    if isinstance(value, partial):
        return value.func
    return value.__func__ if isinstance(value, MethodType) else getattr(value, "__wrapped__", None)


def _definition(value: Any) -> tuple[str, str | None]:
    """Return the module in which a callable is defined, "" if unknown, and the module's file."""
    if isinstance(value, FunctionType):  # `__module__` may be a copy of the wrapped function's
        return str(value.__globals__.get("__name__", "")), value.__globals__.get("__file__")
    definition = value if isinstance(value, (type, BuiltinFunctionType)) else type(value)
    home = getattr(definition, "__module__", None) or ""
    return home, getattr(sys.modules.get(home), "__file__", None)


def _is_defined_by_user(home: str, place: str | None, path: str) -> bool:
    """Return True if a callable of this module, or else of this import path, is trusted."""
    if not home:
        return is_trusted(path.rpartition(":")[0])
    if home.partition(".")[0] in _trusted_names.get():
        return True
    return place is not None and (_is_own(real := Path(place).resolve()) or is_named(real))


def is_trusted(location: str) -> bool:
    """Return True if the module or file of an import path was named."""
    return location.partition(".")[0] in _trusted_names.get() or is_named(Path(location).resolve())


def is_named(place: Path) -> bool:
    """Return True if the file, or a folder that contains it, was named."""
    paths = [Path(name).resolve() for name in _trusted_names.get() if os.sep in name or name.endswith(".py")]
    return any(place == one or one in place.parents for one in paths)


def _places(top: str) -> list[Path] | None:
    """Return the files and folders of a top-level module, or None if it does not exist."""
    module = sys.modules.get(top)
    spec: ModuleSpec | None = getattr(module, "__spec__", None) if module is not None else find_spec(top)
    if spec is not None:
        places = list(spec.submodule_search_locations or ()) or ([spec.origin] if spec.origin else [])
    else:
        file = getattr(module, "__file__", None)
        if file is None:
            return None
        places = [file]
    return [Path(place).resolve() for place in places]


def _is_standard(place: Path) -> bool:
    return any(one in place.parents for one in _STANDARD) and not any(part in _INSTALLED for part in place.parts)


def _is_own(place: Path) -> bool:
    """Return True if a file is not installed, and is below the current folder or is the user's by the file system."""
    if _is_standard(place) or any(part in _INSTALLED for part in place.parts):
        return False
    folder = Path.cwd().resolve()
    return place == folder or folder in place.parents or belongs_to_user(place)


def belongs_to_user(place: Path) -> bool:
    """Return True if the user owns the file or folder, or if the system has no owners."""
    try:
        return not hasattr(os, "geteuid") or place.stat().st_uid == os.geteuid()
    except OSError:
        return False
