"""Does a round take longer when more clients have states? SCAFFOLD, a hundred clients a round:
`python -m bench.states [CLIENTS ...]`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fastsam import fed

COHORT, ROUNDS, FEATURES = 100, 12, 8


def seconds(clients: int, run_dir: str | None, where: str = "auto") -> float:
    """Of the shortest round, and the checkpoint after it, once everybody has a state."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 2, FEATURES, generator=generator)
    y = torch.randint(0, 3, (clients, 2), generator=generator)

    def sampler(round: int, generator: torch.Generator) -> Sequence[int]:
        some = torch.randint(0, clients, (COHORT,), generator=generator).unique()
        return range(clients) if round == 0 else some.tolist()

    ends: list[float] = []

    def note(record: dict[str, Any]) -> None:
        ends.append(time.perf_counter())

    pairs = list(zip(x.unbind(), y.unbind(), strict=True))
    fed.run(
        nn.Linear(FEATURES, 3), pairs, fed.SCAFFOLD(), rounds=ROUNDS, sampler=sampler, executor="vmap", batch_size=2,
        run_dir=run_dir, progress=note, client_state=where,
    )  # fmt: skip
    return min(later - earlier for earlier, later in pairwise(ends[2:]))


def main() -> None:
    print("| clients with states | a round | on disk | with a checkpoint after it |\n|---|---|---|---|")
    for clients in [int(word) for word in sys.argv[1:]] or [1_000, 10_000, 100_000]:
        with tempfile.TemporaryDirectory() as folder:
            found = [seconds(clients, None), seconds(clients, None, "disk"), seconds(clients, f"{folder}/run")]
        print(f"| {clients:,} | " + " | ".join(f"{1e3 * value:.0f} ms" for value in found) + " |")


if __name__ == "__main__":
    main()
