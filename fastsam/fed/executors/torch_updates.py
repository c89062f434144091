"""Local updates by an optimizer of torch, in place of the kernels' SGD (the option `optimizer` of a run)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.row_state import RowSlice, RowState
from fastsam.fed.update.local_update import LocalUpdate
from fastsam.fed.update.variant import StepVariant

SUPPORTED = frozenset({"gradient", "adaptive gradient", "has_q", "has_phi"})


class TorchUpdates(RowSlice):
    """A row whose updates are steps of an optimizer of torch. The optimizer and its state are new for each client.

    The optimizer gets `a*g2 + q + phi*w` of the local update rule as gradient. The kernels perturb the weights.

    Attributes:
        parameters: parameters of the model, which view the row.
    """

    def __init__(self, rows: RowState) -> None:
        super().__init__(rows, slice(0, 1))
        make = rows.options.optimizer
        assert make is not None
        self._make = make
        self._optimizer: torch.optim.Optimizer | None = None
        self._lr, self._a, self._phi = 0.0, 1.0, 0.0
        self.parameters: list[nn.Parameter] = []

    def set_variant(self, variant: StepVariant) -> None:
        """See `RowSlice.set_variant`.

        Raises ValueError for a variant that is neither a plain step nor a step of SAM.
        """
        features = sorted(variant.needs - SUPPORTED)
        if features:
            raise ValueError(
                f"optimizer serves plain local steps and steps of SAM, but this algorithm needs {', '.join(features)}. "
                "Use another algorithm, or leave optimizer out"
            )
        super().set_variant(variant)

    def set_constants(self, update: LocalUpdate, lr: float) -> None:
        """Set the numbers of the next steps."""
        self._lr, self._a, self._phi = lr, update.perturbed_weight, update.proximal_coefficient

    def begin(self, start: Tensor) -> None:
        """See `RowSlice.begin`. The next update makes a new optimizer."""
        super().begin(start)
        self._optimizer = None

    def update(self, grads: Gradients, first: Gradients | None) -> None:
        """See `RowSlice.update`."""
        if self.w is not None:
            self.z.copy_(self.w)
        if self._optimizer is None:
            rate = {} if math.isnan(self._lr) else {"lr": self._lr}  # NaN if the optimizer takes no rate
            self._optimizer = self._make(self.parameters, **rate)
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
