"""Storage of clients' states between their rounds (`c_i`, `h_i`, `mu_i`, `w_old_i`): on the run's device or in host
memory.

`RunState.clients` (rundir/checkpoint.py) maps a client to its state. The store determines what kind of tensors these
are. A cohort (loop/cohort.py) reads a state with `get` and stores the new one with `put`. Nothing in a RunState is
written again, so a round that is interrupted leaves the state before it intact.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.loop.host_pool import HostPool
from fastsam_kernels.weak_tensors import WeakTensorMap

log = logging.getLogger("fastsam.fed")

CHOICES = ("auto", "host", "device")
SHARE = 0.25  # largest share of the device's memory for the states of all clients, by the rule of "auto"
HOST_SHARE = 0.5  # largest share of the host's memory without a warning
TOO_LARGE = (
    "the states of all clients take %.0f bytes when all have taken part, more than half of the host's memory of %d "
    "bytes. If memory runs out, use fewer clients, a smaller model, or an algorithm without states of clients"
)
_MIN_PREFETCHED = 4  # smallest number of states that are fetched early

State = dict[str, Tensor]
States = Mapping[int, State]


class ClientStateStorage:
    """A store of clients' states, which keeps them as the algorithm made them, on the device of the run.

    `reason` says for the record why the states are at `location`. A store that prefetches can use the clients of the
    next round.
    """

    location = "device"
    prefetches = False

    def __init__(self, device: torch.device, reason: str) -> None:
        self.device, self.reason = device, reason

    def begin(self, states: States, order: Sequence[int], next_cohort: Iterable[int]) -> None:
        """Begin a round, in which the states of clients in `order` will be read. `next_cohort` is likely."""

    def get(self, client: int, state: State) -> State:
        """Return the state of `client` for its work, on the device. It is called on the stream on which the work is
        then queued."""
        return state

    def put(self, client: int, state: State) -> State:
        """Store the new state of `client` and return the form in which RunState keeps it."""
        return state

    def commit(self) -> None:
        """End the round. After it returns, all results of `put` can be read from anywhere."""

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a RunState from a tensor on the CPU, which came from a file or another rank."""
        return tensor.to(self.device)


@dataclass(frozen=True)
class PrefetchedState:
    """A copy on the device of `source`, whole when `ready` is."""

    source: State
    state: State
    ready: torch.cuda.Event


class HostStateStorage(ClientStateStorage):
    """States are tensors in pinned host memory. They are copied to the device when they are needed, and at most
    `num_prefetched` states earlier.

    All copies in both directions use one separate stream. Therefore host memory is written only after earlier
    reads, and read only after it is written, without further waits. The host waits for copies only at the end of a
    round. The device holds the states of the clients that train, and `num_prefetched` more states: first of the cohort,
    and at its end of the next cohort. The state of a client in both cohorts is fetched again when its new state
    exists. A tensor that several states share (a past model) is copied once and stays shared.
    """

    location = "host"
    prefetches = True

    def __init__(self, device: torch.device, reason: str, num_prefetched: int) -> None:
        super().__init__(device, reason)
        self.num_prefetched = num_prefetched
        self.cuda, self.pool = Cuda(device), HostPool()
        self.stream = self.cuda.stream()
        self._entries: dict[int, PrefetchedState] = {}
        self._queue: dict[int, State] = {}  # to be fetched, in this order
        self._repeated_clients: set[int] = set()  # clients of this cohort and the next
        self._host_copies: WeakTensorMap[Tensor] = WeakTensorMap()  # device tensor -> host copy
        self._device_copies: WeakTensorMap[weakref.ref[Tensor]] = WeakTensorMap()  # host tensor -> device copy
        self._has_new_states = False

    def begin(self, states: States, order: Sequence[int], next_cohort: Iterable[int]) -> None:
        cohort_ids, next_cohort = set(order), list(next_cohort)
        self._entries = {i: f for i, f in self._entries.items() if i in cohort_ids and states.get(i) is f.source}
        client_ids = [*(i for i in order if i not in self._entries), *(i for i in next_cohort if i not in cohort_ids)]
        self._queue = {i: states[i] for i in client_ids if i in states}
        self._repeated_clients = cohort_ids.intersection(next_cohort)
        self._fetch_ahead()

    def get(self, client: int, state: State) -> State:
        self._queue.pop(client, None)
        entry = self._entries.pop(client, None)
        if entry is None:
            entry = self._fetch(state)
        current = self.cuda.current()
        current.wait_event(entry.ready)
        self.cuda.record_stream([t for t in entry.state.values() if self._is_on_host(t)], current)
        self._fetch_ahead()
        return entry.state

    def put(self, client: int, state: State) -> State:
        self.stream.wait_stream(self.cuda.current())
        with self.cuda.use(self.stream):
            copies = {name: self._to_host(t) for name, t in state.items()}
        self._has_new_states = True
        if client in self._repeated_clients:
            self._queue[client] = copies
        self._fetch_ahead()
        return copies

    def commit(self) -> None:
        if self._has_new_states:
            self.stream.synchronize()
            self._has_new_states = False

    def adopt(self, tensor: Tensor) -> Tensor:
        self.stream.synchronize()  # the host writes now: nothing may still be read of a row that is used again
        return self.pool.row(tensor.shape, tensor.dtype).copy_(tensor)

    def _fetch_ahead(self) -> None:
        while self._queue and len(self._entries) < self.num_prefetched:
            client = next(iter(self._queue))
            self._entries[client] = self._fetch(self._queue.pop(client))

    def _fetch(self, state: State) -> PrefetchedState:
        with self.cuda.use(self.stream):
            copies = {name: self._to_device(t) for name, t in state.items()}
        return PrefetchedState(state, copies, self.stream.record_event())

    def _to_device(self, tensor: Tensor) -> Tensor:
        if not self.pool.holds(tensor):
            return tensor  # the algorithm keeps it on the CPU
        reference = self._device_copies.get(tensor)
        copy = None if reference is None else reference()
        if copy is None:
            copy = torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)
            self._device_copies.set(tensor, weakref.ref(copy))
            self._host_copies.set(copy, tensor)
        return copy

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._is_on_host(tensor):
            return tensor
        host_copy = self._host_copies.get(tensor)
        if host_copy is None:
            host_copy = self.pool.row(tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)
            self.cuda.record_stream([tensor], self.stream)
            self._host_copies.set(tensor, host_copy)
        return host_copy

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type


def make(location: str, device: torch.device, nbytes: float, num_prefetched: int) -> ClientStateStorage:
    """Return the store for `location` (one of `CHOICES`). The bits of a run do not depend on it.

    "auto" is a rule on the size of all clients' states (`nbytes`) and not on free memory. States are on the device if
    they take at most `SHARE` of its memory, else on the host. On the CPU device and host are the same. A warning says
    if they take more than `HOST_SHARE` of the host's memory.
    """
    reason = "it was asked for"
    if location == "auto":
        location, reason = _place(device, nbytes)
    log.info("client states: %s, %s", location, reason)
    is_on_host = location == "host" or not has_separate_memory(device)
    if is_on_host and nbytes > HOST_SHARE * host_memory():
        log.warning(TOO_LARGE, nbytes, host_memory())
    if not has_separate_memory(device):
        return ClientStateStorage(device, "the device of the run is the CPU, whose memory is host memory")
    if location == "device":
        return ClientStateStorage(device, reason)
    return HostStateStorage(device, reason, max(num_prefetched, _MIN_PREFETCHED))


def _place(device: torch.device, nbytes: float) -> tuple[str, str]:
    """Return the place of `nbytes` bytes of states by the rule, and the reason. The states of all ranks count, so that
    ranks may share a device."""
    if not has_separate_memory(device):
        return "host", "the device of the run is the CPU"
    share = nbytes / total_memory(device)
    reason = f"the states of all clients take {share:.3g} of the device's memory, {SHARE:g} is the limit"
    return "device" if share <= SHARE else "host", reason


def vectors(algorithm: Algorithm, server: State) -> float:
    """Return the number of vectors, of the size of "w", of a client's first state."""
    return sum(t.nbytes for t in algorithm.init_client(server).values()) / max(server["w"].nbytes, 1)


def has_separate_memory(device: torch.device) -> bool:
    """Return True if the device has separate memory."""
    return device.type == "cuda"


def total_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory, used or free."""
    return torch.cuda.get_device_properties(device).total_memory


def host_memory() -> int:
    """Return the bytes of the host's memory, used or free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class StateRows(NamedTuple):
    """The states of clients with equal structure, one by one and as rows.

    Args:
        states: the states.
        rows: the states as one, `[n, ...]`. A tensor that all of them share is not copied.
    """

    states: Sequence[State]
    rows: State

    @classmethod
    def of(cls, states: Sequence[State]) -> StateRows:
        """Return states as rows."""
        columns = {name: [state[name] for state in states] for name in states[0]}
        rows = {
            name: xs[0].expand(len(xs), *xs[0].shape) if all(t is xs[0] for t in xs) else torch.stack(xs)
            for name, xs in columns.items()
        }
        return cls(states, rows)

    def take(self, places: Sequence[int]) -> StateRows:
        """Return the states at some places, of which a place may come several times."""
        if len(places) == len(self.states) and all(map(eq, places, count())):
            return self
        rows = {
            name: x[:1].expand(len(places), *x.shape[1:]) if x.stride(0) == 0 or len(x) == 1 else x[places]
            for name, x in self.rows.items()
        }
        return StateRows([self.states[place] for place in places], rows)


def group_by_shape(states: Sequence[State]) -> list[list[int]]:
    """Return the places of states that can be rows of one: with the same names, shapes and dtypes."""
    groups: dict[object, list[int]] = {}
    for i, state in enumerate(states):
        groups.setdefault(tuple([(name, t.shape, t.dtype) for name, t in state.items()]), []).append(i)
    return list(groups.values())
