"""MimeLite: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich and Suresh, "Breaking the Centralized Barrier for
Cross-Device Federated Learning", NeurIPS 2021 (Algorithm 1, MimeLite, with SGD with momentum as the base optimizer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.common.checks import choice, number
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows

FORMS = ("convex", "heavy_ball")


@dataclass(frozen=True, eq=False)
class WithFullGradient(Step):
    """A step whose round begins with the gradient over all samples of a client, which is a result."""

    outputs: ClassVar[tuple[str, ...]] = ("full_gradient",)

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows.put("full_gradient", passes.all())


@dataclass(frozen=True)
class MimeLite(Algorithm):
    """Local steps with the server's momentum m, which is frozen in a round and made of full gradients at w^t.

        w <- w - lr * (beta*g + (1 - beta)*m^t + weight_decay*w)
        m^{t+1} = beta * mean_i G_i + (1 - beta)*m^t,  G_i the gradient over all of client i's samples at w^t,  m^0 = 0

    The server's step is FedAvg's. G_i is taken in evaluation mode, without augmentation and weight decay. The
    run's `privacy.clip` bounds the displacement and G_i, each by itself. Per round and client 2 P down (w, m) and 2 P
    up (displacement, G_i); state: w, m. One backward pass a step, and one more pass over the data per round.

    Args:
        beta: weight of a new gradient; 1 is FedAvg.
        momentum_form: "convex" as above (Qu et al. 2022 tune one beta for FedCM, MimeLite and MoFedSAM), or
            "heavy_ball", `g + (1 - beta)*m` and `G + (1 - beta)*m`, as in the authors' code: the same directions,
            1/beta times as long.
    """

    download_vectors: ClassVar[float] = 2
    upload_vectors: ClassVar[float] = 2

    beta: float = hparam(0.1, number, at_least=0, at_most=1)
    momentum_form: str = hparam("convex", choice, FORMS)

    @property
    def _fresh(self) -> float:
        """The weight of a new gradient."""
        return self.beta if self.momentum_form == "convex" else 1.0

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "m": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return WithFullGradient(a=self._fresh, q=(1 - self.beta) * server["m"])

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        return client, Upload(mean={"delta": results.delta, "G": results.outputs["full_gradient"]})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        m = self._fresh * aggregate.mean("G") + (1 - self.beta) * server["m"].double()
        return {**super().step_server(server, aggregate, round), "m": m.to(server["m"].dtype)}
