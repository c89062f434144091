"""A federated round as one program of XLA, by hand in JAX: the fastest thing that one can write without a library.

Clients are mapped, local steps are scanned, and the server's mean is part of the program. On a CPU the CNN's scan is
unrolled, because XLA's convolutions take five times as long inside a loop. Clients of unequal sizes are padded to the
largest, and padded samples have the weight 0. JAX is imported only here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from bench.fed.workload import BATCH, RHO, Workload

Parameters = dict[str, Any]
# Images have their channels last in JAX. The first dense layer of the CNN reads an image of this size.
_DENSE, _SIDES = "7.weight", (5, 5)


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """Train and return the model. `option` is not used."""
    model, data = workload.make_model(), Data(workload)
    w = {name: jnp.asarray(to_jax(name, p.detach().cpu().numpy())) for name, p in model.named_parameters()}
    run, key = make_round(workload), jax.random.key(0)
    for number in range(rounds):
        w = jax.block_until_ready(run(w, data.x, data.y, data.sizes, jax.random.fold_in(key, number)))
        tick()
    arrays = {name: to_torch(name, np.asarray(value)) for name, value in w.items()}
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    return model


class Data:
    """The samples of all clients, padded to whole batches of the largest client.

    Attributes:
        x: float32 `[clients, samples, *shape]`, channels last.
        y: int64 labels `[clients, samples]`.
        sizes: number of samples of each client.
    """

    def __init__(self, workload: Workload) -> None:
        pairs = workload.data()
        self.sizes = jnp.asarray([len(y) for _, y in pairs])
        length = -(-max(len(y) for _, y in pairs) // BATCH) * BATCH
        pad = [(0, 0)] * len(workload.shape)
        x = np.stack([np.pad(x, [(0, length - len(y)), *pad]) for x, y in pairs])
        self.x = jnp.asarray(np.moveaxis(x, 2, -1) if len(workload.shape) == 3 else x)
        self.y = jnp.asarray(np.stack([np.pad(y, (0, length - len(y))) for _, y in pairs]))


def make_round(workload: Workload) -> Callable[..., Parameters]:
    """Return the compiled function of a round: of weights, samples, sizes and a random key."""
    unroll = jax.default_backend() == "cpu" and len(workload.shape) == 3
    gradient = jax.grad(partial(loss, workload.model.partition(":")[0]))

    def step(w: Parameters, batch: Any) -> tuple[Parameters, None]:
        g = gradient(w, *batch)
        if workload.algorithm == "fedsam":
            norm = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(g)))
            g = gradient(jax.tree.map(lambda a, b: a + RHO / (norm + 1e-12) * b, w, g), *batch)
        return jax.tree.map(lambda a, b: a - workload.lr * b, w, g), None

    def client(w: Parameters, x: Any, y: Any, size: Any, key: Any) -> Parameters:
        places = jnp.arange(len(y))
        order = jnp.argsort(jnp.where(places < size, jax.random.uniform(key, (len(y),)), 2.0))  # padding comes last
        batches = (x[order], y[order], (places < size).astype(jnp.float32))
        steps = jax.tree.map(lambda a: a.reshape(-1, BATCH, *a.shape[1:]), batches)
        return lax.scan(step, w, steps, unroll=unroll)[0]

    @jax.jit
    def run(w: Parameters, x: Any, y: Any, sizes: Any, key: Any) -> Parameters:
        choice, order = jax.random.split(key)
        ids = jax.random.choice(choice, workload.clients, (workload.cohort,), replace=False)
        samples = x[ids], y[ids], sizes[ids], jax.random.split(order, workload.cohort)
        results = jax.vmap(client, (None, 0, 0, 0, 0))(w, *samples)
        return jax.tree.map(lambda a: a.mean(0), results)

    return run


def loss(model: str, w: Parameters, x: Any, y: Any, weights: Any) -> Any:
    """Return the mean cross-entropy of the samples of a batch whose weight is 1. Without any it is 0."""
    logits = jax.nn.log_softmax(mlp(w, x) if model == "mlp" else cnn(w, x))
    losses = -jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return (losses * weights).sum() / jnp.maximum(weights.sum(), 1)


def mlp(w: Parameters, x: Any) -> Any:
    return jax.nn.relu(x @ w["0.weight"] + w["0.bias"]) @ w["2.weight"] + w["2.bias"]


def cnn(w: Parameters, x: Any) -> Any:
    for layer in (0, 3):
        x = lax.conv_general_dilated(
            x, w[f"{layer}.weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + w[f"{layer}.bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ w["7.weight"] + w["7.bias"])
    return x @ w["9.weight"] + w["9.bias"]


def to_jax(name: str, value: np.ndarray) -> np.ndarray:
    """Return a parameter of the PyTorch model in JAX's order of dimensions."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if name == _DENSE:
        return value.reshape(len(value), -1, *_SIDES).transpose(2, 3, 1, 0).reshape(-1, len(value))
    return value.T


def to_torch(name: str, value: np.ndarray) -> np.ndarray:
    """Return a parameter in PyTorch's order of dimensions."""
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    if name == _DENSE:
        return value.reshape(*_SIDES, -1, value.shape[1]).transpose(3, 2, 0, 1).reshape(value.shape[1], -1)
    return value.T
