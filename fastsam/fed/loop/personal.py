"""Parameters and buffers that stay with the client: an algorithm around another one. The other parameters are sent and
averaged.

With the head of a model that is FedPer (Arivazhagan et al. 2019), with its normalisation layers and their buffers FedBN
(Li et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload
from fastsam.fed.executors.client import Client
from fastsam.fed.loop.options import Settings
from fastsam.fed.update.model_copy import move_buffers
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Step

STATE_KEY = "personal"  # the name of a client's local parameters in its state


class AlgorithmModels:
    """Models that the algorithm keeps in addition to the global one (`Algorithm.own_models`). A client that has not
    taken part yet has the global model."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def row(self, server: State, state: State | None) -> Tensor:
        """Return the client's weights, `[row_size]`."""
        w = server["w"]
        if state is None:
            return w
        return self.algorithm.own_model(server, {name: x.to(w.device) for name, x in state.items()})

    def buffers(self, common: list[Tensor], state: State | None) -> list[Tensor]:
        """Return the client's buffers, which are the global model's."""
        return common


class PersonalizedAlgorithm:
    """`inner`, with some of the parameters never sent. A client begins with its own values of them, and the inner
    algorithm sees zeros.

    So the global model keeps their initial values, sums and control variates are zero there, and a proximal term pulls
    to the client's own start. `buffers` are the initial buffers if each client keeps its own, else empty.

    Raises:
        ValueError: a pattern matches no parameter (see `ParameterLayout.mask`), or all.
    """

    def __init__(
        self, inner: Algorithm, layout: ParameterLayout, patterns: str | Sequence[str], buffers: Sequence[Tensor] = ()
    ) -> None:
        self.inner, self.mask = inner, layout.mask("local_parameters", patterns)
        # The buffers of a client without a state.
        self.initial_buffers = {f"{STATE_KEY} buffer {k}": b for k, b in enumerate(buffers)}
        self.places = self.mask.nonzero().flatten()
        num_local = len(self.places)
        if num_local == layout.numel:
            raise ValueError(
                f"local_parameters={patterns!r} are all parameters of the model, and nothing would be learnt together"
            )
        fraction = 1 - num_local / layout.numel
        self.download_vectors, self.upload_vectors = inner.download_vectors * fraction, inner.upload_vectors * fraction
        self.sends_weights = getattr(inner, "sends_weights", False)

    def row(self, server: State, state: State | None) -> Tensor:
        """Return a client's model: the global weights `[row_size]` with the client's local parameters, or with their
        initial values before its first round."""
        w = server["w"]
        if state is None:
            return w
        row = w.clone()
        row[self.places] = state[STATE_KEY].to(w.device)
        return row

    def buffers(self, common: list[Tensor], state: State | None) -> list[Tensor]:
        """Return the buffers of a client's model, `common` if buffers do not stay with the clients."""
        source = self.initial_buffers if state is None else state
        return [source[name].to(b.device) for name, b in self.initial_buffers.items()] or common

    def init_server(self, w0: Tensor) -> State:
        """Return the inner server's state."""
        self.places = self.places.to(w0.device)
        self.mask = self.mask.to(w0.device)
        return self.inner.init_server(w0)

    def init_client(self, server: State) -> State:
        """Return the inner state, with the initial values of the client's local parameters and buffers."""
        return {**self.inner.init_client(server), STATE_KEY: server["w"][self.places], **self.initial_buffers}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        """Return the inner step, with the start of each client."""
        own, w = client[STATE_KEY], server["w"]
        step = self.inner.local_step(server, self._inner(client), round)
        if step.start is not None:
            raise ValueError(
                f"local_parameters= serves no algorithm with its own start, and {type(self.inner).__name__} has one"
            )
        if step.state is not None:
            raise ValueError(
                "local_parameters= serves no algorithm that sends the state of the local optimizer, and "
                f"{type(self.inner).__name__} sends it. Use another algorithm, or leave local_parameters out"
            )
        start = w.repeat(len(own), 1)
        start[:, self.places] = own
        q = step.q
        if q is not None and step.prox is not None:  # the constant half of prox*(w - start)
            q = (q - step.prox * (start - w)).to(w.dtype)
        buffers = [client[name] for name in self.initial_buffers]
        return replace(step, start=start, q=q, buffers=buffers or None)

    def train_client(self, client: Client, server: State, state: State, round: Round) -> Mapping[str, Tensor] | None:
        """Do the local work of the inner algorithm, from the client's own start."""
        return self.inner.train_client(client, server, self._inner(state), round)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        """Return the inner state and upload of the shared parameters, and the client's own parameters."""
        new_state = {STATE_KEY: client[STATE_KEY] + results.delta[:, self.places]}
        if self.initial_buffers and results.buffers is not None:
            rows = zip(zip(*(client[name] for name in self.initial_buffers), strict=True), results.buffers, strict=True)
            new_buffers = zip(*(move_buffers(start, shift) for start, shift in rows), strict=True)
            new_state |= {
                name: torch.stack(column) for name, column in zip(self.initial_buffers, new_buffers, strict=True)
            }
        outputs = {name: self._zero_own(x) for name, x in results.outputs.items()}
        # The shared weights start at the global model.
        shared = replace(results, delta=self._zero_own(results.delta), outputs=outputs, start=None)
        state, upload = self.inner.finish(server, self._inner(client), shared, round)
        return {**state, **new_state}, upload

    def _zero_own(self, x: Tensor) -> Tensor:
        """Return rows of vectors with zeros for the client's own parameters; numbers stay."""
        return x.masked_fill(self.mask, 0) if x.shape[-1:] == self.mask.shape else x

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the inner server's state after the round."""
        return self.inner.step_server(server, aggregate, round)

    def _inner(self, client: State) -> State:
        return {name: x for name, x in client.items() if name != STATE_KEY and name not in self.initial_buffers}


def with_own_buffers(settings: Settings, algorithm: object) -> Settings:
    """Return the settings, with buffers="local" if the algorithm says so. Raises ValueError if they contradict it."""
    if not getattr(algorithm, "own_buffers", False) or settings.buffers == "local":
        return settings
    if settings.buffers is not None:
        raise ValueError(
            f"{type(algorithm).__name__} leaves the model's buffers with the clients, and buffers={settings.buffers!r} "
            f"does not: leave it out"
        )
    return replace(settings, buffers="local")


ClientModels = AlgorithmModels | PersonalizedAlgorithm  # a state is None before a client's first round


def client_models_of(
    algorithm: Algorithm,
    settings: Settings,
    layout: ParameterLayout,
    own_parameters: Sequence[str],
    buffers: Sequence[Tensor],
) -> ClientModels | None:
    """Return the source of the personal models, or None if clients have no personal model.

    A `PersonalizedAlgorithm` is also an algorithm: it wraps `algorithm` and keeps with the clients what the run and
    the algorithm (`own_parameters`) name. `buffers` are the initial buffers.
    """
    names = settings.local_parameters
    patterns = [*([names] if isinstance(names, str) else names or ()), *own_parameters]
    local = settings.buffers == "local"
    if getattr(algorithm, "own_models", False):
        return AlgorithmModels(algorithm)
    if not patterns and not local:
        return None
    return PersonalizedAlgorithm(algorithm, layout, patterns, buffers if local else ())
