"""Columns in memory-mapped files (`numpy.memmap`). A batch is read from the file, and the next one while it is
trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from fastsam.fed.clients.samples import leaves, map_tree

T = TypeVar("T")


def lies_in_files(data: Any) -> bool:
    """Return True if one of the columns is a memory-mapped file."""
    return any(isinstance(column, np.memmap) for _, column in leaves(data))


class MappedRows:
    """Columns `[n, ...]` in a tree as a data set of n samples. Raises ValueError for unequal lengths."""

    def __init__(self, columns: Any, label: str) -> None:
        self.columns = columns
        sizes = {path or "it": len(column) if np.ndim(column) else 0 for path, column in leaves(columns)}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{path} has {n}" for path, n in sizes.items())
            raise ValueError(f"{label}: columns must have one number of samples, {counts}")
        self._count = next(iter(sizes.values()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Any:
        return map_tree(itemgetter(place), self.columns)

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        """In one reading of each column."""
        rows = map_tree(itemgetter(list(places)), self.columns)
        return [map_tree(itemgetter(i), rows) for i in range(len(places))]


def one_ahead(makers: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of the functions, in order. A thread calls the next function meanwhile."""
    with ThreadPoolExecutor(1, "fastsam reads ahead") as thread:
        under_way: Future[T] | None = None
        for make in makers:
            ready, under_way = under_way, thread.submit(make)
            if ready is not None:
                yield ready.result()
        if under_way is not None:
            yield under_way.result()
