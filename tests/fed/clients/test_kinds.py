"""A client may be a pair, a data set, a loader, a tree of columns, or a list of samples: the same samples give the same
bits."""

import random
import sys
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fastsam import fed
from fastsam.fed.clients import packed_samples
from fastsam.fed.clients import prepare as preparing
from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.pairs import ALIGNMENT, all_finite
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.clients.samples import TensorSamples
from tests.helpers.fed_kinds import KINDS, OfParts, Rows, in_another_collate, model, pairs, run, weights
from tests.helpers.fed_runs import excluded_clients

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_in_a_data_set_are_stacked_once_and_are_then_pairs(kind: str) -> None:
    population = prepare([KINDS[kind](x, y) for x, y in pairs()], KINDS[kind](*pairs()[0]), torch.float32, CPU)
    plain = prepare(pairs(), pairs()[0], torch.float32, CPU)
    assert population.clients.pairs and isinstance(population.test, TensorSamples)
    assert population.fingerprint() == plain.fingerprint()
    assert (population.clients.store is None) == (plain.clients.store is None)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_samples_that_are_read_in_batches_give_the_bits_of_pairs(executor: str) -> None:
    plain = run(pairs(), executor="sequential")
    tests = {"pair": pairs()[3], "nested": Rows(*pairs()[3], "nested")}
    tests["columns"] = ((pairs()[3][0][:, :3], pairs()[3][0][:, 3:]), pairs()[3][1].to(torch.uint8))
    columns = [((x[:, :3], x[:, 3:]), y) for x, y in pairs()]
    for options in (
        {"clients": [DataLoader(Rows(x, y), collate_fn=in_another_collate) for x, y in pairs()]},
        {"clients": [Rows(x, y) for x, y in pairs()], "collate": in_another_collate},
        {"clients": [TensorDataset(x, y) for x, y in pairs()], "collate": in_another_collate, "shuffle": True},
        {"clients": [Rows(x, y, "nested") for x, y in pairs()], "model": OfParts(), "test": tests["nested"]},
        {"clients": columns, "model": OfParts(), "test": tests["columns"]},
    ):
        result = run(options.pop("clients"), executor=executor, **options)
        assert torch.equal(weights(result), weights(plain)), options
        for key in ("test_loss", "test_accuracy", "train_loss"):
            assert result.history[-1][key] == pytest.approx(plain.history[-1][key], rel=1e-6), (key, options)


def test_a_data_set_larger_than_the_limit_is_read_batch_by_batch(monkeypatch: MonkeyPatch) -> None:
    plain = run(pairs(), executor="sequential")
    monkeypatch.setattr(preparing, "LARGEST_READ", 1000)
    clients = [Rows(x, y) for x, y in pairs()]
    population = prepare(clients, None, torch.float32, CPU)
    assert not population.clients.pairs and max(data.reads for data in clients) < 10, "looked at, not read"
    assert torch.equal(weights(run(clients)), weights(plain))


def noisy(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Samples that are others whenever they are read, by torch's, numpy's or Python's generator."""

    class Noisy(Rows):
        def __getitem__(self, i: int) -> Any:
            sample, label = super().__getitem__(i)
            return sample + torch.randn(6) * random.random() + np.random.rand(), label

    return Noisy(x, y)


def test_transforms_that_draw_are_drawn_anew_in_every_epoch_and_are_functions_of_the_seed() -> None:
    clients = [noisy(x, y) for x, y in pairs()]
    model()  # seeds torch's generator, as the model of every run here does
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = run(clients, slots=1)
    assert torch.equal(states[0], torch.get_rng_state()) and states[2] == random.getstate()
    assert (states[1] == np.random.get_state()[1]).all()
    assert first.summary()["executor"] == "sequential"
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert torch.equal(weights(run(clients)), weights(first)), "whatever was drawn before"
    assert not torch.equal(weights(run(clients, seed=1)), weights(first))
    with pytest.raises(ValueError, match="reading a batch draws random numbers"):
        run(clients, executor="threads")


def test_a_drawing_data_set_gives_other_numbers_in_another_epoch() -> None:
    records: list[torch.Tensor] = []

    def look(m: Any, batch: Any) -> torch.Tensor:
        records.append(batch[0].clone())
        return F.cross_entropy(m(batch[0]), batch[1])

    options = {"rounds": 1, "local_epochs": 2, "batch_size": 16, "shuffle": False, "test": None}
    run([noisy(*pairs()[0])], loss=fed.BatchLoss(look), **options)
    first_pass, repeat = (
        records[2],
        records[4],
    )  # seen[0] and seen[1] belong to the trial step; first pass of a step with two passes
    assert torch.equal(records[2], records[3]) and not torch.equal(first_pass, repeat)


def test_numbers_that_no_seed_reaches_are_refused() -> None:
    generator = np.random.default_rng(0)

    class Noisy(Rows):
        def __getitem__(self, i: int) -> Any:
            return self.x[i] + generator.random(), 0

    with pytest.raises(ValueError, match=r"client 1: sample 0 is another one when it is read again.*own generators"):
        run([pairs()[0], Noisy(*pairs()[1])])


def test_a_user_dict_of_a_collate_and_strings_reach_the_loss() -> None:
    records: list[Any] = []

    def look(m: Any, batch: Any) -> torch.Tensor:
        records.append(batch)
        return F.cross_entropy(m(batch["x"]), batch["label"])

    data = [{"x": row.double().numpy(), "label": int(c), "name": "n"} for row, c in zip(*pairs()[0], strict=True)]
    run([data], loss=fed.BatchLoss(look), rounds=1, test=None)
    assert type(records[0]) is dict and records[0]["name"] == ["n"] * 4 and records[0]["x"].dtype == torch.float32
    loader = DataLoader(data, collate_fn=lambda items: UserDict(in_another_collate(items)))
    run([loader], loss=fed.BatchLoss(look), rounds=1, test=None)
    assert type(records[-1]) is dict and records[-1]["label"].dtype == torch.int64


GOOD = pairs()[0]


def test_a_read_that_fails_before_the_run_names_client_and_sample() -> None:
    class Broken(Rows):
        def __getitem__(self, i: int) -> Any:
            raise OSError("no such file")

    with pytest.raises(ValueError, match="client 1: reading sample 0 failed: OSError: no such file"):
        run([GOOD, Broken(*GOOD)])


def test_a_read_that_fails_in_a_round_names_the_client_or_leaves_it_out() -> None:
    class Late(Rows):
        def __getitem__(self, i: int) -> Any:
            if self.reads > 30:
                raise OSError("gone")
            return super().__getitem__(i)

    def clients() -> list[Any]:
        return [Rows(*pairs()[0]), Late(*pairs()[1]), Rows(*pairs()[2])]

    with pytest.raises(fed.ClientError, match="client 1 failed in round 3, local step .*OSError: gone"):
        run(clients(), rounds=4, collate=in_another_collate)
    result = run(clients(), rounds=4, collate=in_another_collate, on_client_error="exclude")
    assert excluded_clients(result) == [[], [], [1], [1]]


def test_labels_all_ignored_are_said(caplog: pytest.LogCaptureFixture) -> None:
    x, y = pairs()[1]
    unlabelled_samples = [(row, -100) for row in x]
    with pytest.raises(ValueError, match="client 1: all labels are -100"):
        run([GOOD, unlabelled_samples])
    trees = [{"x": a, "labels": b} for a, b in (GOOD, (x, torch.full_like(y, -100)))]
    loss = fed.BatchLoss(lambda m, batch: F.cross_entropy(m(batch["x"]), batch["labels"]))
    result = run(trees, loss=loss, test=None, model=model())
    assert "11 of its 11 labels are -100" in result.history[0]["excluded"][0]["reason"]


def test_a_resumed_run_knows_its_data_again(tmp_path: Any) -> None:
    data = [Rows(x, y) for x, y in pairs()]
    full_run = run(data, collate=in_another_collate, rounds=3)
    options = {"collate": in_another_collate, "run_dir": tmp_path / "run"}
    run(data, rounds=1, **options)
    with pytest.raises(fed.RunDirectoryError, match="data"):
        run([Rows(x + 1, y) for x, y in pairs()], rounds=3, resume=True, **options)
    with pytest.raises(fed.RunDirectoryError, match="collate"):
        run(data, rounds=3, resume=True, **options | {"collate": lambda i: in_another_collate(i)})
    result = run(data, rounds=3, resume=True, **options)
    assert torch.equal(weights(result), weights(full_run))


# --- Many clients are looked at together: what a run does before its first round does not call torch for each of them.


def clients(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=generator), torch.arange(n) % 3) for n in sizes]


def one_by_one(pairs: list[tuple[Tensor, Tensor]], monkeypatch: MonkeyPatch) -> Population:
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_pack", lambda *arguments: None)
        return prepare(pairs, None, torch.float32, CPU)


@pytest.mark.parametrize("sizes", [[4, 1, 9, 3], [16, 32, 16], [1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_pairs_together_equal_pairs_one_by_one(sizes: list[int], dtype: torch.dtype, monkeypatch: MonkeyPatch) -> None:
    data = [(x.abs().to(dtype), y) for x, y in clients(sizes)]
    pair = prepare(data, None, torch.float32, CPU), one_by_one(data, monkeypatch)
    actual, expected = (result.clients for result in pair)
    assert actual.store is not None and expected.store is not None
    assert actual.store.x.dtype == (torch.uint8 if dtype == torch.uint8 else torch.float32), "bytes stay bytes"
    assert list(actual.store.offsets) == list(expected.store.offsets) and actual.sizes == expected.sizes
    for row, other_pair in zip(actual.pairs, expected.pairs, strict=True):
        for a, b in zip(row, other_pair, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b) and a.data_ptr() % ALIGNMENT == 0
    assert torch.equal(actual.store.x, expected.store.x) and torch.equal(actual.store.y, expected.store.y)
    assert pair[0].fingerprint() == Population(PairClients(expected.pairs), CPU).fingerprint(), "older checkpoints"


def calls_before_the_first_round(large_count: int) -> int:
    """Return the number of calls of Python and C functions that a run with `many` clients makes."""
    data, test = clients([4] * large_count), clients([32])[0]
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        options = {"rounds": 1, "participation": 0.5 / large_count, "test": test}
        fed.run(torch.nn.Linear(3, 3), data, fed.FedAvg(), **options)
    finally:
        sys.setprofile(None)
    return count


def test_a_client_costs_few_calls_before_the_first_round() -> None:
    """Each of them is dealt a test sample, which takes ten: a hundred thousand clients are ready in two seconds."""
    calls_before_the_first_round(10)  # import modules and make objects that are made once
    small_count, large_count = (calls_before_the_first_round(n) for n in (1000, 3000))
    assert (large_count - small_count) / 2000 < 25


def test_a_client_of_a_store_becomes_tensors_when_it_is_asked_for() -> None:
    data = clients([4, 1, 9])
    pairs = prepare(data, None, torch.float32, CPU).clients.pairs
    assert len(pairs) == 3 and pairs[1] is pairs[1]
    for calls in (list(pairs), [pairs[i] for i in range(3)]):
        assert all(torch.equal(a, b) for tensors, pair in zip(calls, data, strict=True) for a, b in zip(tensors, pair))
    with pytest.raises(IndexError):
        pairs[3]


def test_of_much_data_there_is_no_second_copy(monkeypatch: MonkeyPatch) -> None:
    data = clients([4, 1, 9])
    for module in (preparing, packed_samples):
        monkeypatch.setattr(module, "MAX_BYTES", 100)
    prepared_clients = prepare(data, None, torch.float32, CPU).clients
    aligned_pairs = [(x, y) for x, y in data if x.data_ptr() % ALIGNMENT == y.data_ptr() % ALIGNMENT == 0]
    addresses = {t.data_ptr() for pair in prepared_clients.pairs for t in pair}
    assert (
        prepared_clients.store is None
        and aligned_pairs
        and all(t.data_ptr() in addresses for pair in aligned_pairs for t in pair)
    )


@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_not_finite_is_found_wherever_it_is(bad_value: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50).to(dtype)
    assert all_finite(x) and all_finite(x[:0]) and all_finite(torch.full((9,), torch.finfo(dtype).max, dtype=dtype))
    for place in (0, 77, 149):
        spoiled_x = x.clone().flatten()
        spoiled_x[place] = bad_value
        assert not all_finite(spoiled_x) and not all_finite(spoiled_x.view(3, 50).t())
