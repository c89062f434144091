"""Errors for too little memory, which name the number of clients that train at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ADVICE = "Take fewer slots, or a smaller batch_size"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if there was no memory, on a GPU or a CPU."""
    # torch has a separate class of errors for GPUs only.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def name_slots(slots: int) -> Iterator[None]:
    """Add the number of slots to the message if the device has no memory for its clients."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise torch.OutOfMemoryError(
            f"the device has no memory for {slots} clients at once ({first}). Take fewer slots, for example "
            f"slots={max(1, slots // 2)}"
        ) from error
