"""One rank of a run: `torchrun --nproc-per-node N -m tests.helpers.fed_ranks DIR [KEYWORD=VALUE ...]`; rank 0 prints a
hash per algorithm.

KEYWORDS: rounds, algorithms (comma-separated, of `ALGORITHMS`), executor, slots, resume, die=RANK:ROUND (that rank
kills itself then).
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import digest

ALGORITHMS = {
    "fedsam": fed.FedSAM(rho=0.05),
    "scaffold": fed.SCAFFOLD(),
    "fedsmoo": fed.FedSMOO(rho=0.05),
    "fedlesam-d": fed.FedLESAM_D(rho=0.05),
}
SIZES = (7, 16, 1, 23, 12, 9, 4, 30, 5, 11)
TIMES = ("seconds", "seconds_training")


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
    keywords: dict[str, Any] = {k: v if k == "executor" else json.loads(v) for k, v in options.items() if k != "die"}
    if "die" in options:
        rank, at = map(int, options["die"].split(":"))
        if int(os.environ["RANK"]) == rank:
            keywords["loss"] = dies_in(at)
    for name in names:
        made = train(name, Path(sys.argv[1]), **keywords)
        if os.environ.get("RANK", "0") == "0":
            print(name, made, flush=True)


def dies_in(steps: int) -> Any:
    """Cross-entropy, and the end of the process at its call number `steps`."""
    calls = [0]

    def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(output, target)

    cross_entropy.__module__, cross_entropy.__qualname__ = "torch.nn.functional", "cross_entropy"
    return cross_entropy


if __name__ == "__main__":
    main()
