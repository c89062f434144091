"""Integer tickets that find the last program of a row to finish.

So one launch computes a row's partial sums and adds them up.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

COUNT = 1 << 16  # tickets per device


@triton.jit
def last_of_row(tickets, row, programs):
    """Return True in the program of the row that takes the last of `programs` tickets.

    It sees all stores of the row's other programs, and their reads are complete. The ticket is then 0 again, ready for
    the next launch or the next replay of a graph.
    """
    tl.debug_barrier()  # one thread takes the ticket, after the stores of the other threads
    ticket = tickets + row
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(ticket, 0)
    return last


class _Tickets:
    """The tickets of a device.

    Kernels that may run at the same time need separate tickets, and every captured graph needs separate ones too. Two
    calls that write the same output cannot run at the same time, so tickets are assigned by the output's address.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(COUNT, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once, because other streams use them too
        self._tickets: dict[tuple[int, int], Tensor] = {}
        self._num_used = 0

    def assign(self, output: Tensor, rows: int) -> Tensor | None:
        key = (output.data_ptr(), rows)
        if key not in self._tickets:
            if self._num_used + rows > COUNT:
                return None
            self._tickets[key] = self._memory[self._num_used : self._num_used + rows]
            self._num_used += rows
        return self._tickets[key]


_lock = threading.Lock()
_devices: dict[torch.device, _Tickets] = {}


def tickets_of(output: Tensor, rows: int) -> Tensor:
    """Return int32 `[rows]`, all 0, for a call that writes `output`.

    If the memory is used up, or the first call is in a graph's capture, the call gets new zeros, which costs one more
    small kernel.
    """
    device = output.device
    with _lock:
        if device not in _devices and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _devices[device] = _Tickets(device)
        tickets = _devices[device].assign(output, rows) if device in _devices else None
    return torch.zeros(rows, dtype=torch.int32, device=device) if tickets is None else tickets
