"""Tests that need a GPU: `pytest -m gpu` (with the CUDA cases of the other tests), or `make gpu`."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastsam import backends

HERE = Path(__file__).parent
FUSED = [b for b in backends.table() if b.device == "cuda" and b.name in ("native", "triton")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"))


@pytest.fixture(params=FUSED, ids=lambda b: f"{b.name}-cuda")
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    """Return the compiled or the Triton kernels. Skip unavailable kernels with the reason."""
    if request.param.reason is not None:
        pytest.skip(f"{request.param.name} on CUDA: {request.param.reason}")
    return request.param.load()


@pytest.fixture(params=[b.name for b in FUSED])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of the compiled or the Triton backend."""
    reason = next(b.reason for b in FUSED if b.name == request.param)
    if reason is not None:
        pytest.skip(f"{request.param} on CUDA: {reason}")
    return str(request.param)
