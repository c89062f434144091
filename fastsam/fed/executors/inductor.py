"""Compiled functions, called past the guards of torch.compile where torch offers that; the compiler's errors in words that say what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


def built(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """`function`, which may write into its inputs, for tensors of the shapes, strides and dtypes of `inputs`, and no others: nothing is checked.

    On the CPU the calls from kernel to kernel are in C++, too: in Python they are a quarter of the time. What lies between kernels is taken
    from one piece of memory: allocating each, and looking at its strides, was a tenth.
    """
    traced = make_fx(function)(*(t.clone() for t in inputs))
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    if inputs[0].device.type == "cpu":
        options = {"cpp_wrapper": True, "memory_planning": True, "memory_pool": "combined", "size_asserts": False}
    alone = _alone()
    if alone is None:
        return torch.compile(traced, fullgraph=True, dynamic=False, options=options)
    made: Callable[..., Any] = alone(traced, list(inputs), options={"config_patches": options})
    return made


@cache
def _alone() -> Any:
    """torch's compiler without its guards, which take a tenth of a millisecond in every call; None in versions that lack it, or have another."""
    try:
        from torch._inductor import standalone_compile
    except ImportError:
        return None
    wanted = {"gm", "example_inputs", "options"}
    return standalone_compile if wanted <= inspect.signature(standalone_compile).parameters.keys() else None


@contextmanager
def compiling() -> Iterator[None]:
    """Raises RuntimeError with the reason and the cache's directory where the compiler fails inside.

    A compilation that was killed leaves half a file in that cache, and every later one that meets it fails.
    """
    try:
        yield
    except RuntimeError as error:
        # Here alone: the import takes a second, and torch has done it when it raises this.
        from torch._inductor.exc import InductorError
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if not isinstance(error, InductorError):
            raise
        reason = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip()
        raise RuntimeError(
            f"torch.compile failed: {reason}\nIf a compilation was killed before, its half-written files are in the way: "
            f"delete the directory {cache_dir()} and run again; or use compile=False"
        ) from error
