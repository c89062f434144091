"""A guard that finds the parameters and buffers of a model that a forward pass has replaced, moved or written."""

from __future__ import annotations

from itertools import chain
from operator import is_not

import torch
from torch import Tensor, nn

_data_ptr, _values = Tensor.data_ptr, dict.values


class TensorGuard:
    """The tensors of a module as they are now. A comparison takes some microseconds and does not wait for a device.

    Writes are found by version counters, in which writes through `.data` do not count. Submodules in TorchScript are
    left out.
    """

    def __init__(self, module: nn.Module) -> None:
        inner = [(name, m) for name, m in module.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._prefixes = [name for name, _ in inner for _ in range(2)]
        self._mappings = [mapping for _, m in inner for mapping in (m._parameters, m._buffers)]
        self._sizes, self._tensors = list(map(len, self._mappings)), self._current()
        self._places = self._named()
        tensors = {name: t for name, t in self._places.items() if t is not None}
        self._parameters = [t for t in tensors.values() if isinstance(t, nn.Parameter)]
        self._pointers = list(map(_data_ptr, self._parameters))
        # It stays allocated. Else a second replacement may get the first address again.
        self._memory = [t.untyped_storage() for t in self._parameters]
        fixed = {name: (t, _version(t)) for name, t in tensors.items() if not t.requires_grad}
        self._frozen = {name: pair for name, pair in fixed.items() if isinstance(pair[0], nn.Parameter)}
        self._buffers = {name: pair for name, pair in fixed.items() if name not in self._frozen}

    def _current(self) -> list[Tensor | None]:
        return list(chain.from_iterable(map(_values, self._mappings)))

    def _named(self) -> dict[str, Tensor | None]:
        pairs = zip(self._prefixes, self._mappings, strict=True)
        return {f"{prefix}.{key}".lstrip("."): t for prefix, mapping in pairs for key, t in mapping.items()}

    def find_problem(self, has_fixed_buffers: bool) -> str | None:
        """Return what a pass did to a tensor that no pass may do, with a remedy, or None.

        Args:
            has_fixed_buffers: the run does not say what becomes of buffers that change.
        """
        if list(map(len, self._mappings)) != self._sizes or any(map(is_not, self._current(), self._tensors)):
            old, new = self._places, self._named()
            differs = (name for name in {**old, **new} if new.get(name, "none") is not old.get(name, "none"))
            name = next(differs)
            return _replaced(name, old.get(name))
        if list(map(_data_ptr, self._parameters)) != self._pointers:
            moved = (p for p, old in zip(self._parameters, self._pointers, strict=True) if p.data_ptr() != old)
            return _replaced(*next((name, p) for p in moved for name, t in self._places.items() if t is p))
        if name := _first_written(self._frozen):
            return written_frozen(name)
        if has_fixed_buffers and (name := _first_written(self._buffers)):
            return (
                f"a pass changes the buffer {name!r}, which the trial before round 1 did not change, and clients' "
                "buffers are not parameters. Say buffers='average' (mean over the clients), 'keep' (initial buffers) "
                "or 'local' (each client's own), with executor='threads' or 'sequential'"
            )
        return None


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _first_written(tensors: dict[str, tuple[Tensor, int]]) -> str:
    """Return the name of the first tensor with another version, or ""."""
    for name, (t, version) in tensors.items():
        if _version(t) != version:
            return name
    return ""


def _replaced(name: str, tensor: Tensor | None) -> str:
    """Return the problem of a tensor that a pass replaced, or moved to other memory."""
    if isinstance(tensor, nn.Parameter):
        return (
            f"a pass gives the parameter {name!r} other memory (`.data =`, or a new nn.Parameter), and clients' "
            "weights are read from its first memory. Write in place under torch.no_grad(): "
            f"self.{name}.copy_(new). Or compute the value in forward(), as torch.nn.utils.parametrizations do"
        )
    return (
        f"a pass replaces the buffer {name!r} by another tensor, and clients' buffers are read from the registered "
        f"one. Register it with its shape. Write into it: self.{name}.copy_(new)"
    )


def written_frozen(name: str) -> str:
    """Return the problem of a frozen parameter that a pass writes."""
    return (
        f"a pass writes the parameter {name!r}, which is not trained (requires_grad=False) and one for all clients; "
        "make it a buffer (register_buffer), for which buffers='average', 'keep' or 'local' says what becomes of it"
    )
