"""Federated algorithms of other libraries on one small problem; tests/fed/algorithms/test_peers.py compares what they
make of it. Imports no fastsam.

    python tests/helpers/peer/federated_peers.py fedlab-fedavg|fedlab-scaffold|pfl-fedavg|optax-sam PROBLEM.npz
    RESULT.npz

PROBLEM: the weights `w0`, `w1`, ... of a tanh network with two linear layers, data `x0`, `y0`, ... of the clients, the
active clients `active0`, ... of the rounds, and the numbers `lr`, `epochs`, `batch`, `rho`. Batches are in stored
order, everything is float64.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

Vectors = list[Any]  # arrays, one per parameter


def parameter_list(problem: Any, name: str) -> list[Any]:
    """Return `problem["name0"]`, `problem["name1"]`, ..."""
    keys = (f"{name}{i}" for i in range(len(problem.files)))
    return [problem[key] for key in keys if key in problem.files]


def network(weights: Vectors) -> Any:
    """Return the model in torch, with the methods that pfl requires."""
    import torch

    class Network(torch.nn.Sequential):
        def loss(self, x: Any, y: Any, is_eval: bool = False) -> Any:
            return torch.nn.functional.cross_entropy(self(torch.as_tensor(x).double()), torch.as_tensor(y).long())

        def metrics(self, x: Any, y: Any, is_eval: bool = False) -> dict[str, Any]:
            return {}

    (h, d), (c, _) = weights[0].shape, weights[2].shape
    model = Network(torch.nn.Linear(d, h), torch.nn.Tanh(), torch.nn.Linear(h, c)).double()
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights):
            p.copy_(torch.as_tensor(w))
    return model


def fedlab(problem: Any, handler: Any, trainer: Any) -> Vectors:
    """Train with FedLab's server and client objects, driven by a loop as in its examples."""
    import torch

    weights, xs, ys = (parameter_list(problem, name) for name in ("w", "x", "y"))
    data = [list(map(torch.as_tensor, pair)) for pair in zip(xs, ys)]

    def batches(i: int, size: int) -> list[Any]:
        return list(zip(data[i][0].split(size), data[i][1].split(size)))

    rounds = parameter_list(problem, "active")
    server = handler(network(weights), len(rounds), 1.0)
    client = trainer(network(weights), len(data))
    client.setup_dataset(SimpleNamespace(get_dataloader=batches))
    client.setup_optim(int(problem["epochs"]), int(problem["batch"]), float(problem["lr"]))
    server.num_clients = len(data)
    if handler.__name__ == "ScaffoldServerHandler":
        server.setup_optim(1.0)
    for active in rounds:
        client.local_process(server.downlink_package, active.tolist())
        server.global_update(client.uplink_package)
    return [p.detach().numpy() for p in server._model.parameters()]


def without_torchvision() -> None:
    """Let FedLab import torchvision, for data sets that are not used here.

    If torchvision is missing or belongs to a different torch, an empty module replaces it.
    """
    from unittest.mock import MagicMock

    try:
        import torchvision  # noqa: F401
    except Exception as error:  # a module of another build may raise anything
        print(f"without torchvision: {type(error).__name__}: {error}", file=sys.stderr)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
            sys.modules[name] = MagicMock()


def fedlab_fedavg(problem: Any) -> Vectors:
    without_torchvision()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler

    return fedlab(problem, SyncServerHandler, SGDSerialClientTrainer)


def fedlab_scaffold(problem: Any) -> Vectors:
    without_torchvision()
    from fedlab.contrib.algorithm.scaffold import ScaffoldSerialClientTrainer, ScaffoldServerHandler

    return fedlab(problem, ScaffoldServerHandler, ScaffoldSerialClientTrainer)


def pfl_fedavg(problem: Any) -> Vectors:
    """Return the weights of pfl's simulated backend, with a sampler that lists the active clients.

    All rounds have the same number of clients.
    """
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    weights, xs, ys, rounds = (parameter_list(problem, name) for name in ("w", "x", "y", "active"))
    order = iter([int(i) for active in rounds for i in active])
    users = FederatedDataset(lambda i: Dataset((xs[i], ys[i])), lambda: next(order))
    net = network(weights)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(rounds),
            evaluation_frequency=1000,
            train_cohort_size=len(rounds[0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=None),
        model,
        NNTrainHyperParams(
            local_num_epochs=int(problem["epochs"]),
            local_learning_rate=float(problem["lr"]),
            local_batch_size=int(problem["batch"]),
        ),
    )
    return [p.detach().numpy() for p in net.parameters()]


def optax_sam(problem: Any) -> Vectors:
    """Train the first client with optax's SAM in transparent mode: a step that perturbs and a step that updates."""
    import jax
    import jax.numpy as jnp
    import optax
    from optax.contrib import normalize, sam

    jax.config.update("jax_enable_x64", True)
    weights = tuple(jnp.asarray(w) for w in parameter_list(problem, "w"))
    x, y, size = problem["x0"], problem["y0"], int(problem["batch"])

    def loss(p: Any, x: Any, y: Any) -> Any:
        scores = jnp.tanh(x @ p[0].T + p[1]) @ p[2].T + p[3]
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    optimizer = sam(
        optax.sgd(float(problem["lr"])), optax.chain(normalize(), optax.sgd(float(problem["rho"]))), sync_period=2
    )
    state, gradient = optimizer.init(weights), jax.jit(jax.grad(loss))
    for _ in range(int(problem["epochs"]) * len(parameter_list(problem, "active"))):
        for begin in range(0, len(y), size):
            for _ in range(2):
                updates, state = optimizer.update(
                    gradient(weights, x[begin : begin + size], y[begin : begin + size]), state, weights
                )
                weights = optax.apply_updates(weights, updates)
    return [np.asarray(w) for w in weights]


PEERS = {
    "fedlab-fedavg": fedlab_fedavg,
    "fedlab-scaffold": fedlab_scaffold,
    "pfl-fedavg": pfl_fedavg,
    "optax-sam": optax_sam,
}


def main(name: str, problem: str, result: str) -> None:
    weights = PEERS[name](np.load(problem))
    np.savez(result, **{f"w{i}": w for i, w in enumerate(weights)})


if __name__ == "__main__":
    main(*sys.argv[1:])
