"""One contender in a process of its own: `python -m bench.fed.worker NAME WORKLOAD CHUNKS ROUNDS THREADS`; WORKLOAD is
JSON.

It gets ready, trains one chunk of rounds that nobody times, and then a chunk whenever a line comes in on standard
input, answering with the seconds of a round. After the last chunk it says the loss over all data and its peak memory.
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

# The module of each contender. It has `train(workload, rounds, tick, option) -> model`, which calls `tick()` after
# every round.
CONTENDERS = {
    "bare": ("bare", "tensors"),
    "bare-flat": ("bare", "flat"),
    "bare-channels-last": ("bare", "channels_last"),
    "flower": ("flower", ""),
    "pfl": ("apple", ""),
    "fedlab": ("fedlab_loop", ""),
    "fedjax": ("fedjax_loop", ""),
    "blazefl": ("blaze", ""),
    "fastsam-sequential": ("ours", "sequential"),
    "fastsam-threads": ("ours", "threads"),
    "fastsam-vmap": ("ours", "vmap"),
    "fastsam-streams": ("ours", "streams"),
    "fastsam-graph": ("ours", "graph"),
    "fastsam": ("ours", "auto"),
    "fastsam-ranks": ("ours", "sequential"),
    "fastsam-apart": ("ours", "sequential"),
}
PEERS = ("flower", "pfl", "fedlab", "fedjax", "blazefl")


class Chunks:
    """Counts rounds; at the end of each chunk reports its time and waits for the next order.

    wait: until the work of the chunk is done. meet: until all processes begin the next one.
    """

    def __init__(
        self,
        chunks: int,
        rounds: int,
        say: Callable[[Any], None],
        wait: Callable[[], None],
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.rounds, self.say, self.wait, self.meet, self.done, self.since = rounds, say, wait, meet, 0, 0.0
        self.total = (chunks + 1) * rounds

    def tick(self) -> None:
        self.done += 1
        if self.done % self.rounds:
            return
        self.wait()
        seconds = time.perf_counter() - self.since
        self.say("ready" if self.done == self.rounds else seconds / self.rounds)
        if self.done < self.total:
            if _first() and not sys.stdin.readline():
                raise SystemExit("the driver is gone")
            self.meet()
        self.since = time.perf_counter()


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

    import torch

    torch.set_num_threads(int(threads))
    workload = Workload(**json.loads(described))
    wait = torch.cuda.synchronize if workload.device == "cuda" else lambda: None
    meet = torch.distributed.barrier if torch.distributed.is_torchelastic_launched() else lambda: None
    if name == "fastsam-apart":
        wait = meet = apart()
    steps = Chunks(int(chunks), int(rounds), say, wait, meet)
    module, option = CONTENDERS[name]
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
