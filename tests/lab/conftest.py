"""Figures that no test looks at are named and not drawn (slow tests draw them), and clients train one after the
other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastsam.fed.executors import auto

DRAWN = ("test_plots",)  # files whose figures are figures


@pytest.fixture(autouse=True)
def quick_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the typesetting, which takes a second per figure and most of a small command's time."""
    if request.path.stem not in DRAWN and not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", name_file)


def name_file(figure: Any, path: str | Path, **options: Any) -> None:
    Path(path).write_bytes(b"not drawn")


@pytest.fixture(autouse=True, scope="module")
def a_short_run_is_sequential() -> Iterator[None]:
    """Train clients one by one, because recording passes for stacked clients takes longer than these short runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "rule", lambda setup: ("sequential", "the run is short"))
        yield
