"""Short runs that take measures."""

from typing import Any

from torch import nn

from fastsam import fed
from tests.helpers import oracle


def run(
    algorithm: fed.Algorithm | None = None,
    measures: Any = (),
    clients: Any = None,
    model: nn.Module | None = None,
    **options: Any,
) -> fed.Result:
    clients = oracle.ragged_clients() if clients is None else clients
    test = oracle.ragged_clients(sizes=(40,), seed=9)[0]
    settings: dict[str, Any] = {
        "rounds": 3, "batch_size": 5, "participation": 0.6, "test": test, "backend": "reference",
    }  # fmt: skip
    model = oracle.smooth_model() if model is None else model
    return fed.run(model, clients, algorithm or fed.FedSAM(rho=0.1), measures=measures, **(settings | options))


def measure_of(snapshots: Any = lambda *a: (), clients: Any = lambda *a: {}, round: Any = lambda *a: {}) -> Any:
    """Return a measure of a user's own with these methods."""
    methods = {"snapshots": snapshots, "clients": clients, "round": round}
    return type("Own", (), {name: staticmethod(method) for name, method in methods.items()})()
