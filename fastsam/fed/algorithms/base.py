"""The base class of algorithms: the local step of the clients, their states, and the server's step.

An algorithm is a frozen dataclass of hyper-parameters with pure functions. They return new states and never write into
the tensors that they get. It knows neither backends nor executors. `Algorithm` itself is federated averaging, so a
subclass overrides only the differences. The local work has two forms: a step (`local_step`),
which every executor can take for many clients at once, or a loop (`train_client`).

All vectors are flat rows `[row_size]` in the dtype of the weights: the trainable parameters in the order of
`model.parameters()`, with zero padding between them. The elements of a parameter are in storage order. `round.layout`
gives views by name (`ParameterLayout.unflatten`).

Clients are rows: `local_step` and `finish` are called for n clients at once, with vectors `[n, row_size]` and
states `[n, ...]`. The executor chooses n. The results for a client must depend only on its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn

from fastsam.fed.common.option import NamedOptions
from fastsam.fed.executors.client import Client
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import SAM, Shifted, Step

__all__ = [
    "SAM",
    "Aggregate",
    "Algorithm",
    "Client",
    "ClientResults",
    "ParameterLayout",
    "Passes",
    "Round",
    "Rows",
    "Shifted",
    "State",
    "Step",
    "Upload",
    "apply_update",
]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Round:
    """A round, as algorithms see it.

    Attributes:
        index: t, from 0.
        lr, first_lr: local learning rate of this round and of the first round, NaN if the optimizer takes none.
        local_epochs: epochs of local work.
        num_clients: N, the number of all clients.
        cohort_size: number of clients sampled for this round.
        server_lr: learning rate of the server.
        layout: the parameters of a row.
        momentum: momentum of the local steps, of the run or of its optimizer of torch.
        seed: seed of the run.
        dampening, nesterov: form of the momentum, as in `torch.optim.SGD`.
    """

    index: int
    lr: float
    local_epochs: int
    num_clients: int
    cohort_size: int
    server_lr: float
    first_lr: float
    layout: ParameterLayout = field(repr=False, compare=False)
    momentum: float = 0.0
    seed: int = 0
    dampening: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Upload:
    """The uploads of n clients.

    Attributes:
        mean: rows `[n, ...]` for weighted means with the run's weights, by name.
        sum: rows `[n, ...]` for plain sums, by name.
        weight: `[n]` finite numbers >= 0 that multiply the run's weights in all means, also of averaged buffers. The
            class must say `sends_weights = True`.
    """

    mean: Mapping[str, Tensor] = field(default_factory=dict)
    sum: Mapping[str, Tensor] = field(default_factory=dict)
    weight: Tensor | Sequence[float] | None = None


class Aggregate(Protocol):
    """Sums of the uploads over the `num_clients` clients that were not excluded."""

    @property
    def num_clients(self) -> int:
        """Number of clients in the sums."""

    def mean(self, name: str) -> Tensor:
        """Return the weighted mean of an upload, float64 `[row_size]`: zeros if clients sent weights and all are 0."""

    def sum(self, name: str) -> Tensor:
        """Return the plain sum of an upload, float64 `[row_size]`."""

    def scalar(self, name: str) -> float:
        """Return the sum of a number that clients sent, 0 if no client sent it."""


class Algorithm(NamedOptions):
    """Federated averaging, the base class of all algorithms.

    Attributes:
        download_vectors, upload_vectors: traffic of one client in one round, in units of the P parameters.
        pools_data: the method is not federated and trains on all clients' data (`fastsam.fed.loop.pooled_data`).
        uses_sums: the server needs the plain sum of an upload (`Upload(sum=...)`), which no robust rule can replace.
        sends_weights: every upload has a weight for each client (`Upload(weight=...)`).
        sends_norms: the clients send norms of their deltas, which must be of the deltas that the server gets.
        own_buffers: the model's buffers stay with the clients, as with the run's `buffers="local"`.
        own_models: the algorithm keeps a private model for every client (`own_model`).
        local_optimizer: the optimizer of the local steps in a run without `optimizer=`, None for SGD.
    """

    download_vectors: ClassVar[float] = 1
    upload_vectors: ClassVar[float] = 1
    pools_data: ClassVar[bool] = False
    uses_sums: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False
    sends_norms: ClassVar[bool] = False
    own_buffers: ClassVar[bool] = False
    own_models: ClassVar[bool] = False
    local_optimizer: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Check the options (see `hparam`). Raises ValueError for a value out of its range."""
        for option in fields(cast(Any, self)):
            if "check" in option.metadata:
                option.metadata["check"](option.name, getattr(self, option.name))

    def own_parameters(self, model: nn.Module) -> Sequence[str]:
        """Return names or patterns of the model's parameters that stay with the clients, as with the run's
        `local_parameters`."""
        return ()

    def uses_lr(self) -> bool:
        """Return True if the algorithm computes with `round.lr` or `round.momentum`. A run then refuses an optimizer
        whose rate cannot be known."""
        return False

    def uses_server_lr(self) -> bool:
        """Return True if the server's step has a learning rate. Otherwise a run refuses `server_lr`."""
        return True

    def init_server(self, w0: Tensor) -> State:
        """Return the server's state before the first round; "w" is the global model."""
        return {"w": w0}

    def init_client(self, server: State) -> State:
        """Return the state of one client when it takes part for the first time."""
        return {}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        """Return the local step of n clients in this round, whose states are `client`.

        Its vectors are `[n, row_size]`, or `[row_size]` if all clients share them. A number of each client is `[n, 1]`.
        """
        return Step()

    def train_client(self, client: Client, server: State, state: State, round: Round) -> Mapping[str, Tensor] | None:
        """Do the local work of one client in one round. Override it if a step does not suffice.

        Args:
            client: the client's data, model and steps. `client.step` takes the step of `local_step`.
            server: the server's state.
            state: the client's state, without a dimension for rows.
            round: the round.

        Returns:
            tensors that `finish` gets as `results.extra`, `[n, ...]`, or None.
        """
        for x, y in client.batches():
            client.step(x, y)
        return None

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        """Return the new states of n clients, `[n, ...]`, and their uploads.

        A tensor of the server's state that is returned in a client's state is kept by reference, so clients share it.
        """
        return client, Upload(mean={"delta": results.delta})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the server's state after the round: `w <- w + server_lr * mean(delta)`."""
        return {**server, "w": apply_update(server["w"], round.server_lr * aggregate.mean("delta"))}

    def own_model(self, server: State, client: State) -> Tensor:
        """Return a client's own model, `[row_size]`, from its state. It is evaluated on the client's test samples if
        `own_models` is True."""
        return server["w"]


def hparam(default: Any, check: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
    """Return a field of an algorithm whose values are checked by `check(name, value, *arguments, **limits)`."""
    return field(default=default, metadata={"check": lambda name, value: check(name, value, *arguments, **limits)})


def has_loop(algorithm: object) -> bool:
    """Return True if an algorithm, or the algorithm that it wraps, overrides `train_client`."""
    method = getattr(getattr(algorithm, "inner", algorithm), "train_client", None)
    return method is not None and getattr(method, "__func__", method) is not Algorithm.train_client


def apply_update(w: Tensor, update: Tensor) -> Tensor:
    """Return `w + update` in the dtype of `w`. It is added in float64, the dtype of an aggregate, and rounded once."""
    return (w.double() + update).to(w.dtype)
