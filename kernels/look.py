"""What a pass looks at in every tensor, past the interpreter (`csrc/look.cpp`): on the CPU, where a small model's step is little more."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import native

# Of Python's limited API, in the order of `Python` in look.cpp.
_FUNCTIONS = (
    "PyList_Size", "PyList_GetItem", "PyList_New", "PyList_SetItem", "PyObject_GetAttr", "PyObject_Type",
    "Py_IncRef", "Py_DecRef", "PyErr_Clear",
)  # fmt: skip
_OBJECTS = (None, Tensor, "grad")


class Look:
    """Finds the gradients of parameters that are as they were.

    `params`: dense CPU tensors; `entries`: any objects that must be the same ones again; `like`: per parameter a tensor of the class `Tensor`
    with the dtype, shape and order of elements that its gradient has to have. `places`: an int64 array, one element per parameter.
    """

    def __init__(
        self, params: Sequence[Tensor], entries: Sequence[Any], like: Sequence[Tensor], places: ctypes.Array[Any]
    ) -> None:
        self._held = list(entries), list(like), places  # so that no address goes stale; the parameters are the caller's
        tables = [
            list(map(id, params)), list(map(id, entries)), [p.data_ptr() for p in params], [t._cdata for t in like]
        ]  # fmt: skip
        self._tables = [_words(table) for table in tables]
        self._seen = _words([len(params), len(entries), *map(ctypes.addressof, self._tables)])
        functions, look = self._function = _function()
        self._call = functools.partial(look, ctypes.addressof(functions), ctypes.addressof(self._seen))
        self._places = ctypes.addressof(places)

    def __call__(self, params: list[Tensor], entries: list[Any]) -> list[Tensor] | None:
        """The parameters' gradients, whose addresses are then in `places`; None when `params` or `entries` are others than before, a parameter lies
        elsewhere, or a gradient is missing or of another kind."""
        return self._call(params, entries, self._places)


def _words(values: Sequence[int]) -> ctypes.Array[Any]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


@functools.cache
def _function() -> tuple[ctypes.Array[Any], Any]:
    """The table of functions, and the function that takes it."""
    # An address; the stub of the module leaves it out.
    from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr as data  # type: ignore[attr-defined]

    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
    look = ctypes.PyDLL(native.library()).fastsam_look
    look.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object, ctypes.py_object, ctypes.c_void_p]
    look.restype = ctypes.py_object
    return _words([*functions, data, *map(id, _OBJECTS), _word()]), look


def _word() -> int:
    """Which word of a tensor's Python object points to its implementation. Raises AttributeError when none does."""
    probe = torch.empty(0, device="cpu")
    words = (ctypes.c_int64 * (Tensor.__basicsize__ // 8)).from_address(id(probe))
    if probe._cdata not in words[2:]:  # behind the reference count and the class
        raise AttributeError("a tensor's Python object does not point to its implementation")
    return 2 + words[2:].index(probe._cdata)


@functools.cache
def why_not() -> str | None:
    """What is missing: parts of it are private to torch, so it is tried first. None when it serves."""
    try:
        p, places, entry = torch.nn.Parameter(torch.ones(2, 3, device="cpu")), _words([0]), object()
        look = Look([p], [entry], [p.detach()], places)
        p.grad = torch.ones(2, 3, device="cpu")
        found = look([p], [entry])
        if found is None or found[0] is not p.grad or places[0] != p.grad.data_ptr():
            return "this torch's tensors are laid out otherwise"
    except (AttributeError, ImportError) as error:
        return str(error)
    return None
