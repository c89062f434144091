"""The memory of n rows: an arena of vectors, fields of numbers, and the hyperparameters of every row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fastsam import ops
from fastsam.arena import Arena, Layout
from fastsam.fed.common.transfer import to_device
from fastsam.fed.update.rules import LocalRule, sgd_rule
from fastsam_kernels.hparams import NUM_HPARAMS, HParam

NU = 1e-7  # added to the norm of a direction; the papers add nothing, their simulators this


class RunFacts(Protocol):
    """The facts of a run that rows need (`fastsam.fed.executors.task.Setup`)."""

    @property
    def backend(self) -> str: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def rule(self) -> LocalRule | None: ...

    @property
    def options(self) -> Any: ...


class KeyFacts(Protocol):
    """The facts of a step's key that rows need (`fastsam.fed.update.steps.Key`)."""

    @property
    def kind(self) -> Any: ...

    @property
    def given(self) -> frozenset[str]: ...

    @property
    def two_buffers(self) -> bool: ...

    @property
    def keeps_numbers(self) -> bool: ...


class StepFacts(Protocol):
    """The facts of a step that rows need (`fastsam.fed.update.steps.Step`)."""

    outputs: ClassVar[tuple[str, ...]]

    @property
    def key(self) -> KeyFacts: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def start(self) -> Tensor | None: ...

    @property
    def state(self) -> Mapping[str, Tensor] | None: ...

    @property
    def a(self) -> float | Tensor: ...

    @property
    def prox(self) -> float | Tensor | None: ...

    def numbers(self) -> Mapping[int, float | Tensor]: ...


class RowMemory:
    """The memory of n rows, of which `Rows` are windows.

    Attributes:
        scalars: tensors of the rows by name, float64 unless said otherwise: "hparams" `[n, 1, NUM_HPARAMS]`, "losses",
            "sumsq" and "sumsq_v" `[n]`, "counts" float32 `[n, parameters]`.
        numbers: fields of numbers by name, float64 `[n, width]`.
        start: the common start of rows without a private one, `[1, row_size]`.
    """

    def __init__(self, setup: RunFacts, n: int) -> None:
        self.layout, self.options, self.dtype, self.device = setup.layout, setup.options, setup.dtype, setup.device
        self.kernels = ops.bind(setup.backend, setup.device, setup.dtype)
        # Without a rule an optimizer of torch makes the updates, and the kernels only perturb.
        self.rule = setup.rule or sgd_rule(0.0, 0.0)
        self.n, self.arena = n, Arena(setup.layout, n, setup.device)
        zeros = partial(torch.zeros, dtype=torch.float64, device=setup.device)
        self.scalars: dict[str, Tensor] = {
            "hparams": zeros(n, 1, NUM_HPARAMS), "losses": zeros(n), "sumsq": zeros(n),
        }  # fmt: skip
        if setup.options.clip_norm is not None:
            self.scalars["sumsq_v"] = zeros(n)
        if self.rule.counts_steps:
            self.scalars["counts"] = torch.zeros(n, len(setup.layout.segments), device=setup.device)
        self.numbers: dict[str, Tensor] = {}
        self.start: Tensor | None = None
        self.written: Hashable = None  # rows, rate, key and numbers that were written last, if they are still there
        self._start_of: tuple[Tensor, int] | None = None
        self._common = _common_numbers(setup.options, self.rule)

    def field(self, name: str) -> Tensor:
        """Return the field `[n, row_size]`, zeros at first."""
        if name in self.arena:
            return self.arena.field(name, self.dtype)
        return self._ready(self.arena.field(name, self.dtype))

    def number(self, name: str, width: int = 1) -> Tensor:
        """Return the field of numbers, float64 `[n, width]`, zeros at first."""
        if name not in self.numbers:
            self.numbers[name] = self._ready(torch.zeros(self.n, width, dtype=torch.float64, device=self.device))
        return self.numbers[name]

    def _ready(self, field: Tensor) -> Tensor:
        """Return a new field, whose zeros all streams see."""
        if self.n > 1 and field.device.type == "cuda":
            torch.cuda.current_stream(field.device).synchronize()
        return field

    def write_start(self, w: Tensor) -> None:
        """Write the common start of rows, `[row_size]`, unless it is there."""
        if self.start is None:
            self.start = self._ready(torch.zeros(1, self.layout.row_size, dtype=self.dtype, device=self.device))
        if self._start_of is None or self._start_of[0] is not w or self._start_of[1] != w._version:
            self.start.copy_(w)
            self._start_of = w, w._version

    def write_numbers(self, place: slice, step: StepFacts, lr: float) -> None:
        """Write the hyperparameters of some rows. Most calls would write the numbers of the last call."""
        numbers, key = step.numbers(), step.key
        tensors = {column: x for column, x in numbers.items() if isinstance(x, Tensor)}
        written = None if tensors or not key.keeps_numbers else (place.start, place.stop, lr, key, *numbers.values())
        if written is not None and self.written == written:
            return
        values = self._common.copy()
        values[HParam.LR] = lr
        for column, x in numbers.items():
            values[column] = 0.0 if isinstance(x, Tensor) else x
        hparams = self.scalars["hparams"][place]
        hparams.copy_(to_device(torch.tensor(values, dtype=torch.float64), self.device))
        for column, x in tensors.items():
            hparams[:, :, column] = x.to(torch.float64)
        self.written = written


def _common_numbers(options: Any, rule: LocalRule) -> list[float]:
    """Return the hyperparameters that all rows of a run share."""
    values = [0.0] * NUM_HPARAMS
    for column, value in rule.columns.items():
        values[column] = value
    values[HParam.PERTURB_EPS] = NU
    values[HParam.CLIP] = options.clip_norm or 0.0
    values[HParam.CLIP_INCLUDES_PROX] = float(options.clip_scope == "full")
    return values
