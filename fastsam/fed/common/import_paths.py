"""Objects that a config names by import path: a user's own data, model or algorithm."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fastsam.extras import torchvision_command
from fastsam.fed.common import trust


def is_import_path(name: str) -> bool:
    """Return True if `name` has the form "package.module:attribute" or "file.py:attribute"."""
    return ":" in name


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


def call_with_options(function: Any, options: dict[str, Any], label: str) -> Any:
    """Return `function(**options)`. Raises ValueError if its signature does not take the options."""
    if not callable(function):
        raise ValueError(f"{label}: expected something to call, got {type(function).__name__}")
    signature = inspect.signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        takes = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise ValueError(f"{label}: {error}; it takes {takes}") from None
    return function(**options)


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


class PackageError(ImportError):
    """A package of an extra is not there, or does not import; the message says what to do."""


# Operators that torchvision's Python part registers with torch when it is imported, with or without compiled part.
_DETECTION = {
    f"torchvision::{name}": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
}


def vision(module: str, purpose: str) -> ModuleType:
    """Return a module of torchvision, even if torchvision's compiled part does not fit the installed torch.

    Data sets, transforms and models of torchvision are plain Python. Its compiled operators of object detection cannot
    be loaded if torch and torchvision come from different indices, for example a CUDA wheel next to a CPU build of
    torch. torchvision tolerates that, but its import then stops with "operator torchvision::nms does not exist". Only
    for this error, the operators are declared without an implementation and the import is repeated. A call of such an
    operator still raises torchvision's own error.

    Raises:
        PackageError: torchvision is not installed or cannot be imported.
    """
    try:
        return _torchvision(module, purpose)
    except PackageError as error:
        if not re.fullmatch(r"operator torchvision::\w+ does not exist", str(error.__cause__)):
            raise
    import torch

    for name, schema in _DETECTION.items():
        if not hasattr(torch.ops.torchvision, name.partition("::")[2]):
            torch.library.define(name, schema)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # the first attempt's halves
    return _torchvision(module, purpose)


def _torchvision(module: str, purpose: str) -> ModuleType:
    """Import a module of torchvision. Raises PackageError, with the cause attached.

    torchvision may be installed and not import: next to a torch that it was not built for it raises RuntimeError.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        problem = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise PackageError(
            f"{purpose} needs torchvision, which {problem}. Install the one of this torch: {torchvision_command()}",
            name=module,
        ) from error
