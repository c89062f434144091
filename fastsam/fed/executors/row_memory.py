"""The memory of rows that take local steps: an arena, the hyperparameters of every row, and running sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam import ops
from fastsam.arena import Arena
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.task import LocalOptions, Setup
from fastsam.fed.update.local_rule import LocalRule, sgd_rule
from fastsam.fed.update.local_update import NU, Constants, LocalUpdate
from fastsam.step import perturbation
from fastsam_kernels.hparams import NUM_HPARAMS, HParam


class RowMemory:
    """The memory of `rows` rows, each with its own constants of the local update rule. `LocalRows` are windows of it.

    Attributes:
        hparams: hyperparameters, float64 `[rows, 1, NUM_HPARAMS]`.
        losses: sums of the losses of each row, float64 `[rows]`.
        rule: rule of the updates.
        counts: number of steps of each row and parameter, float32 `[rows, slots]`, or None if the rule does not count.
        norms: mean norms of a pilot's gradients, float64 `[rows]`.
        sumsq_v: squared norms of the update directions, float64 `[rows]`, or None if the run does not clip.
    """

    def __init__(self, setup: Setup, rows: int) -> None:
        self.layout, self.options, self.dtype, self.device = setup.layout, setup.options, setup.dtype, setup.device
        self.kernels = ops.bind(setup.backend, setup.device, setup.dtype)
        self.arena = Arena(setup.layout, rows, setup.device)
        self.hparams = torch.zeros(rows, 1, NUM_HPARAMS, dtype=torch.float64, device=setup.device)
        # Without a rule an optimizer of torch makes the updates, and the kernels only perturb.
        self.rule = setup.rule or sgd_rule(0.0, 0.0)
        self._common = _common(setup.options, self.rule)
        counts_steps, slots = self.rule.counts_steps, len(setup.layout.segments)
        self.counts = torch.zeros(rows, slots, device=setup.device) if counts_steps else None
        self.losses = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        self.norms = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        self.sumsq = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        self.sumsq_v = torch.zeros_like(self.sumsq) if setup.options.clip_norm is not None else None
        self.inner = torch.zeros(rows, 2, dtype=torch.float64, device=setup.device)
        self._written: tuple[slice, float, Sequence[Constants]] | None = (
            None  # rows, rate and constants of the last call
        )

    def field(self, name: str) -> Tensor:
        return self.arena.field(name, self.dtype)

    def write_numbers(self, part: slice, updates: Sequence[LocalUpdate], lr: float) -> None:
        """Write the hyperparameters of some rows: of each row's local update, or of one for all of them. Most calls
        would write the numbers of the last call."""
        constants = [update.constants for update in updates]
        if self._written == (part, lr, constants):
            return
        numbers = torch.tensor([self.numbers(update, lr) for update in updates], dtype=torch.float64)
        self.hparams[part].copy_(to_device(numbers.unsqueeze(1), self.device))
        self._written = None if constants[0].variant.rewrites else (part, lr, constants)

    def numbers(self, update: LocalUpdate, lr: float) -> tuple[float, ...]:
        """Return a row of `hparams`."""
        values = self._common.copy()
        radius = perturbation(update.direction, update.rho, update.eta, NU)
        second_moments = self.rule.second_moment_columns(update.second_moment_steps)
        columns: tuple[tuple[int, float], ...] = (*radius, *update.constants.mix.columns(), *second_moments.items())
        for column, value in columns:
            values[column] = value
        values[HParam.PENALTY] = update.penalty
        values[HParam.LR] = lr
        values[HParam.PROX_MU] = update.proximal_coefficient
        return tuple(values)


def _common(options: LocalOptions, rule: LocalRule) -> list[float]:
    """Return the hyperparameters that all rows of a run share."""
    values = [0.0] * NUM_HPARAMS
    for column, value in rule.columns.items():
        values[column] = value
    values[HParam.CLIP] = options.clip_norm or 0.0
    values[HParam.CLIP_INCLUDES_PROX] = float(options.clip_scope == "full")
    return values
