"""Dropout under `vmap`: which elements are dropped depends on the client and its step, on nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.common import seeds
from fastsam.fed.data import FederatedData
from fastsam.fed.executors.stacked_dropout import StackedDropout, keeps
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_devices import install_step_graphs
from tests.helpers.fed_runs import FLOAT, digest, vector
from tests.promises.stacked_cases import CASES, DROPOUT

SIZES = (9, 12, 4, 7, 12)
MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """The hash of SplitMix64, Figure 17 of the paper, in whole numbers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("call", [1, 2, 1000])
def test_the_numbers_are_those_of_the_paper(call: int, p: float) -> None:
    keys = torch.tensor([0, 5, -3, 2**63 - 1])
    kept = keeps(keys, call, (3, 4), p)
    for row, key in enumerate(keys.tolist()):
        state = (key ^ call * 0x9E3779B97F4A7C15) & MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
        hashes = [splitmix(state + (i + 1) * 0x9E3779B97F4A7C15 & MASK) for i in range(12)]
        numbers = [(number + 2**63 & MASK) / 2**64 for number in hashes]  # as signed numbers are ordered
        assert kept[row].flatten().tolist() == [number < p for number in numbers]
        assert torch.equal(keeps(keys[row], call, (3, 4), p), kept[row])


def test_elements_are_kept_independently() -> None:
    """Shares and correlations within four standard deviations: of rows, calls, neighbouring seeds and elements."""
    n, draw = 100_000, torch.Generator().manual_seed(0)
    keys = torch.cat([torch.arange(5), torch.randint(2**62, (5,), generator=draw)])
    bound = 4 / n**0.5
    for p in (0.1, 0.5, 0.9):
        share = keeps(keys, 1, (n,), p).double().mean(1)
        assert float((share - p).abs().max()) < bound * (p * (1 - p)) ** 0.5
    first, second = ((keeps(keys, call, (n,), 0.5).double() - 0.5) * 2 for call in (1, 2))
    rows = first @ first.T / n - torch.eye(10)
    between_calls = (first * second).mean(1)
    lags = torch.stack([(first[:, :-lag] * first[:, lag:]).mean(1) for lag in (1, 2, 8, 64)])
    assert max(float(x.abs().max()) for x in (rows, between_calls, lags)) < bound


def model_of(name: str) -> nn.Module:
    return CASES[f"dropout: {name}"].model_of(FLOAT)


def train(model: nn.Module, algorithm: fed.Algorithm | None = None, slots: int = 5, **options: Any) -> fed.Result:
    clients = options.pop("clients", None) or oracle.ragged_clients(FLOAT, SIZES)
    base = {"rounds": 3, "batch_size": 4, "participation": 1.0, "lr": 0.1, "executor": "vmap", "slots": slots}
    return fed.run(model, clients, algorithm or fed.FedSAM(rho=0.05), **base | options)


@pytest.mark.parametrize("name", DROPOUT)
def test_stacked_equals_a_loop_over_one_client(name: str) -> None:
    """Two whole batches in their order, by torch's autograd, with the seed of each step."""
    clients = oracle.ragged_clients(FLOAT, (8, 8))
    model = CASES[name].model_of(FLOAT)
    result = train(model, fed.FedAvg(), clients=clients, rounds=1, shuffle=False, momentum=0.0, seed=3)
    deltas = []
    for client, (x, y) in enumerate(clients):
        local = CASES[name].model_of(FLOAT).train()
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        for k in range(2):
            key = seeds.derive(seeds.derive(3, "client", 0, client), "pass", k)
            with StackedDropout(torch.tensor(key)):
                F.cross_entropy(local(x[4 * k : 4 * k + 4]), y[4 * k : 4 * k + 4]).backward()
            optimizer.step()
            optimizer.zero_grad()
        deltas.append(vector(local))
    torch.testing.assert_close(vector(result.model), torch.stack(deltas).mean(0), rtol=1e-5, atol=1e-6)


def test_both_passes_of_a_step_drop_the_same() -> None:
    """With a radius near zero a step of SAM is then a step of SGD."""
    sgd, sam = (train(model_of("elements"), a) for a in (fed.FedAvg(), fed.FedSAM(rho=1e-6)))
    torch.testing.assert_close(vector(sam.model), vector(sgd.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm", [fed.FedNTD(), fed.FedSOL(rho=0.5), fed.MimeLite()], ids=["objective", "teacher", "first"]
)
def test_objectives_teachers_and_first_gradients(algorithm: fed.Algorithm) -> None:
    """Their passes draw in evaluation mode too."""
    one, many = (vector(train(model_of("always"), algorithm, slots=slots).model) for slots in (1, 5))
    torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-6)


def test_augmented_samples_and_dicts() -> None:
    def noise(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    pairs = oracle.ragged_clients(FLOAT, SIZES)
    augmented = FederatedData(pairs, pairs[0], classes=3, augment=noise)
    one, many = (vector(train(model_of("elements"), slots=n, clients=augmented).model) for n in (1, 5))
    torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-6)
    clients = [{"x": x, "labels": y} for x, y in oracle.ragged_clients(FLOAT, SIZES)]
    loss = fed.BatchLoss(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]))
    of_pairs, of_dicts = (train(model_of("elements"), **o) for o in ({}, {"clients": clients, "loss": loss}))
    torch.testing.assert_close(vector(of_pairs.model), vector(of_dicts.model), rtol=1e-5, atol=1e-6)


def test_a_resumed_run_has_its_bits(tmp_path: Path) -> None:
    whole = digest(train(model_of("elements"), rounds=4))
    train(model_of("elements"), rounds=2, run_dir=tmp_path)
    assert digest(train(model_of("elements"), rounds=4, run_dir=tmp_path, resume=True)) == whole


def test_captured_steps_drop_by_the_seeds_of_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"rounds": 5, "backend": "reference", "local_epochs": 2}
    plain = vector(train(model_of("elements"), **options).model)
    install_step_graphs(monkeypatch)
    captured = vector(train(model_of("elements"), **options).model)
    assert sum(graph.replays for graph in FakeCuda.graphs) >= 4
    torch.testing.assert_close(captured, plain, rtol=1e-5, atol=1e-6)


def test_passes_are_replayed(caplog: pytest.LogCaptureFixture) -> None:
    train(model_of("transformer"), rounds=5)
    assert "not replayed" not in caplog.text
