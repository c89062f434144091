"""Further models of a client, next to the one in its row: teachers, and a second model that is trained in lock step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.local_rows import LocalRows
from fastsam.fed.executors.row_memory import RowMemory
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.local_update import LocalUpdate
from fastsam.fed.update.model_copy import Replica
from fastsam_kernels.hparams import HParam


class SecondModel:
    """A second model of a client, in a separate row.

    Attributes:
        w: the weights, `[row_size]`.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.rule is None:
            raise ValueError(
                "a second model needs one of the kernels' optimizers, SGD, Adam, AdamW, Adagrad, RMSprop or Lion. Use "
                "one of them, or another algorithm"
            )
        memory = RowMemory(setup, 1)
        memory.write_numbers(slice(0, 1), [LocalUpdate()], 0.0)
        self._rows, self._numbers = LocalRows(memory, slice(0, 1)), memory.hparams[0, 0]
        self.w = self._rows.z[0]

    def begin(self, start: Tensor, lr: Tensor) -> None:
        """Begin a client's round at the weights `start`, `[row_size]`, without momentum. `lr` is a scalar tensor."""
        self._numbers[HParam.LR] = lr
        self._rows.restart(start)

    def update(self, gradients: Gradients, weight: Tensor | float = 1.0) -> None:
        """Take a step along `weight` times the gradients, with the run's clipping, momentum and weight decay."""
        self._numbers[HParam.G2_COEF] = weight
        self._rows.update(gradients, None)


class Teachers:
    """The teachers of the clients that train in one row, models in evaluation mode. Each is made when it is first
    needed."""

    def __init__(self, setup: Setup, rows: LocalRows) -> None:
        self._setup, self._rows = setup, rows
        self._models: dict[int, tuple[Replica, Tensor, Sequence[Tensor]]] = {}  # with their weights and buffers

    def get(self, index: int, weights: Tensor, buffers: Sequence[Tensor]) -> nn.Module:
        """Return teacher `index` with these weights `[row_size]` and buffers, which are copied if it has others."""
        entry = self._models.get(index)
        if entry is None:
            row = self._rows.field(f"teacher {index}")[0]
            replica = Replica(self._setup.model, self._setup.layout, row)
            replica.module.eval()
        else:
            replica = entry[0]
        if entry is None or entry[1] is not weights or entry[2] is not buffers:
            replica.load(weights, buffers)
            self._models[index] = replica, weights, buffers
        return replica.module
