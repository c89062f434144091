"""`compression=fed.TopK(share)`: its costs and refusals. Its numbers are compared in tests/fed/test_features.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.stages.compression import largest
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import vector

SHARE, LR, PARAMETERS = 0.3, 0.2, 15


def clients() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(2)
    sizes = (5, 8, 6, 7)
    return [(torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)) for n in sizes]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3).double()


def run(share: float | None = SHARE, **options: Any) -> fed.Result:
    inputs = {"rounds": 4, "participation": 1.0, "batch_size": 8, "lr": LR, "executor": "sequential"} | options
    algorithm = inputs.pop("algorithm", fed.FedAvg())
    compression = None if share is None else fed.TopK(share)
    return fed.run(model(), clients(), algorithm, compression=compression, **inputs)


def test_all_elements_are_no_compression() -> None:
    assert torch.equal(vector(run(share=1.0).model), vector(run(share=None).model))


def test_other_uploads_stay_as_they_are() -> None:
    """SCAFFOLD's control variates are not compressed, and its deltas are."""
    run_1, run_2 = run(algorithm=fed.SCAFFOLD()), run(algorithm=fed.SCAFFOLD(), share=None)
    assert run_1.history[0]["train_loss"] == run_2.history[0]["train_loss"]
    assert not torch.equal(vector(run_1.model), vector(run_2.model))


def test_the_largest_elements() -> None:
    rows = torch.tensor([[0.0, -3.0, 1.0, 2.0], [5.0, 0.0, 0.0, -1.0]])
    assert largest(rows, 2).tolist() == [[0.0, -3.0, 0.0, 2.0], [5.0, 0.0, 0.0, -1.0]]


@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.SCAFFOLD()], ids=repr)
def test_local_parameters_are_no_part_of_the_share_and_of_the_traffic(algorithm: fed.Algorithm) -> None:
    """Only the bias, 3 of 15 parameters, is sent: k is 1, and other vectors have 3 elements."""
    options: dict[str, Any] = {"algorithm": algorithm, "local_parameters": "weight", "rounds": 1}
    record = run(**options).history[0]
    others = algorithm.upload_vectors - 1
    assert record["megabytes_up"] == pytest.approx(4 * (math.ceil(SHARE * 3) * (8 + 4) + others * 3 * 8) / 1e6)
    moves = [vector(run(sampler=lambda t, g, i=i: [i], **options).model) - vector(model()) for i in range(4)]
    assert [move.count_nonzero().item() for move in moves] == [1, 1, 1, 1]


def test_a_delta_that_is_also_sent_whole_counts() -> None:
    """The server of FedDyn needs the plain sum of the deltas, which is not compressed."""
    record = run(algorithm=fed.FedDyn(), rounds=1).history[0]
    assert record["megabytes_up"] == pytest.approx(4 * (PARAMETERS * 8 + math.ceil(SHARE * PARAMETERS) * 12) / 1e6)


class Renamed(fed.FedAvg):
    """FedAvg with another name of its upload."""

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        return client, fed.Upload(mean={"change": results.delta})


def test_clients_that_send_no_delta_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="needs clients that send their delta, but finish of Renamed"):
        run(algorithm=Renamed())


def test_the_normalised_deltas_of_fednova_are_compressed() -> None:
    """With one step for each client FedNova is FedAvg."""
    runs = [run(algorithm=algorithm, batch_size=8) for algorithm in (fed.FedNova(), fed.FedAvg())]
    torch.testing.assert_close(*(vector(one.model) for one in runs), rtol=1e-12, atol=1e-14)


def run_compression(compression: Any) -> None:
    fed.run(model(), clients(), fed.FedAvg(), rounds=1, compression=compression)


test_refused = refusals(
    (lambda: run(run_dir="run", privacy=fed.Privacy(clip=1.0, noise_multiplier=1.0, accountant=None)),
     r"compression=TopK\(share=0.3\) needs no noise.*noise_multiplier=1"),
    (lambda: run(run_dir="run", aggregation="median"),
     r"compression=TopK\(share=0.3\) needs the mean of the deltas, but aggregation='median'"),
    (lambda: run_compression({"share": 0}), "share must be a finite number > 0 and <= 1, got 0"),
    (lambda: run_compression({"share": 1.5}), "share must .* <= 1, got 1.5"),
    (lambda: run_compression({"shar": 0.1}), "compression has no option 'shar' .did you mean 'share'"),
    (lambda: run_compression(0.1), "compression must be a fed.TopK, or a table of its options; got 0.1"),
)  # fmt: skip
