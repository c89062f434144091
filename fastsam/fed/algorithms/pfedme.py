"""pFedMe: Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020 (Algorithm 1);
https://github.com/CharlieDinh/pFedMe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, ClientResults, LocalUpdate, Round, State, Upload
from fastsam.fed.common.checks import integer, number
from fastsam.fed.step.local_update import Envelope


@dataclass(frozen=True)
class pFedMe(Algorithm):
    """Each client's own model theta minimises its loss about a local model w_i, which follows it, and which is
    averaged.

        on each batch: K times   theta <- theta - lr * (grad f_i(theta) + lam*(theta - w_i));   then   w_i <- w_i -
        eta*lam*(w_i - theta) w <- (1 - server_lr)*w + server_lr * mean_i w_i

    Both begin a round at w^t; theta goes on from batch to batch. lr is the run's, the paper's learning rate of theta;
    server_lr is its beta. theta is what is evaluated as the client's model, and that of its last round. The run's
    momentum and weight decay are those of theta. Per round and client 1 P down and 1 P up; state: w, and theta on every
    client. One back-propagation a step, K steps a batch.

    Raises ValueError in a round whose lr * lam is 2 or more: the proximal term alone then diverges.
    """

    client_vectors: ClassVar[float] = 1
    working_vectors: ClassVar[float] = 2
    own_models: ClassVar[bool] = True

    lam: float = 15.0
    K: int = 5
    eta: float = 0.005

    def __post_init__(self) -> None:
        number("lam", self.lam, above=0)
        integer("K", self.K, at_least=1)
        number("eta", self.eta, above=0)

    def init_client(self, server: State) -> State:
        return {"theta": server["w"]}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        if round.lr * self.lam >= 2:
            raise ValueError(
                "lr * lam must be below 2, or every step of theta about w_i is longer than the one before; "
                f"got lr={round.lr:g} and lam={self.lam:g}. Use an lr below {2 / self.lam:.3g}, or a smaller lam"
            )
        return LocalUpdate(
            proximal_coefficient=self.lam,
            gradient_offset=-self.lam * server["w"],
            envelope=Envelope(self.K, self.eta * self.lam),
        )

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        assert results.inner is not None  # local_update asked for an envelope
        return {"theta": server["w"] + results.inner}, Upload(mean={"delta": results.delta})

    def own_model(self, server: State, client: State) -> Tensor:
        return client["theta"]
