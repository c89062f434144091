"""One rank of a run: `torchrun --nproc-per-node N -m tests.helpers.fed_ranks DIR [KEYWORD=VALUE ...]`; rank 0 prints a
hash per algorithm.

KEYWORDS: rounds, algorithms (comma-separated, of `ALGORITHMS`), executor, slots, resume.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import cross_entropy_until, digest

ALGORITHMS = {
    "fedsam": fed.FedSAM(rho=0.05),
    "scaffold": fed.SCAFFOLD(),
    "fedsmoo": fed.FedSMOO(rho=0.05),
    "fedlesam-d": fed.FedLESAM_D(rho=0.05),
}
SIZES = (7, 16, 1, 23, 12, 9, 4, 30, 5, 11)


def train(name: str, directory: Path | None, **options: Any) -> str:
    clients = oracle.ragged_clients(torch.float32, SIZES)
    keywords: dict[str, Any] = {"rounds": 4, "batch_size": 5, "participation": 0.6, "weighting": "samples"}
    keywords |= {"executor": "sequential"} | options
    run_dir = None if directory is None else directory / name
    torch.manual_seed(0)
    model = oracle.smooth_model(torch.float32)
    return digest(fed.run(model, clients, ALGORITHMS[name], run_dir=run_dir, test=clients[0], **keywords))


def main() -> None:
    options = dict(pair.split("=", 1) for pair in sys.argv[2:])
    names = options.pop("algorithms", ",".join(ALGORITHMS)).split(",")
    keywords: dict[str, Any] = {k: v if k == "executor" else json.loads(v) for k, v in options.items()}
    for name in names:
        digest_of_run = train(name, Path(sys.argv[1]), **keywords)
        if os.environ.get("RANK", "0") == "0":
            print(name, digest_of_run, flush=True)


def deadly_loss(number: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that kills its process in its call of this number."""
    return cross_entropy_until(number, lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    main()
