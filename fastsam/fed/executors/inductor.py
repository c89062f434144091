"""Errors of torch's compiler, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
