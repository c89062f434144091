"""Refusals of the executors and of optimizers of torch, with their messages."""

from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR

from fastsam import fed
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import norm_model, run


class Later(fed.Algorithm):
    """Weights that are shifted from the second round on."""

    def local_step(self, server: Any, client: Any, round: fed.Round) -> fed.Step:
        return fed.Step() if round.index == 0 else fed.Shifted(rho=0.1, e=server["w"])


ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def rateless(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose rate is its own."""
    return torch.optim.SGD(params, lr=0.1)


def run_optimizer(algorithm: Any = None, executor: str = "sequential", **options: Any) -> None:
    plain = {"momentum": 0.0, "weight_decay": 0.0, "optimizer": "AdamW"}
    run(algorithm or fed.FedAvg(), executor, **plain | options)


test_refused = refusals(
    # a loop of an algorithm
    (lambda: run(fed.FedRobust(), "vmap", 3), "FedRobust trains each client in a loop of its own"),
    # no GPU
    (lambda: run(fed.FedAvg(), "streams", device="cpu"),
     "executor 'streams' cannot serve here: it runs on CUDA devices.*CPU"),
    (lambda: run(fed.FedAvg(), "graph", device="cpu"),
     "executor 'graph' cannot serve here: it runs on CUDA devices.*CPU"),
    # buffers without a word on them
    (lambda: run(fed.FedAvg(), "sequential", model=norm_model()),
     r"1\.running_mean.*buffers='average'.*'keep'.*'local'.*GroupNorm"),
    # optimizers of torch
    (lambda: run_optimizer(optimizer="Adamw"), r"optimizer must be a class of torch.optim .*did you mean 'AdamW'"),
    (lambda: run_optimizer(optimizer=3), "optimizer must be a class of torch.optim or its name"),
    (lambda: run_optimizer(momentum=0.9), "momentum, weight_decay and clip_norm at their defaults.* momentum=0.9"),
    (lambda: run_optimizer(clip_norm=1.0), "clip_norm=1.0. Put them into the optimizer"),
    (lambda: run_optimizer(optimizer=ADAMW, lr=0.1), r"lr=0.1 .*optimizer has lr=0.001.*Leave out one"),
    (lambda: run_optimizer(optimizer=ADAMW, lr="0.001/round"), r"lr='0.001/round' .*optimizer has lr=0.001"),
    (lambda: run_optimizer(optimizer=ADAMW, lr=lambda t: 0.001), "optimizer has lr=0.001"),
    (lambda: run_optimizer(optimizer=ADAMW, lr=fed.TorchSchedule(0.001, lambda o: StepLR(o, 1))), "lr=0.001"),
    (lambda: run_optimizer(optimizer=partial(torch.optim.AdamW, lr=0.0)), "lr of the optimizer must be .* > 0"),
    (lambda: run_optimizer(optimizer=rateless, lr=0.1), "lr=0.1 needs an optimizer that takes lr.*rateless"),
    (lambda: run_optimizer(optimizer=rateless, lr_decay=0.9), "lr_decay=0.9 needs .*rateless"),
    # optimizers that the kernels do not have
    (lambda: run_optimizer(executor="vmap", optimizer="Adadelta"),
     "'vmap' cannot serve here: it serves the optimizers SGD, Adam, AdamW, Adagrad, RMSprop and Lion"),
    (lambda: run_optimizer(fed.FedLESAM()), "weights that shrink by themselves, .*the steps of FedLESAM are at"),
    (lambda: run_optimizer(Later(), optimizer="Adadelta"), "weights that are shifted for the whole round need one of"),
)  # fmt: skip
