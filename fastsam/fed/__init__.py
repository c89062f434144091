"""Federated learning on the kernels of fastsam: one call, `run`, any model, any clients, algorithms of one file each.

    from fastsam import fed

    data = fed.digits(clients=50, alpha=0.3)
    result = fed.run(model, data, fed.FedSAM(rho=0.05), rounds=50)
    result.model, result.history, result.summary()

Where to read on:

    plain.py                     FedAvg and FedSAM in fifty lines of plain torch
    loop/run.py                  `run`: checks, a trial, the rounds, the result
    loop/options.py              the options of a run, and the learning rates of a round
    loop/loop.py                 one round, with the order of its calls
    loop/cohort.py               the clients of a round: tasks, results, sums, exclusion of clients with NaN or errors;
                                 `outliers.py` finds clients that moved too far
    loop/contract.py             the calls of an algorithm's methods; `checked_contract.py` checks those of a user's own
    loop/client_state.py         where the states of clients are kept
    loop/resumption.py           what a resumed run may change
    clients/sampling.py          which clients take part in a round
    clients/plan.py              the samples of these clients: orders, batches, seeds
    algorithms/base.py           the methods of an algorithm
    update/steps.py              the local steps: SGD, SAM, and what a step of one's own is made of
    update/rows.py               n clients in one memory, and their kernel calls (the folder kernels/, imported as
                                 `fastsam_kernels`; `reference.py` maps a call)
    executors/task.py            what executors know of a run, and the task of one client
    executors/client.py          the client as a loop of an algorithm sees it (`Algorithm.train_client`)
    executors/local_work.py      the local work of one client, whichever way
    executors/client_trainer.py  one client at a time: its row, its model and the passes of its steps. The other files
                                 of `executors/` schedule several clients
    stages/order.py              what a run does between the clients' work and the server's step
    sums/fixed_point.py          sums that do not depend on the order of the clients
    loop/evaluate.py             loss, accuracy and metrics of the global model
    rundir/checkpoint.py         the run directory and its checkpoints
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastsam.fed import algorithms, callbacks
from fastsam.fed.algorithms import *  # noqa: F403 - the built-in algorithms, and what an own one is made of
from fastsam.fed.algorithms.distillation import divergence
from fastsam.fed.callbacks import Callback, CallbackError, Stop
from fastsam.fed.clients.batch_loss import BatchLoss
from fastsam.fed.clients.lazy import LazyClients
from fastsam.fed.clients.prepare import ClientTestSets
from fastsam.fed.data import FederatedData, cifar10, cifar100, digits, dirichlet, emnist, iid, split
from fastsam.fed.executors import ClientError
from fastsam.fed.finetune import finetune
from fastsam.fed.loop.contract import AlgorithmError
from fastsam.fed.loop.rates import TorchSchedule
from fastsam.fed.loop.run import run
from fastsam.fed.measures import NamedMeasures
from fastsam.fed.privacy.options import Privacy
from fastsam.fed.rundir.checkpoint import RunDirectoryError
from fastsam.fed.rundir.result import Result
from fastsam.fed.stages.compression import TopK
from fastsam.fed.sums.ranks import RankError

__all__ = [
    "AlgorithmError",
    "BatchLoss",
    "Callback",
    "CallbackError",
    "ClientError",
    "ClientTestSets",
    "FederatedData",
    "LazyClients",
    "NamedMeasures",
    "Privacy",
    "RankError",
    "Result",
    "RunDirectoryError",
    "Stop",
    "TopK",
    "TorchSchedule",
    "algorithms",
    "callbacks",
    "cifar10",
    "cifar100",
    "digits",
    "dirichlet",
    "divergence",
    "emnist",
    "finetune",
    "iid",
    "run",
    "split",
    *algorithms.__all__,
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Declare the algorithms, whose list is made when `fastsam.fed.algorithms` is imported."""
