"""Flower's simulation: a server app, a client app, and its Ray backend with as many actors as processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.fed.bare import Tensors, batches
from bench.fed.workload import Workload

MODEL: dict[str, Any] = {}  # of an actor's process: client apps are functions


def client_app(workload: Workload) -> Any:
    """The app that trains one client; the model and the data stay in its process."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    client = ClientApp()

    @client.train()
    def _(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        if not MODEL:
            MODEL.update(model=workload.make_model(), data=workload.tensors())
        model = MODEL["model"]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        local = Tensors(model, sharp=False)
        x, y = MODEL["data"][int(context.node_config["partition-id"])]
        for batch in batches(x, y):
            local.step(*batch)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(content=RecordDict(content), reply_to=message)

    return client


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """option: none."""
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server, trained = ServerApp(), workload.make_model()

    class Ticking(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            done = super().aggregate_train(server_round, replies)
            tick()
            return done

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        share = workload.cohort / workload.clients
        strategy = Ticking(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=workload.clients)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(trained.state_dict()), num_rounds=rounds)
        trained.load_state_dict(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client_app(workload), workload.clients, backend_config=resources)
    return trained
