"""FedRep: Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021 (Algorithm 1); https://github.com/lgcollins/FedRep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fastsam.fed.algorithms.base import Algorithm, LocalUpdate, Round, State
from fastsam.fed.algorithms.layers import last_layer
from fastsam.fed.common.checks import integer


@dataclass(frozen=True)
class FedRep(Algorithm):
    """Clients share a representation and have heads of their own, which are trained first.

        h_i: head_epochs passes over the client's data, the representation at rest;   then w: the run's local work, the
        head at rest w <- w + server_lr * mean_i Delta_i     over the representation; h_i stays

    head: a module or parameter by name, or a pattern; None: the last layer. Both phases are the run's local steps
    (momentum, weight decay, clipping), each with a momentum of its own.
    Per round and client 1 P down and 1 P up, less the head; state: w, and the head on every client.
    """

    head: str | None = None
    head_epochs: int = 10

    def __post_init__(self) -> None:
        integer("head_epochs", self.head_epochs, at_least=1)
        if self.head is not None and (not isinstance(self.head, str) or not self.head):
            raise ValueError(
                f"head must be the name of a module or a parameter, or None for the last layer, got {self.head!r}"
            )

    def own_parameters(self, model: nn.Module) -> Sequence[str]:
        return [self.head if self.head is not None else last_layer(model) or "*"]

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        rows = round.layout
        head = rows.places("head", self.own_parameters(rows.template))
        body = tuple(place for place in range(len(rows.names)) if place not in head)
        return LocalUpdate(epochs=self.head_epochs, only=head, then=LocalUpdate(only=body))
