"""The emulation of the CUDA kernels, compiled once for all modules."""

from pathlib import Path

import pytest

from tests.helpers import emulated
from tests.helpers.emulated import Emulation


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the emulations. If pytest has a cache, it keeps them and only changes are compiled."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("cuda-emulation")) if cache else tmp_path_factory.mktemp("cuda-emulation")


@pytest.fixture(scope="session")
def emulation(folder: Path) -> Emulation:
    return emulated.load_library(folder / "as-it-is")
