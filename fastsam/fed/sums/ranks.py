"""Several processes for one run: each cohort is divided among the ranks, and their sums are added once a round.

    torchrun --nproc-per-node 2 -m fastsam run experiment.toml

Sums are integers (`aggregate`), so the bits do not depend on the number of ranks. All ranks sample the same cohort,
divide it by the same rule, and take the same server step. Several ranks may share a GPU. Their sums go over the CPU,
because NCCL refuses two ranks on one GPU. Rank 0 evaluates, writes and logs. A client's state is kept
by the rank that trained it last, its owner. The state moves when another rank trains the client.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
State = dict[str, Tensor]

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
# torchrun opens the store before it starts a rank. A rank that does not find it has lost its launcher.
_MEETING = timedelta(minutes=1)
_TIMEOUT = timedelta(minutes=30)  # longest wait for the slowest rank of a round


class RankError(RuntimeError):
    """The ranks cannot work together: one has died, or they were started in different ways."""


class Ranks:
    """The processes of a run. `Ranks()` is a single process and costs nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """True on rank 0, which evaluates, writes and logs."""
        return self.rank == 0

    def assign(self, active: Sequence[int], work: Mapping[int, int], owner_ranks: Mapping[int, int]) -> dict[int, int]:
        """Return the rank of each client of a round. The longest work is assigned first, to the rank with the least
        work, and among equals to the owner of the client's state."""
        loads, assignment = [0] * self.size, {}
        for i in sorted(active, key=lambda i: (-work[i], i)):
            least, owner = min(loads), owner_ranks.get(i, 0)
            assignment[i] = rank = owner if loads[owner] == least else loads.index(least)
            loads[rank] += work[i]
        return assignment

    def move_states(
        self,
        states: Mapping[int, State],
        assignment: Mapping[int, int],
        owner_ranks: Mapping[int, int],
        adopt: Callable[[Tensor], Tensor],
    ) -> dict[int, State]:
        """Return the states of this rank after every client of `assignment` moved to its rank; collective. `adopt`
        returns a tensor in this rank's storage from one on the CPU."""
        result = dict(states)
        for i, target in sorted(assignment.items()):
            owner = owner_ranks.get(i, target)
            if owner == target:
                continue
            if self.rank == owner:
                self._send(result.pop(i), target)
            elif self.rank == target:
                result[i] = {name: adopt(t) for name, t in self._receive(owner).items()}
        return result

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise RankError if the ranks were not called with the same `facts`; collective."""
        first, *other_facts = self.gather(dict(facts))
        for rank, rank_facts in enumerate(other_facts, 1):
            different = [key for key in {**first, **rank_facts} if first.get(key) != rank_facts.get(key)]
            if different:
                raise RankError(
                    f"all ranks must have the same options, but {different[0]!r} differs between ranks 0 and {rank}. "
                    "A model needs the same weights in all ranks: call torch.manual_seed before you make it"
                )

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; collective. Raises RankError if a rank has died."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _rank_errors():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0; collective. Raises RankError if a rank has died."""
        if self.size == 1:
            return value
        values = [value]
        with _rank_errors():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def add_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor (int64, the same shapes on all ranks) by its sum over the ranks, with one all-reduce of
        one buffer."""
        if self.size == 1 or not tensors:
            return
        buffer = torch.cat([t.flatten() for t in tensors])
        buffer = buffer.to(sum_device(buffer.device))
        with _rank_errors():
            dist.all_reduce(buffer)
        for t, part in zip(tensors, buffer.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))

    def _send(self, state: State, target: int) -> None:
        with _rank_errors():
            # Copies, because for a view the whole storage would be sent.
            dist.send_object_list([{name: t.detach().to("cpu", copy=True) for name, t in state.items()}], dst=target)

    def _receive(self, source: int) -> State:
        values: list[Any] = [None]
        with _rank_errors():
            dist.recv_object_list(values, src=source)
        return values[0]


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Yield the ranks of this run: of the process group that exists, or of the launcher (`torchrun`) of this process.

    A rank that leaves with an error destroys the process group, so that the other ranks end too and do not wait.
    """
    if not in_group():
        if launched_processes() == 1:
            yield Ranks()
            return
        _start()
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    except BaseException:
        _leave_group()  # unless one inside has left already
        raise


def launched_processes() -> int:
    """Return the number of processes that the launcher started, from WORLD_SIZE; 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise RankError(f"WORLD_SIZE must be the number of processes, got {text!r}; start them with torchrun")
    return int(text)


def local_device() -> torch.device:
    """Return the GPU of this process on its machine, by the launcher's LOCAL_RANK. More ranks than GPUs share them in
    turn."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))


def ranks_per_device() -> int:
    """Return the largest number of ranks of this machine that share a GPU, by the launcher's LOCAL_WORLD_SIZE."""
    return -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // max(1, torch.cuda.device_count()))


def sum_device(device: torch.device) -> torch.device:
    """Return the device on which the process group adds tensors of `device`: the CPU if the group has no backend for
    them."""
    return device if device.type in dist.get_backend_config() else torch.device("cpu")


def in_group() -> bool:
    """Return True if this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def _start() -> None:
    """Join the process group of a launcher."""
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise RankError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(absent)} is not set; start the processes with "
            "torchrun, or unset WORLD_SIZE for a single process"
        )
    if torch.cuda.device_count():
        torch.cuda.set_device(local_device())
    torchrun = dist.is_torchelastic_launched()
    if torchrun:
        _end_with_launcher()
    store, rank, size = next(dist.rendezvous("env://", timeout=_MEETING if torchrun else _TIMEOUT))
    store.set_timeout(_TIMEOUT)
    try:
        dist.init_process_group(backends(store, rank, size), store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    except RuntimeError as error:
        raise RankError(
            f"the ranks have met, but cannot connect to each other ({error}). If a machine's name stands for "
            "127.0.0.1, name its network: GLOO_SOCKET_IFNAME=eth0 (and NCCL_SOCKET_IFNAME), as `ip addr` shows it"
        ) from error
    atexit.register(_leave_group)


def backends(store: dist.Store, rank: int, size: int) -> str:
    """Return the backends of the process group, the same on all ranks; collective.

    CPU tensors (and Python objects) go over gloo, CUDA tensors over NCCL. If two ranks share a GPU, or a rank has none,
    there is only gloo.
    """
    device = f"{socket.gethostname()} {local_device().index}" if torch.cuda.device_count() else ""
    store.set(f"device of rank {rank}", device)
    devices = [store.get(f"device of rank {other_rank}").decode() for other_rank in range(size)]
    return "cpu:gloo,cuda:nccl" if all(devices) and len(set(devices)) == size else "cpu:gloo"


def _end_with_launcher() -> None:
    """Let the system end this rank when its launcher dies. A launcher that is killed cannot end its ranks, which would
    train on next to a resumed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave_group() -> None:
    if in_group():
        dist.destroy_process_group()


@contextmanager
def _rank_errors() -> Iterator[None]:
    """Raise errors of a collective with words that a user can act on."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"a rank of this run has died or was stopped ({str(error).splitlines()[0]}). Look at its log; the run "
            "directory holds the last checkpoint, which any number of ranks can resume"
        ) from error
