"""A stand-in for CUDA on the CPU: streams with an order of operations, and graphs that miss what a real replay misses.

Everything runs at once, in the order of the calls, so results do not depend on streams. `Watch` sees every operation of
the dispatcher (all operations of the backend "reference"), its stream, and the memory that it reads and writes.
Accesses to one storage from two streams must be ordered by waits (vector clocks). Memory is not freed during a watch,
so that no address is used twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class FakeStream:
    """A stream.

    Attributes:
        clock: for each stream the number of its operations that are done before the next operation here.
        depth: number of operations of the longest chain that ends here. An operation follows the operations before it
            on its stream, and the operations for which its stream waited.
    """

    def __init__(self) -> None:
        self.clock: dict[FakeStream, int] = {}
        self.depth = 0

    def wait_stream(self, other_stream: FakeStream) -> None:
        self.wait_event(FakeEvent(other_stream.clock, other_stream.depth))

    def record_event(self) -> FakeEvent:
        return FakeEvent(dict(self.clock), self.depth)

    def wait_event(self, event: FakeEvent) -> None:
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)
        self.depth = max(self.depth, event.depth)

    def synchronize(self) -> None:
        """Wait on the host, so that later queued operations and reads of the host follow this stream's operations."""
        FakeCuda.active.wait_stream(self)

    def has_passed(self, stream: FakeStream, count: int) -> bool:
        return self.clock.get(stream, 0) >= count


@dataclass(frozen=True)
class FakeEvent:
    """An event that stores the operations that precede it, and the length of their longest chain."""

    clock: dict[FakeStream, int]
    depth: int


class FakeGraph:
    """Captured work. It is done again at each replay, and must be what it was: operations, memory from outside, shapes
    and numbers."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.trace, self.replays = work, list[Any](), 0

    def replay(self) -> None:
        watch = FakeCuda.watch
        if watch is None:
            return self.work()
        with watch.tracing() as trace:
            self.work()
        self.replays += 1
        self.trace = self.trace or trace
        assert trace == self.trace, next((a, b) for a, b in zip(trace, self.trace, strict=False) if a != b)


@dataclass(frozen=True)
class FakeHandle:
    """The object that owns a graph: the graph ends with it."""

    graph: FakeGraph

    def replay(self) -> None:
        self.graph.replay()


class FakeCuda:
    """In the place of `executors.cuda.Cuda`."""

    graphs: list[FakeGraph]
    ends: list[str]  # events of the end of a run in their order: "synchronize", and "end" of a graph
    active = FakeStream()
    watch: Watch | None = None
    waits = True  # False: the host may not wait where the real one forbids it, either

    def __init__(self, device: torch.device) -> None:
        FakeCuda.graphs, FakeCuda.ends = [], []

    def stream(self) -> FakeStream:
        return FakeStream()

    def current(self) -> FakeStream:
        return FakeCuda.active

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        old_stream, FakeCuda.active = FakeCuda.active, stream
        try:
            yield
        finally:
            FakeCuda.active = old_stream

    def record_stream(self, tensors: object, stream: object) -> None:
        pass

    @contextmanager
    def no_wait(self) -> Iterator[None]:
        if FakeCuda.waits:
            yield
            return
        with _NoWait():
            yield

    def capture(self, work: Callable[[], None], stream: object) -> FakeHandle:
        FakeCuda.graphs.append(FakeGraph(work))
        handle = FakeHandle(FakeCuda.graphs[-1])
        weakref.finalize(handle, FakeCuda.ends.append, "end")
        return handle

    def synchronize(self) -> None:
        FakeCuda.ends.append("synchronize")


class _NoWait(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in SYNCS:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Raises AssertionError for two accesses to one memory that nothing orders, and for a captured step that waits for
    the host.

    Attributes:
        operations: number of operations that are not views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.alive: list[Any] = []
        self.writes: dict[int, tuple[FakeStream, int]] = {}
        self.reads: dict[int, dict[FakeStream, int]] = {}
        self.allocations: dict[int, int] | None = None
        self.trace: list[Any] = []

    def overlap(self, work: Callable[[], object]) -> float:
        """Return the mean number of operations of `work` that can run at once: all of them, over their longest chain.
        The current stream must wait for every other stream at the end of `work`."""
        operations, depth = self.operations, FakeCuda.active.depth
        work()
        return (self.operations - operations) / (FakeCuda.active.depth - depth)

    @contextmanager
    def tracing(self) -> Iterator[list[Any]]:
        self.allocations, self.trace = {}, []
        try:
            yield self.trace
        finally:
            self.allocations = None

    def __enter__(self) -> Any:
        FakeCuda.watch = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        FakeCuda.watch = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, writes_of_call = func._schema.name, set()
        for argument, value in [*zip(func._schema.arguments, args, strict=False)] + [
            (a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs
        ]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes_of_call |= {place(t) for t in tree_leaves(value) if isinstance(t, Tensor)}
        arguments = tree_leaves((args, kwargs))
        if self.allocations is not None:
            assert name not in SYNCS, f"{name} in a captured step: the host would wait"
            self.trace.append((name, [self._describe(v) for v in arguments]))
        active = FakeCuda.active
        active.clock[active] = active.clock.get(active, 0) + 1
        if not func.is_view:
            self.operations += 1
            active.depth += 1
            for tensor in (v for v in arguments if isinstance(v, Tensor)):
                self._access(name, tensor, place(tensor) in writes_of_call, active)
        result = func(*args, **kwargs)
        for tensor in (v for v in tree_leaves(result) if isinstance(v, Tensor)):
            self.alive.append(tensor.untyped_storage())
            if not func.is_view and place(tensor) not in {place(v) for v in arguments if isinstance(v, Tensor)}:
                self.writes[place(tensor)] = (active, active.clock[active])
                if self.allocations is not None:
                    self.allocations[place(tensor)] = len(self.allocations)
        return result

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if place(value) not in self.writes and value.numel() < 64:
            return value.tolist()  # a constant of the code: new memory every time
        number = (self.allocations or {}).get(place(value))
        key = ("outside", value.data_ptr()) if number is None else ("inside", number)
        return (*key, tuple(value.shape), value.stride(), value.dtype)

    def _access(self, name: str, tensor: Tensor, writes: bool, active: FakeStream) -> None:
        storage = place(tensor)
        access = f"{name} {'writes' if writes else 'reads'} {list(tensor.shape)}"
        if storage in self.writes:
            assert active.has_passed(*self.writes[storage]), f"{access} before it is sure to be written"
        readers = self.reads.setdefault(storage, {})
        if writes:
            for stream, count in readers.items():
                assert active.has_passed(stream, count), f"{access} while it may still be read"
            self.writes[storage], self.reads[storage] = (active, active.clock[active]), {}
        else:
            readers[active] = active.clock[active]


def place(tensor: Tensor) -> int:
    """Return a number that identifies the storage of a tensor."""
    return tensor.untyped_storage().data_ptr()
