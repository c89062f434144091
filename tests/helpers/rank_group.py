"""Functions on several ranks of one machine, without a launcher.

The processes fork from a process that has imported torch, so that they start at once. A function takes its rank and the
arguments. The answer has, per rank, its result, or the exception as text.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fastsam.fed", "torch.distributed", "tests.helpers.fed_ranks"])


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any, patience: float = 60.0) -> list[Any]:
    """Return the result of `work(rank, *arguments)` on each rank; `work` must be a function of a module.

    Raise TimeoutError if a rank hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = [_context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _context.Process(target=_rank, args=(rank, size, f"{folder}/store", sender, work, arguments))
            for rank, (_, sender) in enumerate(answers)
        ]
        for process, (_, sender) in zip(processes, answers, strict=True):
            process.start()
            sender.close()
        try:
            return [_receive(receiver, patience) for receiver, _ in answers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(receiver: Any, patience: float) -> Any:
    if not receiver.poll(patience):
        raise TimeoutError(f"a rank said nothing for {patience} s")
    try:
        return receiver.recv()
    except EOFError:
        return "died"


def _rank(rank: int, size: int, store: str, sender: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        sender.send(work(rank, *arguments))
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}")
    if dist.is_initialized():
        dist.destroy_process_group()
