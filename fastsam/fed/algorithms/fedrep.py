"""FedRep: Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021 (Algorithm 1); https://github.com/lgcollins/FedRep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fastsam.fed.algorithms.base import Algorithm, Client, Round, State, hparam
from fastsam.fed.algorithms.layers import last_layer
from fastsam.fed.common.checks import integer


@dataclass(frozen=True)
class FedRep(Algorithm):
    """Clients share a representation, and each has its own head, which is trained first.

        h_i <- head_epochs passes over the client's data, with a constant representation
        w_i <- the run's local work, with a constant head
        w   <- w + server_lr * mean_i Delta_i     over the representation; h_i stays

    Both phases take the run's local steps (momentum, weight decay, clipping), each with its own momentum.
    Per round and client 1 P down and 1 P up, less the head; state: w, and the head on every client.

    Args:
        head: name of a module or parameter, or a pattern; None for the last layer.
        head_epochs: passes over the data for the head.
    """

    head: str | None = None
    head_epochs: int = hparam(10, integer, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and (not isinstance(self.head, str) or not self.head):
            raise ValueError(
                f"head must be the name of a module or a parameter, or None for the last layer, got {self.head!r}"
            )

    def own_parameters(self, model: nn.Module) -> Sequence[str]:
        return [self.head if self.head is not None else last_layer(model) or "*"]

    def train_client(self, client: Client, server: State, state: State, round: Round) -> None:
        layout = round.layout
        head = layout.indices("head", self.own_parameters(layout.template))
        body = [i for i in range(len(layout.names)) if i not in head]
        with client.trainable(head):
            for x, y in client.batches(self.head_epochs):
                client.step(x, y)
        client.next_phase()
        with client.trainable(body):
            for x, y in client.batches():
                client.step(x, y)
