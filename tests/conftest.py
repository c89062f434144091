"""Settings that must precede the import of the first test module, and fixtures of several modules."""

import os
import signal
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Triton decides at its import whether kernels are compiled for a GPU or interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


from fastsam import backends
from tests.helpers.libraries import with_torchvision
from tests.helpers.op_cases import parameter

# `torch.manual_seed` keeps the stack, which is deep under pytest, for every kind of device that has not been used: in a
# millisecond or two each.
for devices in (torch.cuda, torch.mtia, torch.xpu):
    devices.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]

if os.environ.get("FASTSAM_INTEGRATIONS"):
    with_torchvision()  # before the first of the libraries that import it

# A process started in the background of a script ignores Ctrl-C, and its children do too; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Divide torch's threads among the workers of `pytest -n`, which share the processors."""
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Among several workers, a test that is marked `alone` waits until the others' tests have ended, and they wait for
    it."""
    cache = getattr(item.config, "cache", None)  # None if pytest runs without a cache
    if not hasattr(item.config, "workerinput") or cache is None:
        return (yield)
    import fcntl  # here, because Windows has none

    folder = cache.mkdir("workers")
    with open(folder / "turn", "w") as turn, open(folder / "work", "w") as work:
        fcntl.flock(turn, fcntl.LOCK_EX)  # held while a test waits for its lock, so that later tests queue up
        fcntl.flock(work, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(work, fcntl.LOCK_UN)  # not by closing: a child of the test may have the file open


# Tests whose fixture does not exist, also tests that are not selected, such as slow ones: see `tests/test_fixtures.py`.
UNKNOWN_FIXTURES: list[str] = []


def pytest_itemcollected(item: pytest.Item) -> None:
    info: Any = getattr(item, "_fixtureinfo", None)  # private to pytest, which looks for fixtures when a test runs
    names = set(getattr(item, "fixturenames", ())) if info else set()
    UNKNOWN_FIXTURES.extend(
        f"{item.nodeid}: {name}" for name in names - {*getattr(info, "name2fixturedefs", ()), "request"}
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked `gpu`, with the reason, if there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("skipif"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _parameters(interpreter: bool) -> list[object]:
    """Return the backends as parameters of a fixture; an unavailable backend is skipped with the reason."""
    result = list(backends.table())
    if not interpreter:
        # Without a GPU, `every_backend` already reports the skipped ones.
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        result = [b for b in result if b.device in devices and (b.name, b.device) != ("triton", "cpu")]
    return [parameter(b) for b in result]


@pytest.fixture(params=_parameters(interpreter=False))
def backend(request: pytest.FixtureRequest) -> backends.Backend:
    """Each backend on each device there is, Triton's interpreter aside: it takes a second per step."""
    return request.param


@pytest.fixture(params=_parameters(interpreter=True))
def every_backend(request: pytest.FixtureRequest) -> backends.Backend:
    """Each backend on each device."""
    return request.param


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that reads of it are noticed."""
    old_settings = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(old_settings[0], warn_only=old_settings[1])
