"""Measures of clients that start elsewhere than at the global model, computed by their definitions in plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import oracle

MEASURES = fed.NamedMeasures(["consistency", "smoothness"], iterations=2)
CASES: dict[str, tuple[type[fed.Algorithm], dict[str, Any], dict[str, Any]]] = {
    "global model": (fed.FedSAM, {"rho": 0.1}, {}),
    "constant direction": (fed.FedLESAM, {"rho": 0.1}, {}),
    "FedNSAM": (fed.FedNSAM, {"rho": 0.1}, {}),
    "FedNSAM along the momentum": (fed.FedNSAM, {"rho": 0.1, "perturb": "momentum"}, {}),
    "FedExP": (fed.FedExP, {}, {}),
    "FedGloSS": (fed.FedGloSS, {"rho": 0.2, "rho_local": 0.1}, {}),
    "local parameters": (fed.FedSAM, {"rho": 0.1}, {"local_parameters": "2"}),
}


class Watch:
    """A measure that keeps the weights of all clients before their steps and after the last, as vectors."""

    def __init__(self) -> None:
        self.paths: dict[int, dict[int, list[Tensor]]] = {}
        self.w: list[Tensor] = []

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        return tuple(range(steps))

    def clients(self, old_state: Any, results: fed.ClientResults, context: Any) -> dict[str, list[float]]:
        assert results.snapshots is not None
        for i, snapshots, delta in zip(results.client_ids, results.snapshots, results.delta, strict=True):
            weights = [snapshots[k].w for k in sorted(snapshots)]
            self.paths.setdefault(context.index, {})[i] = [*weights, weights[0] + delta]
        return {}

    def round(self, old_state: Any, new_state: Any, aggregate: Any, context: Any) -> dict[str, float]:
        self.w.append(new_state["w"])
        return {}


def run(algorithm: fed.Algorithm, **options: Any) -> fed.Result:
    common: dict[str, Any] = {"rounds": 3, "participation": 0.6, "batch_size": 5, "lr": 0.3, "executor": "sequential"}
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(), algorithm, **common | options)


def gradient(weights: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
    model = oracle.smooth_model()
    nn.utils.vector_to_parameters(weights, model.parameters())
    loss = F.cross_entropy(model(pair[0]), pair[1])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def smoothness(path: list[Tensor], pair: tuple[Tensor, Tensor]) -> float:
    """Return the largest ratio between neighbours: before the first, the middle and the last step, and after it."""
    steps = len(path) - 1
    points = [path[k] for k in sorted({0, (steps - 1) // 2, steps - 1, steps})]
    gradients = [gradient(point, pair) for point in points]
    return max(
        float((gradients[i] - gradients[i - 1]).norm() / (points[i] - points[i - 1]).norm())
        for i in range(1, len(points))
    )


@pytest.mark.parametrize("name", CASES)
def test_both_measures_are_of_the_clients_own_weights(name: str) -> None:
    base, arguments, options = CASES[name]
    watch, clients = Watch(), oracle.ragged_clients()
    run(base(**arguments), measures=watch, **options)
    records = run(base(**arguments), measures=MEASURES, **options).history
    for t, record in enumerate(records):
        ends = [path[-1] for path in watch.paths[t].values()]
        consistency = sum(float((end - watch.w[t]).square().sum()) for end in ends) / len(ends)
        assert record["consistency"] == pytest.approx(consistency, rel=1e-9)
        largest = max(smoothness(path, clients[i]) for i, path in watch.paths[t].items())
        assert record["smoothness_clients"] == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", ["threads", "vmap"])
def test_other_executors_measure_the_same(name: str, executor: str) -> None:
    base, arguments, options = CASES[name]
    one, two = (run(base(**arguments), measures=MEASURES, executor=e, **options) for e in ("sequential", executor))
    for a, b in zip(one.history, two.history, strict=True):
        for key in ("consistency", "smoothness_clients"):
            assert a[key] == pytest.approx(b[key], rel=1e-7)
