"""Scripts in place of compilers, and which tests need real ones."""

import shutil
import sys
from pathlib import Path

import pytest

from fastsam_kernels import toolchain

clean_linux = [
    pytest.mark.usefixtures("no_settings"),
    pytest.mark.skipif(sys.platform != "linux", reason="the libraries are built on Linux"),
]
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def without_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_ninja", lambda: None)
