"""Fixtures of the tests that build libraries."""

from pathlib import Path

import pytest

from fastsam_kernels import build

SETTINGS = ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "FASTSAM_CUDA")


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small stand-in for csrc/."""
    folder = tmp_path / "a checkout" / "csrc"
    (folder / "cpu").mkdir(parents=True)
    (folder / "ops.cpp").write_text('#include "one.h"\nint ops() { return ONE; }\n')
    (folder / "one.h").write_text("#define ONE 1\n")
    (folder / "cpu" / "two.cpp").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(build, "csrc", lambda: folder)
    return folder
