"""fastsam.fed.run, as a user calls it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from bench.fed.workload import BATCH, Workload
from fastsam import fed


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """Train with `fed.run` and return the model. `option` is the name of the executor."""
    algorithm = fed.algorithms.registry[workload.algorithm]()
    sampler = count_rounds(workload, tick) if dist.is_torchelastic_launched() else "fixed"
    return fed.run(
        workload.make_model(), workload.tensors(), algorithm, rounds=rounds, local_epochs=workload.epochs,
        batch_size=BATCH, lr=workload.lr, participation=workload.cohort / workload.clients, sampler=sampler,
        eval_every=rounds, slots=workload.slots, progress=lambda record: tick(), executor=option,
        **dict(workload.options),
    ).model  # fmt: skip


def count_rounds(workload: Workload, tick: Callable[[], None]) -> Callable[[int, torch.Generator], list[int]]:
    """Return a sampler that counts rounds on all ranks, because `progress` is called only on the first rank."""

    def sample(round: int, generator: torch.Generator) -> list[int]:
        if round and dist.get_rank():
            tick()
        return torch.randperm(workload.clients, generator=generator)[: workload.cohort].tolist()

    return sample
