"""An algorithm that sends prototypes in place of weights: FedProto (Tan et al., "FedProto: Federated Prototype Learning
across Heterogeneous Clients", 2022). The server averages a mean feature vector per class. Weights stay with the
clients.

    python examples/prototypes.py
    fastsam run examples/digits.toml --model mlp --algorithm examples/prototypes.py:FedProto
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed import Aggregate, Algorithm, Client, ClientResults, Round, State, Upload, models


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Prototypes of classes in place of weights. The model's last layer is named `out`.

    Args:
        mu: weight of the distance between features and prototypes.
        classes: number of classes.
        features: number of inputs of the last layer; 64 for the model `mlp`.
    """

    own_models: ClassVar[bool] = True
    uses_sums: ClassVar[bool] = True

    mu: float = 1.0
    classes: int = 10
    features: int = 64

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "prototypes": torch.zeros(self.classes, self.features, dtype=w0.dtype)}

    def init_client(self, server: State) -> State:
        return {"v": server["w"]}

    def train_client(self, client: Client, server: State, state: State, round: Round) -> dict[str, Tensor]:
        client.start_from(state["v"])
        prototypes, features = server["prototypes"], list[Tensor]()

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            features.append(inputs[0])

        hook = client.model.out.register_forward_pre_hook(keep)
        try:
            for x, y in client.batches():
                client.step(x, y, penalty=lambda _, y=y: self.mu * F.mse_loss(features[-1], prototypes[y]))
            sums, counts = torch.zeros_like(prototypes), torch.zeros(len(prototypes))
            for x, y in client.full_batches():
                with torch.no_grad():
                    client.loss(x, y)
                sums.index_add_(0, y, features[-1])
                counts += y.bincount(minlength=len(counts))
        finally:
            hook.remove()
        return {"sums": sums, "counts": counts}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        upload = Upload(sum={"sums": results.extra["sums"], "counts": results.extra["counts"]})
        return {"v": client["v"] + results.delta}, upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        sums, counts = aggregate.sum("sums"), aggregate.sum("counts")[:, None]
        means = (sums / counts.clamp(min=1)).to(server["prototypes"].dtype)
        return {"w": server["w"], "prototypes": torch.where(counts > 0, means, server["prototypes"])}

    def own_model(self, server: State, client: State) -> Tensor:
        return client["v"]


def main() -> None:
    data = fed.digits(clients=50, alpha=0.3)
    model = models.build("mlp", data.in_shape, data.classes, seed=0)
    result = fed.run(model, data, FedProto(features=model.out.in_features), rounds=20)
    print(f"FedProto: {100 * result.history[-1]['client_accuracy_mean']:.1f} %, each client with its own model")


if __name__ == "__main__":
    main()
