"""The effects of a training pass on the model and on torch's random state, recorded on a copy before round 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastsam.fed.executors.randomness import RandomOpRecorder, RandomOps
from fastsam.fed.update.tensor_guard import TensorGuard, written_frozen


@dataclass(frozen=True)
class Effects:
    """The effects of training passes.

    Attributes:
        draws: functions that draw random numbers (`Setup.draws`).
        changed_buffers: names of the buffers that change.
        written_parameters: names of the trained parameters that forward passes write in place.
    """

    draws: RandomOps | None = None
    changed_buffers: tuple[str, ...] = ()
    written_parameters: tuple[str, ...] = ()

    def join(self, other: Effects) -> Effects:
        """Return the effects of both. The functions that draw are unknown (empty) if one of the two is unknown."""
        draws = self.draws if other.draws is None else other.draws
        if self.draws is not None and other.draws is not None:
            draws = self.draws | other.draws if self.draws and other.draws else frozenset()
        buffers, parameters = (
            tuple(dict.fromkeys((*a, *b)))
            for a, b in (
                (self.changed_buffers, other.changed_buffers),
                (self.written_parameters, other.written_parameters),
            )
        )
        return Effects(draws, buffers, parameters)


class EffectRecorder:
    """A context around the forward half of a training pass of `model`, which records its effects."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self._guard = model, TensorGuard(model)
        self._old_buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self._parameters = dict(model.named_parameters())
        self._random, self._writes = RandomOpRecorder(device), WriteRecorder(self._parameters)
        self._modes = ExitStack()

    def __enter__(self) -> EffectRecorder:
        self._modes.enter_context(self._random)
        self._modes.enter_context(self._writes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.close()

    def effects(self) -> Effects:
        """Return the effects, after the backward half.

        Raises:
            ValueError: the pass wrote a frozen parameter, moved a parameter or replaced a buffer.
        """
        draws = self._random.random_ops()
        if problem := self._guard.find_problem(has_fixed_buffers=False):
            raise ValueError(problem)
        for name in self._writes.names:
            if not self._parameters[name].requires_grad:
                raise ValueError(written_frozen(name))
        buffers = self.model.named_buffers()
        changed_buffers = tuple(name for name, b in buffers if not are_equal(b, self._old_buffers.get(name)))
        return Effects(draws, changed_buffers, tuple(self._writes.names))


class WriteRecorder(TorchDispatchMode):
    """Records the names of the tensors into whose memory the operations inside write, also through `.data`."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler, which takes seconds

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names: dict[str, None] = {}  # in the order of the writes
        self._name_of = {t.untyped_storage()._cdata: name for name, t in tensors.items()}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # operators of higher order may have none
        if schema is not None and schema.is_mutable:
            values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
            written = [values.get(a.name) for a in schema.arguments if a.is_write]
            for t in pytree.tree_leaves(written):
                if isinstance(t, Tensor) and (name := self._name_of.get(t.untyped_storage()._cdata)):
                    self.names[name] = None
        return func(*args, **kwargs)


def are_equal(a: Tensor, b: Tensor | None) -> bool:
    """Return whether shapes and numbers are equal; NaN equals NaN."""
    return b is not None and a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())
