"""The data of all clients together, for baselines without a federation: algorithms with `pools_data`, such as
`Centralised_SGD`.

Such a run has the budget of a federated one with the same keywords. A round trains on `participation` of all samples,
`local_epochs` times in batches of `batch_size`. The pooled samples are shuffled once and cut into 1/participation
blocks of one size. The rounds take the blocks in turn, so every 1/participation rounds are `local_epochs` passes over
all samples. `sampler`, `available`, `weighting` and the split have no effect. The accuracy over clients is still
computed for the clients. Local momentum starts at zero in every round, as in any run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.population import Population
from fastsam.fed.common import seeds


def pool_data(population: Population, participation: float, seed: int) -> Population:
    """Return the population as `round(1/participation)` blocks of all samples (one sample each at least). With one
    block the order stays.

    Raises ValueError for samples that come in batches.
    """
    if population.batch_reason:
        raise ValueError(
            f"a centralised baseline pools pairs of tensors, and {population.batch_reason}; hand over one client that "
            f"holds all samples, with FedAvg()"
        )
    x, y = (torch.cat([pair[i] for pair in population.clients.pairs]) for i in (0, 1))
    blocks = min(max(1, round(1 / participation)), len(y))
    if blocks == 1:
        return replace(population, clients=PairClients([(x, y)]), priors=None)
    order = seeds.permutation(len(y), seed, "pool", 0).to(y.device)
    parts = [(x.index_select(0, part), y.index_select(0, part)) for part in order.tensor_split(blocks)]
    return replace(population, clients=PairClients(parts), priors=None)


def in_turn(blocks: int) -> Callable[[int, torch.Generator], list[int]]:
    """Return a sampler of block 0, 1, ..., and again from 0."""
    return lambda round, generator: [round % blocks]
