"""Clients that a function loads when they are sampled."""

import random
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.fed.clients.prefetcher import Prefetcher
from tests.helpers.fed_kinds import Rows, in_another_collate, model, pairs, run, weights
from tests.helpers.fed_runs import excluded_clients

SIZES = [10, 11, 12, 13]


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("sizes", [None, SIZES])
def test_the_bits_are_those_of_clients_that_are_there(executor: str, sizes: list[int] | None) -> None:
    plain = run(pairs(), executor="sequential", local_steps=5)
    result = run(fed.LazyClients(4, pairs().__getitem__, sizes), executor=executor, local_steps=5)
    assert torch.equal(weights(result), weights(plain))
    lazy = fed.LazyClients(4, lambda i: Rows(*pairs()[i]))
    lazy_result = run(lazy, executor=executor, collate=in_another_collate, local_steps=5)
    assert torch.equal(weights(lazy_result), weights(plain))
    assert result.history[-1]["samples"] == plain.history[-1]["samples"]


def test_a_client_is_loaded_when_it_is_sampled_and_forgotten_when_it_has_trained() -> None:
    loads: list[int] = []
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    maximum = 0

    def load(i: int) -> Any:
        nonlocal maximum
        maximum = max(maximum, len(alive))
        loads.append(i)
        g = torch.Generator().manual_seed(i)
        x = torch.randn(5, 6, generator=g)
        alive.add(x)
        return x, torch.arange(5) % 3

    result = run(fed.LazyClients(100_000, load), participation=5e-5, rounds=3, executor="sequential")
    num_trained = 3 * 5
    assert sum(line["clients"] for line in result.history) == num_trained
    assert len(loads) == num_trained + 2, "and the first client twice before the run, for the trial"
    assert maximum <= 2, f"{maximum} clients in memory at once"


def test_random_data_are_functions_of_the_client() -> None:
    def load(i: int) -> Any:
        return torch.randn(8, 6) + random.random(), torch.arange(8) % 3

    state = torch.get_rng_state()
    first = run(fed.LazyClients(4, load))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(9)
    assert torch.equal(weights(run(fed.LazyClients(4, load))), weights(first))
    with pytest.raises(ValueError, match="reading a batch draws random numbers"):
        run(fed.LazyClients(4, load), executor="threads")


def test_other_data_at_a_later_call_are_noticed() -> None:
    calls = 0

    def load(i: int) -> Any:
        nonlocal calls
        calls += i == 2
        x, y = pairs()[i]
        return (x + 1e-3 * (calls > 2), y)

    with pytest.raises(fed.ClientError, match=r"client 2 failed in round 3.*load\(2\) returns different data"):
        run(fed.LazyClients(4, load), rounds=4)
    g = torch.Generator()
    with pytest.raises(ValueError, match=r"client 0: load\(0\) returns different data than in its first call"):
        run(fed.LazyClients(4, lambda i: (torch.randn(8, 6, generator=g), torch.arange(8) % 3)))
    with pytest.raises(ValueError, match="client 3.*: it has 13 samples, sizes says 14"):
        run(fed.LazyClients(4, pairs().__getitem__, [10, 11, 12, 14]))


def test_a_load_that_fails_names_the_client_or_leaves_it_out() -> None:
    def load(i: int) -> Any:
        if i == 2:
            raise OSError("no such disk")
        return pairs()[i]

    words = r"^client 2 failed in round 1, local step 0: ValueError: load\(2\) failed: OSError: no such disk$"
    for executor in ("sequential", "threads"):
        with pytest.raises(fed.ClientError, match=words):
            run(fed.LazyClients(4, load), executor=executor)
        result = run(fed.LazyClients(4, load), executor=executor, on_client_error="exclude")
        assert excluded_clients(result) == [[2], [2]]
        assert "client 2" not in result.history[0]["excluded"][0]["reason"]
    with pytest.raises(ValueError, match=r"client 0: load\(0\) failed: ZeroDivisionError"):
        run(fed.LazyClients(4, lambda i: 1 / 0))
    with pytest.raises(fed.ClientError, match="client 1 failed .*: 1 is torch.float32 in a batch, but torch.int64"):
        run(fed.LazyClients(2, lambda i: pairs()[i] if i == 0 else (pairs()[i][0], pairs()[i][1].float())))


class Slow:
    """A load that takes its time, and knows who called it."""

    def __init__(self, seconds: float = 0.003) -> None:
        self.seconds, self.pairs, self.calls = seconds, pairs(), list[tuple[int, bool]]()

    def __call__(self, i: int) -> Any:
        self.calls.append((i, threading.current_thread() is threading.main_thread()))
        if self.seconds:
            time.sleep(self.seconds)
        return self.pairs[i]


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_the_next_clients_are_loaded_while_others_train(executor: str) -> None:
    """Clients of the next round are loaded early too, and each client once in each round."""
    options: dict[str, Any] = {"rounds": 3, "participation": 0.5, "executor": executor}
    plain, ahead, no_loads = run(pairs(), **options), Slow(), Slow()
    result = run(fed.LazyClients(4, ahead), **options)
    assert (
        torch.equal(weights(result), weights(plain)) and result.history[-1]["samples"] == plain.history[-1]["samples"]
    )
    assert torch.equal(weights(run(fed.LazyClients(4, no_loads, prefetch=0), **options)), weights(plain))
    assert sorted(i for i, _ in ahead.calls) == sorted(i for i, _ in no_loads.calls)
    later_loads = [main for _, main in ahead.calls[2:]]
    assert ahead.calls[:2] == [(0, True)] * 2 and later_loads.count(False) >= 2, (
        "who is asked for before the thread had its turn is loaded at once"
    )
    assert all(main for _, main in no_loads.calls) or executor == "threads"


def test_what_loads_at_once_or_draws_is_loaded_when_it_trains() -> None:
    quick_loader, drawing = Slow(0), Slow()

    def draws(i: int) -> Any:
        x, y = drawing(i)
        return x + torch.rand(()), y

    for lazy, calls in (
        (fed.LazyClients(4, quick_loader), quick_loader.calls),
        (fed.LazyClients(4, draws, prefetch=2), drawing.calls),
    ):
        run(lazy, executor="sequential")
        assert len(calls) > 4 and all(main for _, main in calls)


@pytest.mark.parametrize("maximum", [1, 3])
def test_no_more_than_asked_for_are_loaded_ahead(maximum: int) -> None:
    starts, go = list[int](), threading.Semaphore(0)

    def load(i: int) -> int:
        starts.append(i)
        go.acquire()
        return 10 * i

    def loaded_clients() -> list[int]:
        deadline = time.monotonic() + 5
        while not all(f.done() for f in ahead._futures.values()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return starts

    ahead = Prefetcher(load)
    go.release(100)
    ahead.prefetch(range(8), maximum)
    assert loaded_clients() == list(range(maximum))
    assert ahead.take(0) == 0 and loaded_clients() == list(range(maximum + 1)), "the next one takes its place"
    assert ahead.take(7) == 70 and starts[-1] == 7, "who comes out of turn is loaded at once"
    ahead.prefetch([20], maximum)
    assert ahead.take(20) == 200 and ahead.take(1) == 10 and starts.count(1) == 2, "the others were forgotten"


def test_weights_by_samples_and_a_resume(tmp_path: Any) -> None:
    options: dict[str, Any] = {"weighting": "samples", "executor": "sequential"}
    plain = run(pairs(), rounds=3, **options)
    lazy = fed.LazyClients(4, pairs().__getitem__, SIZES)
    run(lazy, rounds=1, run_dir=tmp_path / "run", **options)
    result = run(lazy, rounds=3, run_dir=tmp_path / "run", resume=True, **options)
    assert torch.equal(weights(result), weights(plain))
    other_clients = fed.LazyClients(4, lambda i: (pairs()[i][0] * 2, pairs()[i][1]), SIZES)
    with pytest.raises(fed.RunDirectoryError, match="data"):
        run(other_clients, rounds=4, run_dir=tmp_path / "run", resume=True, model=model(), **options)
