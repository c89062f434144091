"""Marks: tests of the benchmarks are `slow`, except one of each kind."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests as slow except tests of GPU code (`make test-cuda`) and tests marked `of_each_kind`."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not any(
            item.get_closest_marker(name) for name in ("gpu_code", "of_each_kind")
        ):
            item.add_marker(pytest.mark.slow)
