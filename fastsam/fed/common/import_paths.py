"""The form of import paths, calls with the options of a user, and the import of torchvision."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import ModuleType
from typing import Any

from fastsam.extras import torchvision_command


def is_import_path(name: str) -> bool:
    """Return True if `name` has the form "package.module:attribute" or "file.py:attribute"."""
    return ":" in name


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
