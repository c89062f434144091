"""Federated runs in forked processes that are killed, for tests/attack."""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsam import fed
from tests.helpers.fed_seam import Scaffold

EXIT_DIED = 9  # the exit code of a process that died at an operation on a file


def train(directory: Path, rounds: int = 9, delay: float = 0.0, dropout: float = 0.2, **options: Any) -> None:
    """Train with client states, dropout, averaged buffers, momentum, and a checkpoint in every second round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in (6, 8, 4, 10, 6)
    ]
    algorithm: Any = Scaffold(rho=0.1)
    fed.run(
        model, data, algorithm, rounds=rounds, local_epochs=2, batch_size=2, lr=0.05, lr_decay=0.9, participation=0.5,
        momentum=0.5,
        weighting="samples", test=data[0], buffers="average", run_dir=directory, resume=True, checkpoint_every=2,
        progress=lambda record: time.sleep(delay), **options,
    )  # fmt: skip


def digest(directory: Path) -> str:
    """Return a hash of the final model and of all metrics except times."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    records = [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]
    return hashlib.sha256((directory / "model.safetensors").read_bytes() + json.dumps(records).encode()).hexdigest()


def wait_for_fork(work: Callable[[], object]) -> int:
    """Fork a child that does `work` and exits with 0, or with 1 after an exception. Return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at_operation(directory: Path, count: int) -> int:
    """End just before the `count`-th operation on a file of the run directory.

    Return the number of operations if there were fewer.
    """
    operations = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") or isinstance(arguments[0], int):
            return
        path = str(arguments[0])
        if str(directory) in path or os.sep not in path:  # a bare name belongs to a folder that has a descriptor
            operations[0] += 1
            if operations[0] > count:
                os._exit(EXIT_DIED)

    sys.addaudithook(hook)
    train(directory, rounds=3)
    return operations[0]
