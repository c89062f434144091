"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021 (eq. 3, Algorithm 1);
https://github.com/QinbinLi/MOON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam.fed.algorithms.base import Algorithm, Client, ClientResults, Round, State, Upload, hparam
from fastsam.fed.algorithms.layers import last_layer
from fastsam.fed.common.checks import nearest, number


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg with a contrastive term: representations z approach the received model's representations, and move away
    from the previous ones of the client.

        f_i = loss(w) - mu * mean log( exp(s/tau) / (exp(s/tau) + exp(s_old/tau)) )
        s = cos(z_w, z_{w^t}),  s_old = cos(z_w, z_{w_i})

    w_i is the client's model after its last local steps. In its first round w_i is the received model, for which the
    term has no gradient. The server's step is FedAvg's. Per round and client 1 P down and 1 P up; state: w, and w_i on
    every client. One backward pass and two further forward passes a step.

    Args:
        mu: weight of the contrastive term.
        tau: temperature.
        features: name of the module that returns z, the paper's projection head; None for the input of the last layer.
    """

    mu: float = hparam(1.0, number, at_least=0)
    tau: float = hparam(0.5, number, greater_than=0)
    features: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features is not None and (not isinstance(self.features, str) or not self.features):
            raise ValueError(
                f"features must be the name of a module, or None for the input of the last layer, got {self.features!r}"
            )

    def init_client(self, server: State) -> State:
        return {"w_i": server["w"]}

    def train_client(self, client: Client, server: State, state: State, round: Round) -> None:
        received_model, previous = client.teacher(server["w"]), client.teacher(state["w_i"], index=1)
        with self.record_features([client.model, received_model, previous]) as (z, z_t, z_i):
            for x, y in client.batches():
                with torch.no_grad():
                    received_model(x), previous(x)
                client.step(x, y, penalty=lambda outputs: self.contrast(z.take(), z_t.take(), z_i.take()))

    def contrast(self, z: Tensor, z_t: Tensor, z_i: Tensor) -> Tensor:
        """Return the contrastive term of representations `[n, ...]`."""
        s, s_old = (F.cosine_similarity(z.flatten(1), features.flatten(1)) for features in (z_t, z_i))
        return self.mu * F.softplus((s_old - s) / self.tau).mean()

    @contextmanager
    def record_features(self, models: Sequence[nn.Module]) -> Iterator[list[_Features]]:
        """Record the representation of each pass of some copies of a model inside.

        Raises:
            ValueError: the model has no module `features`.
        """
        name = self.features or last_layer(models[0])
        hooks, handles = [_Features(name) for _ in models], []
        try:
            for model, features in zip(models, hooks, strict=True):
                module = _module(model, name)
                register = module.register_forward_hook if self.features else module.register_forward_pre_hook
                handles.append(register(features.record))
            yield hooks
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        return {"w_i": server["w"] + results.delta}, Upload(mean={"delta": results.delta})


def _module(model: nn.Module, name: str) -> nn.Module:
    """Return a module of a model by name. Raises ValueError for an unknown name."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise ValueError(
            f"features={name!r} is not a module of the model{nearest(name, names)}; its modules are {', '.join(names)}"
        ) from None


class _Features:
    """The representation in the last pass of a model: the output of a module, or its input."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensor: object = None

    def record(self, module: nn.Module, inputs: tuple[Any, ...], output: object = None) -> None:
        """Store the representation, as a hook of the module; `output` is None before its forward pass."""
        self.tensor = inputs[0] if output is None else output

    def take(self) -> Tensor:
        """Return the representation. Raises ValueError if the module does not work on one tensor, or was not called."""
        tensor, self.tensor = self.tensor, None
        if not isinstance(tensor, Tensor):
            problem = "is not called" if tensor is None else f"gives {type(tensor).__name__}"
            raise ValueError(
                f"features={self.name!r} must be a module that works on one tensor; in a pass of the model it {problem}"
            )
        return tensor
