"""One contender in a separate process: `python -m bench.fed.worker NAME WORKLOAD CHUNKS ROUNDS THREADS`; WORKLOAD is
JSON.

It gets ready and trains one chunk of rounds whose time does not count. For each line on standard input it trains a
chunk and answers with the seconds of a round. For the line after the last chunk it computes the loss over all data and
reports it with the peak memory: earlier it would take the core of contenders that still train. Several processes of a
launcher (torchrun) begin every chunk together; rank 0 reads and answers.
"""

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.fed.process import answers
from bench.fed.workload import Workload

# A contender is named MODULE:OPTION or MODULE:OPTION:MODE. Its module has `train(workload, rounds, tick, option) ->
# model`, which calls `tick()` after every round, and may have `loss_of(workload, model)` in place of the workload's.
APART = "apart"  # a mode: the processes of a launcher share nothing
CPU_TIME = "cpu"  # a mode: the clock is the CPU time of the process


class Chunks:
    """Counts rounds; at the end of each chunk reports the seconds of a round and waits for the next order.

    Args:
        order: function that returns when the next chunk may begin, or after the last one when all have ended theirs.
        wait: function that returns when the work of the chunk is done.
    """

    def __init__(
        self, chunks: int, rounds: int, say: Callable[[float], None], order: Callable[[], None],
        wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.rounds, self.say, self.order, self.wait, self.clock = rounds, say, order, wait, clock
        self.total, self.num_done, self.since = chunks * rounds, 0, clock()

    def tick(self) -> None:
        """Note the end of a round."""
        self.num_done += 1
        if self.num_done % self.rounds or self.num_done > self.total:
            return
        self.wait()
        self.say((self.clock() - self.since) / self.rounds)
        self.order()
        self.since = self.clock()


def separate_processes() -> Callable[[], None]:
    """Make a launcher's processes independent. Return a function that waits until all processes have called it."""
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
    name, description, chunks, rounds, threads = sys.argv[1:]
    first, answer = os.environ.get("RANK", "0") == "0", answers()

    def say(message: Any) -> None:
        if first:
            answer(message)

    def order() -> None:
        if first and not sys.stdin.readline():
            raise SystemExit("the driver is gone")
        meet()

    import torch

    torch.set_num_threads(int(threads))
    workload = Workload(**json.loads(description))
    module, option, *modes = name.split(":")
    meet = wait = int  # which does nothing
    if modes == [APART]:
        wait = meet = separate_processes()
    elif torch.distributed.is_torchelastic_launched():
        meet = torch.distributed.barrier
    clock = time.process_time if modes == [CPU_TIME] else time.perf_counter
    contender = importlib.import_module(f"bench.fed.{module}")
    steps = Chunks(int(chunks) + 1, int(rounds), say, order, wait, clock)
    first, since = dict[str, float](), time.process_time()

    def tick() -> None:
        # CPU time, because all contenders begin at once. It has the model, the data and all preparations.
        first.setdefault("first", time.process_time() - since)
        steps.tick()

    model = contender.train(workload, steps.total, tick, option)
    peak = peak_mib()  # before the loss over all data, which takes more than the CNN's training
    loss_of = getattr(contender, "loss_of", Workload.loss_of)
    facts = {"loss": loss_of(workload, model), "peak_mib": round(peak, 1)}
    say(facts if module == "peers" else facts | first)  # some simulators train in other processes


def peak_mib() -> float:
    """Return the largest memory of this program in MiB, without the starting process's that `ru_maxrss` has."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
