"""The parts of CUDA that the executors for GPUs need: streams that wait for each other, and captured graphs. Tests
replace them by a stand-in."""

from __future__ import annotations

import gc
import logging
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastsam.fed.executors.base import ClientError

log = logging.getLogger("fastsam.fed")

# Numbers of each thread of a kernel between two passes of a client, in the sequence of its seed. A pass draws fewer.
PASS_OFFSET = 2**20
MAX_GRAPHS = 32  # graphs of `Captures`


class CaptureError(RuntimeError):
    """Work could not be captured as a graph; the message and the cause say why. No graph can be captured in this
    process any more."""


class NumbersOnDevice(TorchFunctionMode):
    """Makes the tensors of `torch.tensor(number, device=...)` on the device. torch would copy the number from the host,
    and no capture can hold such a copy."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], (int, float)) and "device" in kwargs:
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


class Cuda:
    """Streams and graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)

    def current(self) -> torch.cuda.Stream:
        """Return the stream on which the caller works: its tensors are ready there."""
        return torch.cuda.current_stream(self.device)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Return a context whose work goes to `stream`."""
        return torch.cuda.stream(stream)

    def record_stream(self, tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
        """Keep the memory of tensors of another stream allocated until `stream` has used them."""
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextmanager
    def no_wait(self) -> Iterator[None]:
        """Raise RuntimeError inside where the host would wait for the device, because it reads a value."""
        old_value = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(old_value)

    def generator(self) -> torch.Generator:
        """Return the default generator of the device."""
        torch.cuda.init()
        return torch.cuda.default_generators[self.device.index or 0]

    def host_generator(self) -> torch.Generator:
        """Return the default generator of the host."""
        return torch.default_generator

    def is_capturing(self) -> bool:
        """Return True in a capture."""
        return torch.cuda.is_current_stream_capturing()

    def pool(self) -> Any:
        """Return a pool of memory for graphs that replay one after the other on one stream. Nothing that was allocated
        in a capture may be kept, because the next graph of the pool uses its memory."""
        return torch.cuda.graph_pool_handle()

    def capture(
        self,
        work: Callable[[], object],
        stream: torch.cuda.Stream,
        pool: Any = None,
        random_state: torch.Generator | None = None,
    ) -> torch.cuda.CUDAGraph:
        """Return a graph of `work`, which begins and ends on `stream`. Nothing of it is executed now.

        Args:
            work: the work.
            stream: where it is captured. Without other streams in `work` all replays run on one stream.
            pool: memory of the graph. None: a separate pool.
            random_state: state of a generator from which replays draw. Two replays at once need two states, because
                a replay writes seed and offset to the state's memory on the device. None: `work` does not draw.

        Raises:
            CaptureError: with the message of `work` or CUDA. A ClientError of `work` is raised as it is. Ending the
                capture then fails too, with a message that does not name the reason. torch's allocator and random
                numbers may stay in the failed capture, so the run ends.
        """
        graph, reason = torch.cuda.CUDAGraph(), cast(BaseException | None, None)
        # `torch.cuda.graph` would wait for the device and empty its caches, for each of many captures.
        with self.use(stream), _no_collection(), self._drawing_from(random_state), NumbersOnDevice():
            try:
                if random_state is not None:
                    graph.register_generator_state(random_state)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException as error:  # after an interrupt too the stream must not stay in a capture
                    reason = error
                graph.capture_end()
            except Exception as error:
                reason = reason or error
        if reason is None:
            return graph
        if isinstance(reason, ClientError) or not isinstance(reason, Exception):
            raise reason from reason.__cause__
        raise CaptureError(
            f"the step cannot be captured as a CUDA graph: {type(reason).__name__}: {reason}. Use "
            "executor='streams', in a new process: torch does not end a capture that failed"
        ) from reason

    @contextmanager
    def _drawing_from(self, random_state: torch.Generator | None) -> Iterator[None]:
        """Let operations inside draw from a state of the default generator."""
        if random_state is None:
            yield
            return
        generator = self.generator()
        old_state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(random_state)
        try:
            yield
        finally:
            generator.graphsafe_set_state(old_state)

    def set_captured_offset(self, seed: int, offset: int) -> None:
        """Set the offset of the next draws in a capture, from the offset at the replay.

        Args:
            seed: seed of the state at the capture.
            offset: a multiple of 4.
        """
        self.generator().set_state(torch.frombuffer(bytearray(struct.pack("<QQ", seed, offset)), dtype=torch.uint8))

    def repeats_draws(self) -> bool:
        """Return True if replays draw what eager kernels draw at the seed and the offset of a state, and a capture can
        set an offset in addition. Some versions of torch refuse it, or count otherwise."""
        generator, stream, state = self.generator(), self.stream(), self.generator().clone_state()
        numbers, seed = torch.empty(16, device=self.device), 7
        stream.wait_stream(self.current())
        old_state = generator.get_state()

        def work() -> None:
            self.set_captured_offset(seed, PASS_OFFSET)
            numbers.uniform_()

        try:
            state.manual_seed(seed)
            graph = self.capture(work, stream, None, state)
            state.manual_seed(seed + 1).set_offset(2 * PASS_OFFSET)
            with self.use(stream):
                graph.replay()
            self.current().wait_stream(stream)
            generator.manual_seed(seed + 1).set_offset(3 * PASS_OFFSET)
            return torch.equal(numbers, torch.empty_like(numbers).uniform_())
        except (CaptureError, RuntimeError) as error:
            log.info("captured steps cannot draw random numbers here: %s", error)
            return False
        finally:
            generator.set_state(old_state)

    def synchronize(self) -> None:
        """Wait for the device at the end of a run, before the run's graphs are released.

        All graphs of a run are released here together. The end of a graph frees its memory, which a queued replay
        still uses, and the workspaces of its stream's matrix products, which other graphs use (pytorch issue 193402).
        """
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:  # after a failed capture; the reason of the failure is raised elsewhere
            log.info("the device could not be waited for at the end of a run: %s", error)


class Captures:
    """Work of one run that is captured as graphs, by key: the first call of a key runs as it is, later ones replay.

    The work reads its inputs, an int64 tensor, and memory whose addresses stay. Graphs replay one after the other on
    one stream, so they share one pool.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.stream, self._pool = cuda, cuda.stream(), cuda.pool()
        self._graphs: dict[Hashable, tuple[Any, Tensor, object]] = {}  # graph, inputs, and references

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, inputs: Tensor, work: Callable[[Tensor], object], references: object) -> None:
        """Capture `work(inputs)`, which has run with inputs of this shape before: libraries set up on first use, and
        that cannot be captured. `references` stay alive with the graph. Raises CaptureError."""
        if len(self._graphs) == MAX_GRAPHS:
            return
        self.stream.wait_stream(self.cuda.current())
        fixed = inputs.clone()
        graph = self.cuda.capture(lambda: work(fixed), self.stream, self._pool)
        self.cuda.current().wait_stream(self.stream)
        self._graphs[key] = graph, fixed, references
        if len(self._graphs) == MAX_GRAPHS:
            log.warning(
                "%d sorts of steps are captured as CUDA graphs. Other sorts run one operation at a time, which is "
                "slower. Fewer batch sizes (drop_last=True) or slots make fewer sorts",
                MAX_GRAPHS,
            )

    def replay(self, key: Hashable, inputs: Tensor) -> None:
        """Replay the graph of a key with other inputs, of the same shape."""
        graph, fixed, _ = self._graphs[key]
        self.stream.wait_stream(self.cuda.current())
        with self.cuda.use(self.stream):
            fixed.copy_(inputs)
            graph.replay()
        self.cuda.current().wait_stream(self.stream)

    def release(self) -> None:
        """Release all graphs at the end of a run."""
        self.cuda.synchronize()
        self._graphs.clear()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector from freeing things of the device in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
