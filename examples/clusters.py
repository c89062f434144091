"""An algorithm with a global model per cluster of clients: IFCA (Ghosh et al., "An Efficient Framework for Clustered
Federated Learning", 2020). A client trains the model with the smallest loss on its data.

    python examples/clusters.py
    fastsam compare examples/digits.toml --algorithms fedavg,examples/clusters.py:IFCA
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed import Aggregate, Algorithm, Client, ClientResults, Round, State, Upload, apply_update, models


@dataclass(frozen=True)
class IFCA(Algorithm):
    """Clusters of clients, with a model each.

    Args:
        clusters: number of global models; the first one is evaluated on the test set.
    """

    own_models: ClassVar[bool] = True  # evaluate a client with the model of its cluster

    clusters: int = 2

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0} | {f"w{j}": w0 * (1 + 0.1 * j) for j in range(self.clusters)}

    def init_client(self, server: State) -> State:
        return {"cluster": torch.zeros(1, dtype=torch.int64)}

    def train_client(self, client: Client, server: State, state: State, round: Round) -> dict[str, Tensor]:
        losses = []
        for j in range(self.clusters):
            client.w = server[f"w{j}"]
            with torch.no_grad():
                losses.append(sum(client.loss(x, y) * len(y) for x, y in client.full_batches()))
        cluster = torch.stack(losses).argmin(0, keepdim=True)
        client.start_from(server[f"w{cluster.item()}"])
        for x, y in client.batches():
            client.step(x, y)
        return {"cluster": cluster}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        cluster = results.extra["cluster"]  # [n, 1]
        mean = {f"delta{j}": results.delta * (cluster == j) for j in range(self.clusters)}
        return {"cluster": cluster}, Upload(mean=mean)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        after = {}
        for j in range(self.clusters):
            change = round.server_lr * aggregate.mean(f"delta{j}")
            after[f"w{j}"] = apply_update(server[f"w{j}"], change)
        return {"w": after["w0"], **after}

    def own_model(self, server: State, client: State) -> Tensor:
        return server[f"w{client['cluster'].item()}"]


def main() -> None:
    data = fed.digits(clients=50, alpha=0.3)
    model = models.build("mlp", data.in_shape, data.classes, seed=0)
    result = fed.run(model, data, IFCA(), rounds=20)
    print(f"IFCA: {100 * result.history[-1]['client_accuracy_mean']:.1f} %, each client with its cluster's model")


if __name__ == "__main__":
    main()
