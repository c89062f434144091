"""`aggregation=function`: its arguments, its result as the server's update, and refusals."""

from typing import Any

import torch
from torch import Tensor

from fastsam import fed
from tests.helpers import fed_runs
from tests.helpers.fed_runs import same_bits


def mean(rows: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None] * rows.double()).sum(0) / weights.sum()


def run(aggregation: Any, algorithm: fed.Algorithm | None = None, executor: str = "sequential", **options: Any) -> Any:
    return fed_runs.run(algorithm or fed.FedSAM(), executor, aggregation=aggregation, **options)


def test_the_mean_as_a_function_is_the_mean() -> None:
    plain, result = (run(aggregation, weighting="samples").model for aggregation in ("mean", mean))
    for p, q in zip(plain.parameters(), result.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_rule_as_a_function_has_its_bits() -> None:
    def median(rows: Tensor, weights: Tensor) -> Tensor:
        sorted_rows, n = rows.sort(dim=0).values.double(), len(rows)
        return (sorted_rows[(n - 1) // 2] + sorted_rows[n // 2]) / 2

    assert same_bits(run(median).model, run("median").model)


def test_it_is_called_once_a_round_with_the_clients_in_order() -> None:
    calls: list[tuple[tuple[int, ...], list[float]]] = []

    def record_call(rows: Tensor, weights: Tensor) -> Tensor:
        calls.append((tuple(rows.shape), weights.tolist()))
        return rows.double().mean(0)

    result = run(record_call, rounds=3, weighting=[*range(1, 9)], executor="threads", participation=1.0)
    assert len(calls) == 3 and all(weights == sorted(weights) for _, weights in calls)
    assert [shape[0] for shape, _ in calls] == [r["clients"] for r in result.history]
    assert "left_out" not in result.history[0]
