"""Further models of a client, next to the one in its row: teachers, and a second model that is trained in lock step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.row_state import RowSlice, RowState
from fastsam.fed.executors.task import Setup, to_device
from fastsam.fed.step.local_update import LocalUpdate
from fastsam.fed.step.model_copy import Replica
from fastsam_kernels.hparams import HParam

_PLAIN = LocalUpdate()


class SecondModel:
    """A second model of a client, in a separate row.

    Attributes:
        w: the weights, `[row_size]`.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.options.optimizer is not None:
            raise ValueError("optimizer does not serve second models. Use another algorithm, or leave optimizer out")
        self._rows = RowState(setup, 1)
        self._row_slice = RowSlice(self._rows, slice(0, 1))
        self.w = self._row_slice.z[0]

    def begin(self, start: Tensor) -> None:
        """Begin a client's round at the weights `start`, `[row_size]`, without momentum."""
        hparams = self._rows.hparams
        hparams[0, 0] = to_device(torch.tensor(self._rows.numbers(_PLAIN, 0.0), dtype=torch.float64), hparams.device)
        self._row_slice.begin(start)

    def set_lr(self, lr: Tensor) -> None:
        """Set the learning rate, a scalar tensor."""
        self._row_slice.hparams[0, 0, HParam.LR] = lr

    def update(self, gradients: Gradients, weight: Tensor | float = 1.0) -> None:
        """Take a step along `weight` times the gradients, with the run's clipping, momentum and weight decay."""
        self._row_slice.hparams[0, 0, HParam.G2_COEF] = weight
        self._row_slice.update(gradients, None)


class ExtraModels:
    """The further models of the clients that train in one row. Each is made when it is first needed."""

    def __init__(self, setup: Setup, row_slice: RowSlice) -> None:
        self._setup, self._row_slice = setup, row_slice
        self._teachers: list[Replica] = []
        self._loaded: list[tuple[Tensor, Sequence[Tensor]] | None] = []
        self._second: SecondModel | None = None

    def teacher(self, weights: Tensor, buffers: Sequence[Tensor], index: int) -> nn.Module:
        """Return a model with these weights `[row_size]` and buffers, in evaluation mode. Nothing is copied if teacher
        `index` has them already."""
        while index >= len(self._teachers):
            row = self._row_slice.field(f"teacher {len(self._teachers)}")[0]
            replica = Replica(self._setup.model, self._setup.layout, row)
            replica.module.eval()
            self._teachers.append(replica)
            self._loaded.append(None)
        loaded = self._loaded[index]
        if loaded is None or loaded[0] is not weights or loaded[1] is not buffers:
            self._teachers[index].load(weights, buffers)
            self._loaded[index] = weights, buffers
        return self._teachers[index].module

    def second_model(self, start: Tensor) -> SecondModel:
        """Return the second model, at the beginning of a client's round at the weights `start`."""
        self._second = self._second or SecondModel(self._setup)
        self._second.begin(start)
        return self._second
