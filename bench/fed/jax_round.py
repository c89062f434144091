"""A federated round as one program of XLA, by hand in JAX: the fastest thing that one can write without a library.

Clients are mapped, local steps are scanned, and the server's mean is part of the program. On a CPU the CNN's scan is
unrolled, because XLA's convolutions take five times as long inside a loop. Clients of unequal sizes are padded to the
largest, and padded samples have the weight 0. JAX is imported only here.
"""

from collections.abc import Callable, Sequence
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
    model, data = workload.make_model(), Data(workload.data(), BATCH)
    w = {name: jnp.asarray(to_jax(name, p.detach().cpu().numpy())) for name, p in model.named_parameters()}
    run, key = make_sgd_round(workload), jax.random.key(0)
    x = jnp.moveaxis(data.x, 2, -1) if data.x.ndim == 5 else data.x
    for number in range(rounds):
        w = jax.block_until_ready(run(None, w, x, data.y, data.sizes, jax.random.fold_in(key, number)))
        tick()
    arrays = {name: to_torch(name, np.asarray(value)) for name, value in w.items()}
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    return model


class Data:
    """The samples of all clients, padded to whole batches of the largest client.

    Attributes:
        x: inputs `[clients, samples, *shape]`.
        y: int64 labels `[clients, samples]`.
        sizes: number of samples of each client.
    """

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int) -> None:
        self.sizes = jnp.asarray([len(y) for _, y in pairs])
        length = -(-max(len(y) for _, y in pairs) // batch_size) * batch_size
        self.x, self.y = (
            jnp.asarray(np.stack([np.pad(a, [(0, length - len(a)), *[(0, 0)] * (a.ndim - 1)]) for a in arrays]))
            for arrays in zip(*pairs, strict=True)
        )


def make_sgd_round(workload: Workload) -> Callable[..., Parameters]:
    """Return the compiled function of a round of SGD with the MLP or the CNN. See `make_round`."""
    gradient = gradient_of(workload.algorithm, partial(loss, workload.model.partition(":")[0]))

    def step(frozen: None, state: tuple[Parameters], batch: Any) -> tuple[tuple[Parameters], None]:
        (w,) = state
        return (jax.tree.map(lambda a, b: a - workload.lr * b, w, gradient(w, *batch)),), None

    unroll = jax.default_backend() == "cpu" and len(workload.shape) == 3
    return make_round(workload, step, lambda w: (w,), BATCH, unroll)


def gradient_of(algorithm: str, loss: Callable[..., Any]) -> Callable[..., Parameters]:
    """Return the gradient of the loss of weights and a batch, for FedSAM at the perturbed weights."""
    gradient = jax.grad(loss)

    def of_sam(w: Parameters, *batch: Any) -> Parameters:
        g = gradient(w, *batch)
        norm = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(g)))
        return gradient(jax.tree.map(lambda a, b: a + RHO / (norm + 1e-12) * b, w, g), *batch)

    return of_sam if algorithm == "fedsam" else gradient


def make_round(
    workload: Workload, step: Callable[..., Any], begin: Callable[[Parameters], Any], batch_size: int,
    unroll: bool = False,
) -> Callable[..., Parameters]:  # fmt: skip
    """Return the compiled function of a round: of frozen and trained weights, samples, sizes and a random key.

    Args:
        workload: the clients of a round.
        step: function of frozen weights, the state of a client and a batch. It returns the new state and None.
        begin: function of the global weights. It returns the state at the start, whose first part are the weights.
        batch_size: number of samples in a batch.
        unroll: whether the steps are unrolled.
    """

    def client(frozen: Any, w: Parameters, x: Any, y: Any, size: Any, key: Any) -> Parameters:
        places = jnp.arange(len(y))
        order = jnp.argsort(jnp.where(places < size, jax.random.uniform(key, (len(y),)), 2.0))  # padding comes last
        batches = (x[order], y[order], (places < size).astype(jnp.float32))
        steps = jax.tree.map(lambda a: a.reshape(-1, batch_size, *a.shape[1:]), batches)
        return lax.scan(partial(step, frozen), begin(w), steps, unroll=unroll)[0][0]

    @jax.jit
    def run(frozen: Any, w: Parameters, x: Any, y: Any, sizes: Any, key: Any) -> Parameters:
        choice, order = jax.random.split(key)
        ids = jax.random.choice(choice, workload.clients, (workload.cohort,), replace=False)
        samples = x[ids], y[ids], sizes[ids], jax.random.split(order, workload.cohort)
        results = jax.vmap(client, (None, None, 0, 0, 0, 0))(frozen, w, *samples)
        return jax.tree.map(lambda a: a.mean(0), results)

    return run


def loss(model: str, w: Parameters, x: Any, y: Any, weights: Any) -> Any:
    """Return the mean cross-entropy of the samples of a batch whose weight is 1."""
    return mean_loss(mlp(w, x) if model == "mlp" else cnn(w, x), y, weights)


def mean_loss(logits: Any, y: Any, weights: Any) -> Any:
    """Return the mean cross-entropy of the samples whose weight is 1. Without any it is 0."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]
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
