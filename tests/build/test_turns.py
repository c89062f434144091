"""Builds in a folder that several processes share, as the tests' workers do: one after the other, or one compiles what
another is writing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastsam_kernels import toolchain
from tests.helpers import emulated

BUILDS: dict[str, Callable[[Path], object]] = {
    "the emulation": emulated.compile_library,
}


@pytest.mark.parametrize("kind", BUILDS)
def test_builds_in_one_folder_take_turns(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_builds, maximum = 0, 0

    def execute(steps: object, folder: Path) -> None:
        nonlocal num_builds, maximum
        num_builds += 1
        maximum = max(maximum, num_builds)
        time.sleep(0.2)
        num_builds -= 1

    monkeypatch.setattr(toolchain, "execute", execute)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "nvcc")
    threads = [threading.Thread(target=BUILDS[kind], args=(tmp_path / "shared",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maximum == 1
