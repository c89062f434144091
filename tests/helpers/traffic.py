"""Counts of the elements that Triton's interpreter loads and stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fastsam import backends

TRITON = next(b for b in backends.table() if (b.name, b.device) == ("triton", "cpu"))
needs_interpreter = pytest.mark.skipif(not TRITON.available, reason=f"triton on cpu: {TRITON.reason}")


class Traffic:
    """Bytes loaded and stored, and how often each element of some buffers was."""

    def __init__(self, buffers: dict[str, list[Tensor]]) -> None:
        self.bytes = 0
        self.spans = [(name, t, t.data_ptr(), t.data_ptr() + _extent(t)) for name, ts in buffers.items() for t in ts]
        self.counts = {
            kind: [np.zeros((end - start) // t.element_size(), np.int64) for _, t, start, end in self.spans]
            for kind in ("load", "store")
        }

    def note(self, kind: str, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        addresses = np.broadcast_to(addresses, mask.shape)[mask].astype(np.int64)
        self.bytes += addresses.size * itemsize
        for (_, tensor, start, end), counts in zip(self.spans, self.counts[kind], strict=True):
            inside = addresses[(addresses >= start) & (addresses < end)]
            np.add.at(counts, (inside - start) // tensor.element_size(), 1)

    def of(self, kind: str, name: str) -> list[np.ndarray]:
        return [c for (span_name, *_), c in zip(self.spans, self.counts[kind], strict=True) if span_name == name]


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextmanager
def record_traffic(buffers: dict[str, list[Tensor]]) -> Iterator[Traffic]:
    """Record the loads and stores of Triton's interpreter."""
    from triton.runtime import interpreter

    traffic, builder = Traffic(buffers), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def loads(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        result = load(self, ptrs, mask, *rest)
        traffic.note("load", ptrs.data, np.atleast_1d(mask.data), result.data.itemsize)
        return result

    def stores(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.note("store", ptrs.data, np.atleast_1d(mask.data), value.data.itemsize)
        return store(self, ptrs, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", loads)
        patch.setattr(builder, "create_masked_store", stores)
        yield traffic
