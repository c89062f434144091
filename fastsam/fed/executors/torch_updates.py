"""Local updates by an optimizer of torch, in place of the kernels' SGD (the option `optimizer` of a run)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.local_rows import LocalRows
from fastsam.fed.executors.row_memory import RowMemory
from fastsam.fed.executors.task import Task
from fastsam.fed.executors.torch_state import load_tensors, tensors_of
from fastsam.fed.update.variant import StepVariant

SUPPORTED = frozenset(
    {
        *("gradient", "adaptive gradient", "has_q", "has_phi", "has_full_gradient", "has_start"),
        "has_optimizer_state",
    }
)


class TorchRows(LocalRows):
    """A row whose updates are steps of an optimizer of torch. Each client has a new optimizer. Its state is
    new too, unless the local update has one.

    The optimizer gets `a*g2 + q + phi*w` of the local update rule as gradient. The kernels perturb the weights.

    Attributes:
        parameters: parameters of the model, which view the row.
    """

    def __init__(self, memory: RowMemory, part: slice, copies: bool = False) -> None:
        super().__init__(memory, part, copies)
        make = memory.options.optimizer
        assert make is not None
        self._make = make
        self._optimizer: torch.optim.Optimizer | None = None
        self._lr, self._a, self._phi = 0.0, 1.0, 0.0
        self._start_state: dict[str, Tensor] = {}
        self.parameters: list[nn.Parameter] = []

    def set_variant(self, variant: StepVariant) -> None:
        """See `LocalRows.set_variant`.

        Raises ValueError for a variant that is neither a plain step nor a step of SAM.
        """
        features = sorted(variant.needs - SUPPORTED)
        if features:
            raise ValueError(
                f"optimizer serves plain local steps and steps of SAM, but this algorithm needs {', '.join(features)}. "
                "Use another algorithm, or leave optimizer out"
            )
        super().set_variant(variant)

    def begin(self, tasks: Sequence[Task], start: Tensor) -> None:
        """See `LocalRows.begin`."""
        super().begin(tasks, start)
        update = tasks[0].update
        self._lr, self._a, self._phi = tasks[0].lr, update.perturbed_weight, update.proximal_coefficient

    def restart(self, start: Tensor) -> None:
        """See `LocalRows.restart`. The next update makes a new optimizer."""
        self._optimizer, self._start_state = None, {}
        super().restart(start)

    def _read_optimizer_state(self, tasks: Sequence[Task]) -> None:
        self._start_state = tasks[0].optimizer_state()

    def update(self, grads: Gradients, first: Gradients | None) -> None:
        """See `LocalRows.update`."""
        if self.w is not None:
            self.z.copy_(self.w)
        if self._optimizer is None:
            rate = {} if math.isnan(self._lr) else {"lr": self._lr}  # NaN if the optimizer takes no rate
            self._optimizer = self._make(self.parameters, **rate)
            if self._start_state:
                load_tensors(self._optimizer, self._start_state)
        offsets = None if self.q is None else self.layout.views(self.q[0])
        for slot, g in zip(grads.slots, grads.tensors, strict=True):
            parameter = self.parameters[slot]
            v = g if self._a == 1 else self._a * g
            v = v if offsets is None else v + offsets[slot]
            parameter.grad = v if not self._phi else v.add(parameter.detach(), alpha=self._phi)
        self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        if self.w is not None:
            self.w.copy_(self.z)

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `LocalRows.optimizer_state`."""
        state = self._start_state if self._optimizer is None else tensors_of(self._optimizer)
        return {name: x[None] for name, x in state.items()}
