"""Other people's libraries, for the tests in `tests/integrations/`."""

import importlib
import os
import re
import sys
from types import ModuleType

import pytest
import torch


def library(name: str) -> ModuleType:
    """Return the module.

    If it is not installed, skip the test module, or fail under `make test-integrations`, which installs all libraries.
    """
    if os.environ.get("FASTSAM_INTEGRATIONS"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed; make test-integrations", exc_type=ImportError)


_MISSING = re.compile(r"operator torchvision::(\w+) does not exist")
_declarations: list[torch.library.Library] = []  # keeps the declarations of operators alive


def with_torchvision() -> None:
    """Make `import torchvision` work with a torch without CUDA, for libraries that use no operator of it.

    A torchvision that was built for CUDA cannot load its operators there, and its import fails at the first of their
    descriptions. So the names of the operators are declared.
    """
    for _ in range(8):
        try:
            importlib.import_module("torchvision")
            return
        except ImportError:
            return  # `library` says what is missing
        except RuntimeError as error:
            match = _MISSING.search(str(error))
            if match is None:
                raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declarations.append(torch.library.Library("torchvision", "FRAGMENT"))
        _declarations[-1].define(f"{match[1]}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
