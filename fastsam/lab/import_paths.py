"""Objects that a config names by import path: a user's own data, model or algorithm."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fastsam.lab import trust


def import_object(path: str, label: str) -> Any:
    """Return the object at "package.module:attribute" or "path/to/file.py:attribute".

    Modules are also looked up in the current directory. An error inside the imported code reaches the caller as it is.

    Args:
        path: the import path.
        label: name for messages.

    Raises:
        ValueError: the form is wrong, there is no such file, module or attribute, or the code is neither the user's
            own nor trusted (see `trust`).
    """
    location, _, attribute = path.rpartition(":")
    if not location or not attribute:
        raise ValueError(f"{label}: expected 'package.module:name' or 'file.py:name', got {path!r}")
    module = _load_file(Path(location), label) if location.endswith(".py") else _load_module(location, label)
    try:
        value = getattr(module, attribute)
    except AttributeError:
        names = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise ValueError(f"{label}: {location} has no {attribute!r}; it defines {names}") from None
    trust.check_object(value, path, label)
    return value


def _load_file(path: Path, label: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{label}: no file {path} (looked in {Path.cwd()})")
    trust.check_file(path, label)
    name = f"fastsam_user_{path.resolve().as_posix()}"  # one module per file, however often it is named
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # a .py file has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before execution: dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _load_module(name: str, label: str) -> ModuleType:
    cwd = str(Path.cwd())
    is_added = cwd not in sys.path
    if is_added:
        sys.path.insert(0, cwd)  # a console script does not have the current directory on its path
    try:
        trust.check_module(name, label)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the user's module exists and misses another one
        raise ValueError(f"{label}: no module {error.name!r} (looked in {cwd} and in the installed packages)") from None
    finally:
        if is_added:
            sys.path.remove(cwd)
