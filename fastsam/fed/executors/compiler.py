"""Recorded passes through torch's compiler (`compile=True`): which shapes are worth it, and the compiler's errors in
words that say what to do."""

from __future__ import annotations

import importlib.util
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from shutil import which
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fastsam.fed.executors.base import Setup


def why_not(setup: Setup) -> str | None:
    """Why nothing can be compiled here; None when it can."""
    if setup.device.type == "cpu" and not any(which(name) for name in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler on the CPU, and there is none (looked for c++, g++, clang++)"
    if setup.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on a GPU, and it is not installed"
    return None


def common_sizes(sizes: Sequence[int], slots: int) -> frozenset[int]:
    """The numbers of samples whose batches are worth a compilation: of half as many clients as there are slots, the
    four most frequent ones.

    A function of the data alone: what is compiled must not depend on where a run was interrupted.
    """
    counts = sorted(Counter(sizes).items(), key=lambda pair: (-pair[1], pair[0]))
    return frozenset(size for size, count in counts[:4] if 2 * count >= slots)


def compile_graph(module: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A functional graph for tensors of the shapes, strides and dtypes of `inputs`, and no others: nothing is checked.
    Its outputs have the strides that the graph gives them.

    On the CPU the calls from kernel to kernel are in C++, too: in Python they are a quarter of the time. What lies
    between kernels is taken from one piece of memory: allocating each, and looking at its strides, was a tenth. Raises
    RuntimeError as `explained_errors` does.
    """
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    if inputs[0].device.type == "cpu":
        options = {"cpp_wrapper": True, "memory_planning": True, "memory_pool": "intermediates", "size_asserts": False}
    alone = _alone()
    with explained_errors():
        if alone is None:
            return torch.compile(module, fullgraph=True, dynamic=False, options=options)
        made: Callable[..., Sequence[Tensor]] = alone(module, list(inputs), options={"config_patches": options})
        return made


@cache
def _alone() -> Any:
    """torch's compiler without its guards, which take a tenth of a millisecond in every call; None in versions that
    lack it, or have another."""
    try:
        from torch._inductor import standalone_compile
    except ImportError:
        return None
    wanted = {"gm", "example_inputs", "options"}
    return standalone_compile if wanted <= inspect.signature(standalone_compile).parameters.keys() else None


@contextmanager
def explained_errors() -> Iterator[None]:
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
            f"torch.compile failed: {reason}\nIf a compilation was killed before, its half-written files are in the "
            f"way: "
            f"delete the directory {cache_dir()} and run again; or use compile=False"
        ) from error
