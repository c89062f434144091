"""A stand-in for CUDA on the CPU: streams with an order of operations, and graphs that miss what a real replay misses.

Everything runs at once, in the order of the calls, so results do not depend on streams. `Watch` sees every operation of
the dispatcher (all operations of the backend "reference"), its stream, and the memory that it reads and writes.
Accesses to one place of memory from two streams must be ordered by waits (vector clocks). The rows of an arena are
separate places. Memory is not freed during a watch, so that no address is used twice.

The device's generator is a `FakeGenerator` with a seed and an offset, as Philox has. Its numbers are drawn by torch's
generator of the CPU. A model draws on the host from `FakeCuda.host`.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastsam.fed.executors.cuda import Cuda, NumbersOnDevice

SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
COPY = "aten::lift_fresh"  # torch.tensor(...) copies from the host; the reference kernels do so too


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
        self.wait_event(other_stream.record_event())

    def record_event(self) -> FakeEvent:
        return FakeEvent(dict(self.clock), self.depth)

    def wait_event(self, event: FakeEvent) -> None:
        FakeCuda.num_waits += 1
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


class PhiloxState:
    """The seed and the offset of a generator, and the device's copy of both, from which a replay draws."""

    def __init__(self, seed: int = 0, offset: int = 0) -> None:
        self.seed, self.offset = seed, offset
        with _disable_current_modes():  # memory that no stream writes before the first replay
            self.device_copy = torch.zeros(2, dtype=torch.int64)


class FakeGenerator:
    """In the place of a `torch.Generator` of a CUDA device. The default one also sets the numbers that are drawn next.

    In a capture a seed must be the seed that is there, `set_offset` raises, and `set_state` counts the offset from the
    offset that the state has at the replay.
    """

    def __init__(self, state: PhiloxState) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> FakeGenerator:
        if FakeCuda.is_in_graph and seed != self.state.seed:
            raise RuntimeError("set_current_seed can be called during stream capture only if new seed is the same")
        if not FakeCuda.is_in_graph:
            self.state.seed = seed
            self._set_offset(0)
        return self

    def set_offset(self, offset: int) -> FakeGenerator:
        if FakeCuda.is_in_graph:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::set_offset during CUDA graph capture")
        self._set_offset(offset)
        return self

    def _set_offset(self, offset: int) -> None:
        assert offset % 4 == 0, "offset must be a multiple of 4"
        start = self.state.offset if FakeCuda.is_in_graph else 0
        if not FakeCuda.is_in_graph:
            self.state.offset = offset
        if self is FakeCuda.default:
            numbers = f"{self.state.seed} {start + offset}".encode()
            torch.default_generator.manual_seed(int.from_bytes(blake2b(numbers, digest_size=7).digest(), "little"))

    def get_state(self) -> Tensor:
        """Return the seed, the offset, and the state of the numbers."""
        with _disable_current_modes():
            pair = torch.tensor(list(struct.pack("<QQ", self.state.seed, self.state.offset)), dtype=torch.uint8)
            return torch.cat([pair, torch.default_generator.get_state()])

    def set_state(self, state: Tensor) -> FakeGenerator:
        with _disable_current_modes():  # work of the host
            seed, offset = struct.unpack("<QQ", bytes(state[:16].tolist()))
            self.manual_seed(seed)
            self._set_offset(offset)
            if len(state) > 16 and self is FakeCuda.default:
                torch.default_generator.set_state(state[16:].clone())
        return self

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator(PhiloxState(self.state.seed, self.state.offset))

    def graphsafe_get_state(self) -> FakeGenerator:
        return FakeGenerator(self.state)

    def graphsafe_set_state(self, generator: FakeGenerator) -> FakeGenerator:
        self.state = generator.state
        return self


class FakeGraph:
    """Captured work. It is done again at each replay, and must be what it was: operations, memory from outside, shapes
    and numbers. Replays draw from `state`."""

    def __init__(self, work: Callable[[], None], state: PhiloxState) -> None:
        self.work, self.trace, self.replays = work, list[Any](), 0
        self.state, self.draws = state, False

    def replay(self) -> None:
        trace = list[Any]()
        with self._captured_state(), NumbersOnDevice():
            if FakeCuda.watch is None:
                self.work()
            else:
                with FakeCuda.watch.tracing() as trace:
                    self.work()
        self.replays += 1
        self.trace = self.trace or trace
        assert trace == self.trace, next((a, b) for a, b in zip(trace, self.trace, strict=False) if a != b)

    @contextmanager
    def _captured_state(self) -> Iterator[None]:
        old_state, numbers = FakeCuda.default.state, torch.get_rng_state()
        FakeCuda.default.state, FakeCuda.is_in_graph = self.state, True
        try:
            yield
        finally:
            FakeCuda.default.state, FakeCuda.is_in_graph = old_state, False
        with _disable_current_modes():
            self.draws |= not torch.equal(numbers, torch.get_rng_state())
        if self.draws:
            # A device gets the copy before the work. Here it is known afterwards that there was a draw.
            self.state.device_copy.copy_(torch.tensor([self.state.seed, self.state.offset]))
            self.state.offset += 4


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
    num_waits = 0  # waits of a stream for another
    default = FakeGenerator(PhiloxState())  # the default generator of the device
    host = torch.Generator()  # the generator of the host
    is_in_graph = False
    draws_in_graphs = True  # False: as a version of torch that refuses to draw at an offset in a capture

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

    def generator(self) -> FakeGenerator:
        return FakeCuda.default

    def host_generator(self) -> torch.Generator:
        return FakeCuda.host

    def is_capturing(self) -> bool:
        return FakeCuda.is_in_graph

    def set_captured_offset(self, seed: int, offset: int) -> None:
        Cuda.set_captured_offset(cast(Cuda, self), seed, offset)

    def repeats_draws(self) -> bool:
        return FakeCuda.draws_in_graphs

    def pool(self) -> object:
        return object()

    def capture(
        self, work: Callable[[], None], stream: object, pool: object = None, random_state: FakeGenerator | None = None
    ) -> FakeHandle:
        FakeCuda.graphs.append(FakeGraph(work, (random_state or FakeCuda.default).state))
        handle = FakeHandle(FakeCuda.graphs[-1])
        weakref.finalize(handle, FakeCuda.ends.append, "end")
        return handle

    def synchronize(self) -> None:
        FakeCuda.ends.append("synchronize")


class _NoWait(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in (*SYNCS, COPY):
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Raises AssertionError for two accesses to one memory that nothing orders, and for a captured step that waits for
    the host.

    Attributes:
        operations: number of operations that are not views.
        host_operations: number of them that no graph holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.host_operations = 0
        self.alive: list[Any] = []
        self.accesses: dict[int, list[Access]] = {}
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
                writes_of_call |= {id(t) for t in tree_leaves(value) if isinstance(t, Tensor)}
        arguments = tree_leaves((args, kwargs))
        if self.allocations is not None:
            assert name not in SYNCS, f"{name} in a captured step: the host would wait"
            self.trace.append((name, [self._describe(v) for v in arguments]))
        active = FakeCuda.active
        active.clock[active] = active.clock.get(active, 0) + 1
        if not func.is_view:
            self.operations += 1
            self.host_operations += self.allocations is None
            active.depth += 1
            for tensor in (v for v in arguments if isinstance(v, Tensor)):
                self._access(name, tensor, id(tensor) in writes_of_call, active)
            if FakeCuda.is_in_graph and torch.Tag.nondeterministic_seeded in func.tags:
                self._access(name, FakeCuda.default.state.device_copy, False, active)
        result = func(*args, **kwargs)
        for tensor in (v for v in tree_leaves(result) if isinstance(v, Tensor)):
            self.alive.append(tensor.untyped_storage())
            if not func.is_view and place(tensor) not in {place(v) for v in arguments if isinstance(v, Tensor)}:
                self.accesses[place(tensor)] = [Access(*span(tensor), True, active, active.clock[active])]
                if self.allocations is not None:
                    self.allocations[place(tensor)] = len(self.allocations)
        return result

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_written = any(access.is_write for access in self.accesses.get(place(value), ()))
        if not is_written and value.numel() < 64:
            return value.tolist()  # a constant of the code: new memory every time
        number = (self.allocations or {}).get(place(value))
        key = ("outside", value.data_ptr()) if number is None else ("inside", number)
        return (*key, tuple(value.shape), value.stride(), value.dtype)

    def _access(self, name: str, tensor: Tensor, is_write: bool, active: FakeStream) -> None:
        """Check an access against the accesses to overlapping memory, and store it."""
        begin, end = span(tensor)
        accesses, verb = self.accesses.setdefault(place(tensor), []), "writes" if is_write else "reads"
        for old in (old for old in accesses if old.begin < end and begin < old.end):
            if old.is_write or is_write:
                problem = "before it is sure to be written" if old.is_write else "while it may still be read"
                assert active.has_passed(old.stream, old.count), f"{name} {verb} {list(tensor.shape)} {problem}"
        access = Access(begin, end, is_write, active, active.clock[active])
        self.accesses[place(tensor)] = [*(old for old in accesses if not access.hides(old)), access]


@dataclass(frozen=True)
class Access:
    """An access to bytes of a storage: the operation of number `count` of a stream."""

    begin: int
    end: int
    is_write: bool
    stream: FakeStream
    count: int

    def hides(self, old: Access) -> bool:
        """Return True if an operation that is ordered after this access is also ordered after `old`."""
        covers = self.begin <= old.begin and old.end <= self.end
        return covers and (self.is_write or (not old.is_write and old.stream is self.stream))


def place(tensor: Tensor) -> int:
    """Return a number that identifies the storage of a tensor."""
    return tensor.untyped_storage().data_ptr()


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage between the first element of a tensor and its last one."""
    if not tensor.numel():
        return 0, 0
    last = sum(int((n - 1) * stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + last + 1) * size
