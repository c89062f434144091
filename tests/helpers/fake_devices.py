"""Executors on the stand-in for CUDA: of lanes, and of stacked clients whose steps are captured."""

from typing import Any

import pytest

from fastsam.fed.executors import capture_trial, randomness, step_graphs, streams
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.places import ROOT


def install(patch: pytest.MonkeyPatch) -> None:
    """Let executors for GPUs run on the stand-in, in whose streams everything is done at once."""
    patch.setattr(streams, "Cuda", FakeCuda)
    patch.setattr(streams, "why_not", lambda setup: None)
    patch.setattr(randomness, "device_generator", lambda device: FakeCuda.default)
    # The stand-in is part of torch for messages about lines of a user.
    patch.setattr(capture_trial, "_PACKAGES", (*capture_trial._PACKAGES, str(ROOT / "tests" / "helpers")))


def install_step_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let stacked clients capture their steps on the stand-in, in `FakeCuda.graphs`."""
    cuda: Any = FakeCuda
    patch.setattr(step_graphs, "step_graphs_of", lambda setup, slots: step_graphs.StepGraphs(cuda(setup.device), slots))
