"""The loss surfaces of finished runs: each final model on the training data, in directions from the same random
numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.population import Loss
from fastsam.fed.loop.determinism import repeatable
from fastsam.fed.measures import Objective
from fastsam.fed.measures.surface import RADIUS, directions, surface
from fastsam.fed.step.model_copy import Replica, trainable
from fastsam.lab.report.finished import FinishedRun, by_label


def loss_surfaces(
    runs: Sequence[FinishedRun],
    build: Callable[[FinishedRun], tuple[nn.Module, Sequence[Pair], Loss]],
    points: int,
    directory: Path,
) -> Mapping[str, np.ndarray]:
    """Return the surface of every label's first run, `[points, points]` over [-1, 1]^2; also write surfaces.npz.

    Raises FileNotFoundError if a run has no model.safetensors.

    Args:
        build: function that returns a run's model (with any weights), its clients' data and its loss.
    """
    grids: dict[str, np.ndarray] = {}
    for label, group in by_label(runs).items():
        model, pairs, loss = build(group[0])
        model.load_state_dict(safetensors.torch.load_file(group[0].run_dir / "model.safetensors"))
        grids[label] = _surface(model, pairs, loss, points)
    np.savez(directory / "surfaces.npz", **grids)  # type: ignore[arg-type] # the names of arrays
    return grids


def _surface(model: nn.Module, pairs: Sequence[Pair], loss: Loss, points: int) -> np.ndarray:
    first: Tensor = trainable(model)[0]
    layout = Layout.of(trainable(model))
    replica = Replica.new(model, layout, first.device)
    device_pairs = [
        (x.to(first.device, first.dtype) if x.is_floating_point() else x.to(first.device), y.to(first.device))
        for x, y in pairs
    ]
    w = replica.row.clone()
    with repeatable(first.device):
        return surface(
            Objective.sample_mean(replica, loss, device_pairs), w, directions(layout, w), points, RADIUS
        ).numpy()
