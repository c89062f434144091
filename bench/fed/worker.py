"""One contender in a process of its own: `python -m bench.fed.worker NAME WORKLOAD CHUNKS ROUNDS THREADS`; WORKLOAD is
JSON.

It gets ready and trains one chunk of rounds whose time does not count, and then a chunk whenever a line comes in on
standard input, answering with the seconds of a round. After the last chunk it says the loss over all data and its peak
memory.
Answers go to the standard output's own file descriptor; whatever the libraries print goes to standard error. Several
processes of a launcher (torchrun) begin every chunk together; rank 0 hears and speaks.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.fed.workload import Workload

# The modules of the other simulators. A contender is named MODULE:OPTION. Its module has `train(workload, rounds, tick,
# option) -> model`, which calls `tick()` after every round.
PEERS = {"flower": "flower", "pfl": "apple", "fedlab": "fedlab_loop", "fedjax": "fedjax_loop", "blazefl": "blaze"}
APART = "apart"  # at the end of a name: the processes of a launcher share nothing


class Chunks:
    """Counts rounds; at the end of each chunk reports the seconds of a round and waits for the next order.

    order: returns when the next chunk may begin. wait: returns when the work of the chunk is done.
    """

    def __init__(
        self, chunks: int, rounds: int, say: Callable[[float], None], order: Callable[[], None],
        wait: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.rounds, self.say, self.order, self.wait, self.clock = rounds, say, order, wait, clock
        self.total, self.done, self.since = chunks * rounds, 0, clock()

    def tick(self) -> None:
        self.done += 1
        if self.done % self.rounds or self.done > self.total:
            return
        self.wait()
        self.say((self.clock() - self.since) / self.rounds)
        if self.done < self.total:
            self.order()
        self.since = self.clock()


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def apart() -> Callable[[], None]:
    """Makes strangers of a launcher's processes: each is one alone from now on. Returns what waits until all of them
    are there."""
    from torch import distributed

    store, _, size = next(distributed.rendezvous("env://"))
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    numbers = itertools.count()

    def meet() -> None:
        key = f"chunk {next(numbers)}"
        if store.add(key, 1) == size:
            store.set(f"{key}, all", "")
        store.wait([f"{key}, all"])

    return meet


def main() -> None:
    name, described, chunks, rounds, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: Any) -> None:
        if _first():
            print(json.dumps(what), file=answers, flush=True)

    def order() -> None:
        if _first() and not sys.stdin.readline():
            raise SystemExit("the driver is gone")
        meet()

    import torch

    torch.set_num_threads(int(threads))
    workload = Workload(**json.loads(described))
    module, option, *more = name.split(":")
    wait = lambda: None  # noqa: E731
    meet = torch.distributed.barrier if torch.distributed.is_torchelastic_launched() else wait
    if more == [APART]:
        wait = meet = apart()
    steps = Chunks(int(chunks) + 1, int(rounds), say, order, wait)
    trained = importlib.import_module(f"bench.fed.{module}").train(workload, steps.total, steps.tick, option)
    peak = peak_mib()  # before the loss over all data, which takes more than the CNN's training
    say({"loss": workload.loss_of(trained), "peak_mib": round(peak, 1)})


def peak_mib() -> float:
    """The most memory that this program had. Not `ru_maxrss`: that begins with the memory of the process that started
    this one."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
