"""The loss surface of a model on training data, in directions that are the same for all models of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.population import Loss
from fastsam.fed.loop.determinism import repeatable
from fastsam.fed.measures import Objective
from fastsam.fed.measures.surface import RADIUS, directions, surface
from fastsam.fed.update.model_copy import Replica, trainable


def loss_surface(model: nn.Module, pairs: Sequence[Pair], loss: Loss, points: int) -> np.ndarray:
    """Return the loss around the weights of a model, `[points, points]` over [-1, 1]^2."""
    first: Tensor = trainable(model)[0]
    layout = Layout.from_tensors(trainable(model))
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
