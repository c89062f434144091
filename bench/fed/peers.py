"""Other simulators, each used as its documentation says, with the fewest parts that train the workload.

Each runs in a separate environment, so a function imports its library itself.
"""

import copy
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.fed import cores
from bench.fed.bare import Tensors, batches
from bench.fed.workload import BATCH, LR, Workload

Tick = Callable[[], None]


def train(workload: Workload, rounds: int, tick: Tick, option: str) -> nn.Module:
    """Train with a simulator and return the model. `option` is the simulator's name."""
    return PEERS[option](workload, rounds, tick)


MODEL: dict[str, Any] = {}  # state of an actor's process: client apps are functions


def client_app(workload: Workload) -> Any:
    """Return the app that trains one client; the model and the data stay in its process."""
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


def flower(workload: Workload, rounds: int, tick: Tick) -> nn.Module:
    """Train with Flower's simulation: a server app, a client app, and its Ray backend with one actor per core.

    Without `num_cpus` Ray takes all processors of the machine.
    """
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server, model = ServerApp(), workload.make_model()

    class Ticking(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            result_of_round = super().aggregate_train(server_round, replies)
            tick()
            return result_of_round

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        share = workload.cohort / workload.clients
        strategy = Ticking(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=workload.clients)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    num_cores = cores.available()
    resources = {"init_args": {"num_cpus": num_cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client_app(workload), workload.clients, backend_config=resources)
    return model


def pfl(workload: Workload, rounds: int, tick: Tick) -> nn.Module:
    """Train with Apple's pfl: its simulated backend with PyTorch models."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Ticking(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            tick()
            return False, Metrics()

    data = workload.tensors()
    sampler = get_user_sampler("random", list(range(workload.clients)))
    dataset = FederatedDataset(lambda i: Dataset(raw_data=list(data[i])), sampler)
    inner = workload.make_model()
    inner.loss = lambda x, y, is_eval=False: nn.functional.cross_entropy(inner.train(not is_eval)(x), y)
    inner.metrics = lambda x, y, is_eval=False: {}
    model = PyTorchModel(inner, torch.optim.SGD, torch.optim.SGD(inner.parameters(), 1.0))
    parameters = NNAlgorithmParams(rounds, 10**9, workload.cohort, 0)
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH)
    FederatedAveraging().run(parameters, SimulatedBackend(dataset, None), model, local, callbacks=[Ticking()])
    return inner


def fedlab(workload: Workload, rounds: int, tick: Tick) -> nn.Module:
    """Train with FedLab's standalone simulation: its serial trainer and its synchronous server."""
    _without_torchvision()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    sets = [TensorDataset(x, y) for x, y in workload.tensors()]
    silent = SimpleNamespace(info=lambda text: None)  # a logger whose time is not measured

    class Data:
        def get_dataloader(self, id: int, batch_size: int) -> DataLoader:
            return DataLoader(sets[id], batch_size=batch_size, shuffle=True)

    class Pipeline(StandalonePipeline):
        def evaluate(self) -> None:
            tick()

    model = workload.make_model()
    handler = SyncServerHandler(model, rounds, workload.cohort / workload.clients, False, logger=silent)
    trainer = SGDSerialClientTrainer(workload.make_model(), workload.clients, False, logger=silent)
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, BATCH, LR)
    Pipeline(handler, trainer).main()
    return handler.model


def _without_torchvision() -> None:
    """Replace torchvision by an empty module if no torchvision fits the installed torch.

    FedLab imports torchvision for data sets that are not used here.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        empty = ModuleType("torchvision")
        empty.transforms = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": empty, "torchvision.transforms": empty.transforms}


def fedjax(workload: Workload, rounds: int, tick: Tick) -> nn.Module:
    """Train with FedJAX's federated averaging, jitted, on the same two models written for JAX."""
    import fedjax
    import jax
    import jax.numpy as jnp
    import numpy as np

    data = fedjax.InMemoryFederatedData({i: {"x": x, "y": y} for i, (x, y) in enumerate(workload.data())})
    model = workload.make_model()

    def grad_fn(params: Any, batch: Any, rng: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = jax.nn.log_softmax(forward(workload.model, params, batch["x"]))
            return -jnp.mean(jnp.take_along_axis(logits, batch["y"][:, None], 1))

        return jax.grad(loss)(params)

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn, fedjax.optimizers.sgd(LR), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH),
    )  # fmt: skip
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, workload.cohort, seed=0)
    state = algorithm.init({name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()})
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        tick()
    model.load_state_dict({name: torch.from_numpy(np.array(p)) for name, p in state.params.items()})
    return model


def forward(model: str, p: Any, x: Any) -> Any:
    """Run `workload.MODELS[model]` in JAX, on the parameters under their PyTorch names."""
    import jax
    from jax import lax

    if model == "mlp":
        return jax.nn.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]
    for i in (0, 3):
        x = lax.conv(x, p[f"{i}.weight"], (1, 1), "VALID") + p[f"{i}.bias"][:, None, None]
        x = lax.reduce_window(jax.nn.relu(x), -float("inf"), lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ p["7.weight"].T + p["7.bias"])
    return x @ p["9.weight"].T + p["9.bias"]


def blazefl(workload: Workload, rounds: int, tick: Tick) -> nn.Module:
    """Train with BlazeFL's FedAvg (`blazefl.contrib`): its server, and its thread pool with one client per core.

    A client per core is faster than one client after the other with all threads.
    """
    from blazefl import contrib

    torch.set_num_threads(1)
    start, sets = workload.make_model(), [TensorDataset(x, y) for x, y in workload.tensors()]

    class Data:
        def get_dataset(self, type_: str, cid: int) -> Dataset[Any]:
            return sets[cid]

        def set_dataset(self, type_: str, cid: int, dataset: Dataset[Any]) -> None:
            raise NotImplementedError("the clients' data are read only")

        def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: torch.Generator) -> DataLoader[Any]:
            return DataLoader(sets[cid], batch_size=batch_size, shuffle=True, generator=generator)

    class Models:
        def select_model(self, model_name: str) -> nn.Module:
            return copy.deepcopy(start)

    options = {"model_selector": Models(), "model_name": "", "dataset": Data(), "device": workload.device, "seed": 0}
    local = {"num_clients": workload.clients, "epochs": 1, "batch_size": BATCH, "lr": LR}
    ratio = workload.cohort / workload.clients
    trainer = {"global_round": rounds, "num_clients": workload.clients, "sample_ratio": ratio, "batch_size": BATCH}
    server = contrib.FedAvgBaseServerHandler(**options, **trainer)
    trainer = contrib.FedAvgThreadPoolClientTrainer(**options, **local, num_parallels=cores.available())
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        tick()
    return server.model


def jax(workload: Workload, rounds: int, tick: Tick) -> nn.Module:
    """Train with a round that is written by hand as one program of XLA."""
    from bench.fed import jax_round

    return jax_round.train(workload, rounds, tick, "")


PEERS: dict[str, Callable[[Workload, int, Tick], nn.Module]] = {
    "flower": flower, "pfl": pfl, "fedlab": fedlab, "fedjax": fedjax, "blazefl": blazefl, "jax": jax
}  # fmt: skip
WITH_SAM = ("jax",)
