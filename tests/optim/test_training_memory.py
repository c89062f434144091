"""The memory of whole steps equals the tables in docs/memory.md, at a tenth of their size or less."""

import sys

import pytest

from tests.helpers.training_memory import measure


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "peak", "idle_bytes"),
    [
        ("SGD", 4, 0), ("FusedSAM", 8, 4), ("FusedSAM, exclusive", 8, 0), ("FusedSAM, in_backward", 4.5, 0),
        ("bfloat16: FusedSAM", 10, 8),
    ],
)  # fmt: skip
def test_bytes_per_parameter(name: str, peak: float, idle_bytes: float) -> None:
    assert measure(name, layers=8, width=1024) == pytest.approx((peak, idle_bytes), abs=0.9)
