"""Client states in host memory: how few of them are on the device, and when they come. A stand-in takes the place of
the GPU."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed.clients import sampling
from fastsam.fed.loop import client_state
from fastsam.fed.loop.client_state import InHostMemory
from tests.helpers.fed_ranks import digest
from tests.helpers.fed_states import CPU, stand_in, train


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


class Counted(InHostMemory):
    """Knows which copies on the device are alive, and how many there were at most."""

    most = 0

    def _fetch(self, state: dict[str, Tensor]) -> Any:
        alive = self.__dict__.setdefault("alive", [])
        made = super()._fetch(state)
        alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(t) for t in made.state.values()]
        Counted.most = max(Counted.most, len(alive))
        return made


@dataclass(frozen=True)
class Tracked(fed.SCAFFOLD):
    """SCAFFOLD that knows how many states, of those it has returned, are alive on the device."""

    alive: list[Any] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    def close_client(self, server: Any, client: Any, ends: Any, round: Any) -> Any:
        state, upload = super().close_client(server, client, ends, round)
        self.alive[:] = [ref for ref in self.alive if ref() is not None] + [weakref.ref(state["c_i"])]
        self.most.append(len(self.alive))
        return state, upload


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("executor", "slots", "clients"),
    [
        *(("sequential", 1, 50), ("streams", 3, 50), ("vmap", 8, 50), ("streams", 3, 150)),
        pytest.param("streams", 3, 10_000, marks=pytest.mark.slow),
    ],
)
def test_the_device_holds_the_states_of_those_that_train_and_a_few_more(
    executor: str, slots: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many clients there are, and however many of them take part."""
    monkeypatch.setattr(client_state, "InHostMemory", Counted)
    monkeypatch.setattr(Counted, "most", 0)
    algorithm = Tracked()
    options = {"rounds": 2, "participation": 1.0, "executor": executor, "slots": slots, "client_state": "host"}
    train(algorithm, sizes=(1,) * clients, **options)
    assert 4 <= Counted.most <= slots + max(slots, 4) + 1  # training, ahead, and the one that is being fetched
    assert max(algorithm.most) <= slots + 1


def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Who was asked for ("get"), and who was fetched, in this order; clients by the number that their state holds."""
    seen: list[tuple[str, int]] = []
    fetch, get = InHostMemory._fetch, InHostMemory.get

    def fetched(self: Any, state: Any) -> Any:
        seen.append(("fetch", int(state["who"])))
        return fetch(self, state)

    def got(self: Any, client: int, state: Any) -> Any:
        seen.append(("get", client))
        made = get(self, client, state)
        assert int(made["who"]) == client and not self.pool.holds(made["who"])
        return made

    monkeypatch.setattr(InHostMemory, "_fetch", fetched)
    monkeypatch.setattr(InHostMemory, "get", got)
    return seen


class Numbered(fed.Algorithm):
    """A client's state is its number."""

    client_vectors = 1

    def close_client(self, server: Any, client: Any, ends: Any, round: Any) -> Any:
        return {"who": torch.tensor(ends.clients)}, fed.Upload(mean={"delta": ends.displacement})


COHORTS = [range(10), [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]


@pytest.mark.usefixtures("gpu")
def test_the_next_cohort_is_fetched_while_this_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are in both when they have trained, so that their new state is what is fetched."""
    monkeypatch.setattr(sampling, "make", lambda *arguments: None)
    monkeypatch.setattr(sampling, "draw", lambda sampler, t, clients, seed, poisson=False: list(COHORTS[t]))
    seen = copies(monkeypatch)
    train(Numbered(), rounds=4, client_state="host")
    expected = [
        *(("fetch", 0), ("fetch", 1), ("fetch", 2), ("fetch", 3)),  # no more than four are ahead
        *(("get", 0), ("fetch", 4), ("get", 1), ("fetch", 5)),  # the next cohort's
        *(("get", 2), ("fetch", 2), ("get", 3), ("fetch", 3)),  # these take part again: when they have closed
        *(("get", 2), ("fetch", 6), ("get", 3), ("fetch", 7), ("get", 4), ("fetch", 4), ("get", 5), ("fetch", 5)),
        *(("get", 4), ("get", 5), ("get", 6), ("get", 7)),
    ]
    assert seen == expected


@pytest.mark.usefixtures("gpu")
def test_who_is_asked_for_before_its_turn_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, store = copies(monkeypatch), InHostMemory(CPU, "", 1)
    kept = {i: store.put(i, {"who": torch.tensor(i)}) for i in range(4)}
    store.commit()
    store.begin(kept, [0], [3])
    store.get(0, kept[0])
    store.begin(kept, [2, 3], [])  # 3 is there, and leaves no room for 2
    for i in (2, 3):
        store.get(i, kept[i])
    assert [who for what, who in seen if what == "fetch"] == [0, 3, 2]


@pytest.mark.usefixtures("gpu")
def test_a_sampler_of_the_users_is_asked_once_a_round_and_in_order() -> None:
    asked = []

    def sampler(t: int, generator: torch.Generator) -> list[int]:
        asked.append((t, int(torch.randint(1000, (), generator=generator))))
        return [t % 10, (t + 1) % 10]

    made = train(fed.SCAFFOLD(), sampler=sampler, client_state="host", executor="streams", slots=2)
    first, asked = asked, []
    assert digest(train(fed.SCAFFOLD(), sampler=sampler, client_state="device")) == digest(made)
    assert [t for t, _ in first] == list(range(6)) and first == asked
