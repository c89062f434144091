"""Many clients are looked at together: what a run does before its first round does not call torch for each of them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed.clients import population, store
from fastsam.fed.clients import prepare as preparing
from fastsam.fed.clients.pairs import ALIGNMENT, all_finite
from fastsam.fed.clients.population import Population, check_labels
from fastsam.fed.clients.prepare import prepare
from tests.helpers import oracle

MANY = 2000
CPU = torch.device("cpu")


def clients(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=generator), torch.arange(n) % 3) for n in sizes]


def one_by_one(pairs: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch) -> Population:
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_together", lambda *arguments: None)
        return prepare(pairs, None, torch.float32, CPU)


def test_clients_are_checked_once_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    checked, ranges = preparing.checked_pair, population._check_range
    monkeypatch.setattr(
        preparing, "checked_pair", lambda pair, who, *rest: calls.append(who) or checked(pair, who, *rest)
    )
    monkeypatch.setattr(population, "_check_range", lambda y, who, *rest: calls.append(who) or ranges(y, who, *rest))
    data = clients([4] * MANY)
    check_labels(prepare(data, data[0], torch.float32, CPU), 3)
    assert calls == ["all clients", "the test set", "the test set"]


@pytest.mark.parametrize("sizes", [[4, 1, 9, 3], [16, 32, 16], [1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_together_they_are_what_they_are_one_by_one(
    sizes: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [(x.abs().to(dtype), y) for x, y in clients(sizes)]
    ours, theirs = prepare(data, None, torch.float32, CPU), one_by_one(data, monkeypatch)
    assert ours.store is not None and theirs.store is not None
    assert ours.store.x.dtype == (torch.uint8 if dtype == torch.uint8 else torch.float32), "bytes stay bytes"
    assert list(ours.store.begins) == list(theirs.store.begins) and ours.sizes == theirs.sizes
    for mine, other in zip(ours.clients, theirs.clients, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b) and a.data_ptr() % ALIGNMENT == 0
    assert torch.equal(ours.store.x, theirs.store.x) and torch.equal(ours.store.y, theirs.store.y)
    assert ours.fingerprint() == Population(theirs.clients, None, None, None).fingerprint(), (
        "as in checkpoints of before"
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x, y: (x * float("nan"), y), "client 1: x holds NaN"),
        (lambda x, y: (x[1:], y), "client 1: x has 3 samples and y 4"),
        (lambda x, y: (x[:0], y[:0]), "client 1 has no samples"),
        (lambda x, y: (x.to_sparse(), y), "x of client 1 must be a dense real tensor"),
        (lambda x, y: x, "client 1 must be a pair"),
        (lambda x, y: (x, y + 3), "client 1: labels must lie in 0..2 .*got 3"),
    ],
)
def test_whose_fault_it_is_is_still_told(spoil, words: str) -> None:
    data = clients([4, 4, 4])
    data[1] = spoil(*data[1])
    with pytest.raises(ValueError, match=words):
        fed.run(torch.nn.Linear(3, 3), data, fed.FedAvg(), rounds=1)


def test_a_run_of_many_clients_is_that_of_clients_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [(x, y) for x, y in oracle.ragged_clients(torch.float32, [3] * 40)]
    options = {"rounds": 2, "participation": 0.3, "test": data[0]}
    ours = fed.run(oracle.smooth_model(torch.float32), data, fed.FedAvg(), **options)
    monkeypatch.setattr(preparing, "_together", lambda *arguments: None)
    theirs = fed.run(oracle.smooth_model(torch.float32), data, fed.FedAvg(), **options)
    assert [r["client_accuracy_mean"] for r in ours.history] == [r["client_accuracy_mean"] for r in theirs.history]
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))


def calls_before_the_first_round(many: int) -> int:
    """Calls of functions, of Python's and of C's, that a run of so many clients makes."""
    data, test = clients([4] * many), clients([32])[0]
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        fed.run(
            torch.nn.Linear(3, 3), data, fed.FedAvg(), rounds=1, participation=0.5 / many, sampler="fixed", test=test
        )
    finally:
        sys.setprofile(None)
    return count


def test_a_client_costs_few_calls_before_the_first_round() -> None:
    """Each of them is dealt a test sample, which takes ten: a hundred thousand clients are ready in two seconds."""
    calls_before_the_first_round(10)  # what is imported and made once
    few, many = (calls_before_the_first_round(n) for n in (1000, 3000))
    assert (many - few) / 2000 < 25


def test_a_client_of_a_store_becomes_tensors_when_it_is_asked_for() -> None:
    data = clients([4, 1, 9])
    found = prepare(data, None, torch.float32, CPU).clients
    assert len(found) == 3 and found[1] is found[1]
    for pairs in (list(found), [found[i] for i in range(3)]):
        assert all(
            torch.equal(a, b) for own, pair in zip(pairs, data, strict=True) for a, b in zip(own, pair, strict=True)
        )
    with pytest.raises(IndexError):
        found[3]


def test_of_much_data_there_is_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clients([4, 1, 9])
    for module in (preparing, store):
        monkeypatch.setattr(module, "LARGEST", 100)
    found = prepare(data, None, torch.float32, CPU)
    aligned = [(x, y) for x, y in data if x.data_ptr() % ALIGNMENT == y.data_ptr() % ALIGNMENT == 0]
    kept = {t.data_ptr() for pair in found.clients for t in pair}
    assert found.store is None and aligned and all(t.data_ptr() in kept for pair in aligned for t in pair)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_not_finite_is_found_wherever_it_is(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50).to(dtype)
    assert all_finite(x) and all_finite(x[:0]) and all_finite(torch.full((9,), torch.finfo(dtype).max, dtype=dtype))
    for place in (0, 77, 149):
        spoiled = x.clone().flatten()
        spoiled[place] = bad
        assert not all_finite(spoiled) and not all_finite(spoiled.view(3, 50).t())
