"""Launches of Triton's kernels without the work that Triton's own launch repeats for every call.

Triton's launch binds arguments, describes them as text and looks that text up, which takes longer than the launch.
Here a compiled kernel is found by a short key (`_specialize`), and one call of Triton's C function launches it. The
first launch with new dtypes, alignments or options compiles the kernel by Triton's own function.

The C function is not a public interface, so it is called only with the versions of Triton in `VERSIONS`. Any other
version, the interpreter, other devices than NVIDIA's, and processes with launch hooks (a profiler's) get Triton's own
launch. Options of `triton.knobs` count at the first launch of a kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from .triton_common import INTERPRETED, WARPS

VERSIONS = ("3.6", "3.7", "3.8", "3.9")  # each is tested in tests/cuda/test_triton_launches.py
VERSION = ".".join(triton.__version__.split(".")[:2])
MAX_LAUNCHERS = 4096  # keys that are kept; a model uses about five
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}  # `triton_common` says why multiply and add are not fused
ALIGNMENT = 16  # bytes, of which Triton compiles addresses to be multiples
Args = dict[str, Any]
Key = tuple[Any, ...]

_NUMBERS = (int, bool, type(None))
_launchers: dict[Key, Launcher | None] = {}
_parameters: dict[int, tuple[tuple[str, bool], ...]] = {}  # per kernel: names, and True if any value is served


class Launcher:
    """A compiled kernel that one call of Triton's C function launches."""

    def __init__(self, compiled: Any, args: Args) -> None:
        launcher = compiled.run  # loads the machine code
        self._launch, self._function = launcher.launch, compiled.function
        self._constants = _constants(args)  # so that no other object gets an id of the key
        self._flags = int(launcher.launch_cooperative_grid), int(launcher.launch_pdl)
        self._head: tuple[Any, ...]
        # in 3.6: two scratch memories, the metadata, the launch's metadata, two hooks, and the arguments one by one
        if VERSION == "3.6":
            self._head = None, None, compiled.packed_metadata, None, None, None
        else:
            signature = launcher.arg_annotations, launcher.kernel_signature
            self._head = compiled.packed_metadata, None, None, None, None, None, *signature

    def call(self, programs: int, stream: int, values: list[Any]) -> partial[None]:
        """Return the launch of this number of programs on a stream. It executes no line of Python code."""
        arguments = values if VERSION == "3.6" else (tuple(values),)
        return partial(self._launch, programs, 1, 1, stream, self._function, *self._flags, *self._head, *arguments)


def launch_call(kernel: Any, programs: int, device: torch.device, args: Args) -> partial[None]:
    """Return the launch of `programs` programs on `device` as a call, on the present stream.

    The call keeps no tensor allocated.
    """
    if avoids_triton(device):
        key, values = _specialize(kernel, device, args)
        launcher = _launchers[key] if key in _launchers else _compile(key, kernel, programs, args)
        if launcher is not None:
            return launcher.call(programs, triton.runtime.driver.active.get_current_stream(device.index), values)
    return partial(_launch_by_triton, kernel, programs, device, args)


def avoids_triton(device: torch.device) -> bool:
    """Return True if kernels may be launched on this device without Triton's own launch function."""
    if INTERPRETED or VERSION not in VERSIONS or not is_current(device):
        return False
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return all(hook is None or getattr(hook, "calls", True) == [] for hook in hooks)


def is_current(device: torch.device) -> bool:
    """Return True if Triton launches on this device, which is torch's current one."""
    return device.index == torch.cuda.current_device()


def _launch_by_triton(kernel: Any, programs: int, device: torch.device, args: Args) -> None:
    with _surroundings(device):
        kernel[(programs,)](**args, **OPTIONS)


def _surroundings(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a launch by Triton.

    Triton launches on the current device. Its interpreter computes with NumPy, whose warnings about masked lanes are
    suppressed.
    """
    if INTERPRETED:
        return np.errstate(all="ignore")
    return nullcontext() if is_current(device) else torch.cuda.device(device)


def _compile(key: Key, kernel: Any, programs: int, args: Args) -> Launcher | None:
    """Compile a kernel for arguments that no launch had before, and store its launcher under `key`.

    The launcher is None if only Triton's own function can launch this kernel.
    """
    compiled = kernel.warmup(grid=(programs,), **args, **OPTIONS)
    is_served = triton.runtime.driver.active.get_current_target().backend == "cuda" and _is_plain(compiled)
    if len(_launchers) >= MAX_LAUNCHERS:
        _launchers.clear()
    launcher = _launchers[key] = Launcher(compiled, args) if is_served else None
    return launcher


def _is_plain(compiled: Any) -> bool:
    """Return True if Triton compiled a kernel at once, and if its launch needs neither memory nor instruments."""
    metadata = getattr(compiled, "metadata", None)
    if metadata is None or metadata.global_scratch_size or metadata.profile_scratch_size:
        return False
    return not getattr(compiled.run, "gsan_enabled", False)


def _specialize(kernel: Any, device: torch.device, args: Args) -> tuple[Key, list[Any]]:
    """Return all that Triton compiles a kernel for, and the arguments with addresses in place of tensors.

    Triton compiles for dtypes, constants, numbers that are 1 or multiples of 16, and addresses that are multiples of
    16. The key has the numbers themselves, and the ids of the constants.
    """
    number = id(kernel)  # the hash of a kernel takes longer
    parameters = _parameters.get(number)
    if parameters is None:
        general = kernel.do_not_specialize
        parameters = _parameters[number] = tuple((name, name in general) for name in kernel.arg_names)
    key: list[Any] = [number, device.index]
    values: list[Any] = []
    for name, is_general in parameters:
        value = args[name]
        if is_general:
            values.append(value)
        elif isinstance(value, tuple):
            key.append(len(value))
            values.append(tuple([_describe(leaf, key) for leaf in value]))
        else:
            values.append(_describe(value, key))
    return tuple(key), values


def _describe(leaf: Any, key: list[Any]) -> Any:
    """Append a description of an argument to `key`. Return the argument, or its address if it is a tensor."""
    if type(leaf) in _NUMBERS:
        key.append(leaf)
    elif isinstance(leaf, Tensor):
        address = leaf.data_ptr()
        key += leaf.dtype, address % ALIGNMENT == 0
        return address
    else:
        key.append(id(leaf))
    return leaf


def _constants(args: Args) -> list[Any]:
    """Return the arguments that a key has by their ids."""
    leaves = [leaf for x in args.values() for leaf in (x if isinstance(x, tuple) else (x,))]
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
