"""BlazeFL's own FedAvg (`blazefl.contrib`): its server, and its thread pool of clients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.fed.workload import BATCH, LR, Workload


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """option: none. As many clients at a time as torch has threads, one each: faster than one after the other with all
    of them."""
    from blazefl import contrib

    slots = torch.get_num_threads()
    torch.set_num_threads(1)
    start, sets = workload.make_model(), [TensorDataset(x, y) for x, y in workload.tensors()]

    class Data:
        def get_dataset(self, type_: str, cid: int) -> Dataset[Any]:
            return sets[cid]

        def set_dataset(self, type_: str, cid: int, dataset: Dataset[Any]) -> None:
            raise NotImplementedError("nobody writes to the clients' data here")

        def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: torch.Generator) -> DataLoader[Any]:
            return DataLoader(sets[cid], batch_size=batch_size, shuffle=True, generator=generator)

    class Models:
        def select_model(self, model_name: str) -> nn.Module:
            return copy.deepcopy(start)

    shared = {"model_selector": Models(), "model_name": "", "dataset": Data(), "device": workload.device, "seed": 0}
    local = {"num_clients": workload.clients, "epochs": 1, "batch_size": BATCH, "lr": LR}
    ratio = workload.cohort / workload.clients
    server = contrib.FedAvgBaseServerHandler(
        **shared, global_round=rounds, num_clients=workload.clients, sample_ratio=ratio, batch_size=BATCH
    )
    trainer = contrib.FedAvgThreadPoolClientTrainer(**shared, **local, num_parallels=slots)
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        tick()
    return server.model
