"""Further models of a client, next to the one in its row: teachers, and a second model that is trained in lock step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastsam.fed.executors.task import Setup
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Step
from fastsam_kernels.hparams import HParam

TEACHER_NEEDS = (
    "a teacher needs clients that share all parameters, because it would have the initial values of local parameters. "
    "Use another algorithm, or leave local_parameters out"
)


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
        self._rows = Rows(setup)
        self.w = self._rows.z[0]

    @property
    def vectors(self) -> int:
        """The number of its vectors."""
        return self._rows.vectors

    def begin(self, start: Tensor, lr: Tensor) -> None:
        """Begin a client's round at the weights `start`, `[row_size]`, without momentum. `lr` is a scalar tensor."""
        self._rows.begin(Step(a=lr.new_ones(1, 1)), start, 0.0)
        self._rows.column(HParam.LR).fill_(lr)

    def update(self, gradients: Gradients, weight: Tensor | float = 1.0) -> None:
        """Take a step along `weight` times the gradients, with the run's clipping, momentum and weight decay."""
        self._rows.column(HParam.G2_COEF).fill_(weight)
        self._rows.update(gradients)


class Teachers:
    """The teachers of the client that trains in a row, models in evaluation mode. Each is made when it is first
    needed."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._models: dict[int, tuple[Replica, Any]] = {}  # with the weights and buffers that it has
        self._views: dict[int, Replica] = {}  # by the address of the weights

    def __len__(self) -> int:
        return len(self._models) + len(self._views)

    def clear(self) -> None:
        """Forget which weights the teachers have, for another client."""
        self._models = {index: (replica, None) for index, (replica, _) in self._models.items()}

    def get(self, index: int, weights: Tensor, buffers: Sequence[Tensor]) -> nn.Module:
        """Return teacher `index` with these weights `[row_size]` and buffers, which are copied if it has others."""
        key = weights.data_ptr(), weights._version, id(buffers)
        replica, known = self._models.get(index) or (self._new(), None)
        if known != key:
            replica.load(weights, buffers)
            self._models[index] = replica, key
        return replica.module

    def over(self, weights: Tensor, buffers: Sequence[Tensor]) -> nn.Module:
        """Return the teacher whose parameters are views of `weights`, `[row_size]`. Captured steps find other weights
        at the same place."""
        replica = self._views.get(weights.data_ptr())
        if replica is None:
            replica = self._views[weights.data_ptr()] = self._new()
            for parameter, view in zip(replica.parameters, self._setup.layout.views(weights), strict=True):
                parameter.data = view
            self.load_buffers(buffers)
        return replica.module

    def load_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Copy a client's first buffers into the teachers of captured steps."""
        for replica in self._views.values():
            for buffer, new in zip(replica.buffers, buffers, strict=True):
                buffer.copy_(new)

    def _new(self) -> Replica:
        replica = Replica.new(self._setup.model, self._setup.layout, self._setup.device)
        replica.module.eval()
        return replica
