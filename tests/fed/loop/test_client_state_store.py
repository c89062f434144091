"""The store of client states in host memory: stored states come back, rows are reused, ranks exchange states."""

import io
import logging
import random
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsam import fed
from fastsam.fed.clients import sampling
from fastsam.fed.loop import client_state
from fastsam.fed.loop.client_state import ClientStateStorage, HostStateStorage
from fastsam.fed.loop.host_pool import HostPool
from fastsam.fed.sums.ranks import Ranks
from fastsam_kernels.weak_tensors import WeakTensorMap
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fed_runs import digest
from tests.helpers.fed_states import CPU, ordinary, train


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore::pytest.PytestWarning")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_whatever_is_asked_the_store_answers_as_a_dict_would(seed: int, ahead: int) -> None:
    """Cohorts, predictions that are right and wrong, rounds that are given up, exclusions, tensors that are shared."""
    draw, store = random.Random(seed), HostStateStorage(CPU, "", ahead)
    stored_states: dict[int, Any] = {}
    truth: dict[int, list[float]] = {}
    later: list[int] = []
    for t in range(6):
        order = later if draw.random() < 0.6 and later else draw.sample(range(8), draw.randint(1, 8))
        later = draw.sample(range(8), draw.randint(0, 8))
        fresh, expected = dict(stored_states), dict(truth)
        store.begin(stored_states, order, later)
        shared_tensor = torch.full((3,), float(t))
        for i in order:
            if i in stored_states:
                state = store.get(i, stored_states[i])
                assert torch.cat(list(state.values())).tolist() == truth[i]
                assert not any(store.pool.holds(x) for x in state.values())
            if draw.random() < 0.8:  # otherwise it is excluded
                state = {"own": torch.full((5,), t + i / 10), "shared": shared_tensor}
                fresh[i], expected[i] = store.put(i, state), torch.cat(list(state.values())).tolist()
        store.commit()
        if draw.random() < 0.8:  # otherwise the round was given up
            stored_states, truth = fresh, expected
        assert {i: torch.cat(list(s.values())).tolist() for i, s in stored_states.items()} == truth
        assert len({id(s["shared"]) for s in stored_states.values()}) == len(
            {float(s["shared"][0]) for s in stored_states.values()}
        )


@pytest.mark.usefixtures("gpu")
def test_the_host_holds_two_versions_of_a_state_at_most() -> None:
    """Rows of freed states are reused."""
    store, stored_states = HostStateStorage(CPU, "", 4), dict[int, Any]()
    for t in range(20):
        store.begin(stored_states, range(100), ())
        stored_states |= {i: store.put(i, {"c_i": torch.full((4096,), float(t + i))}) for i in range(100)}
        store.commit()
    assert store.pool.nbytes <= 4 * 100 * 4096 * 4
    assert all(float(stored_states[i]["c_i"][0]) == 19 + i for i in stored_states)


@pytest.mark.usefixtures("gpu")
def test_a_tensor_that_does_not_change_is_not_copied_back() -> None:
    store = HostStateStorage(CPU, "", 4)
    stored_state = store.put(0, {"a": torch.ones(3), "b": torch.zeros(2)})
    second_state = store.put(0, {**store.get(0, stored_state), "b": torch.ones(2)})
    assert second_state["a"] is stored_state["a"] and second_state["b"] is not stored_state["b"]
    del stored_state, second_state
    assert [len(one) for one in (store._host_copies, store._device_copies)] == [0, 0]  # no entry outlives its tensor


@pytest.mark.usefixtures("gpu")
def test_memory_of_another_stream_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage must stay allocated until its stream is done: fetched states for the work, new states for the copies."""
    lent: list[tuple[set[int], Any]] = []
    monkeypatch.setattr(
        FakeCuda, "record_stream", lambda self, tensors, stream: lent.append(({id(t) for t in tensors}, stream))
    )
    store, new = HostStateStorage(CPU, "", 4), {"a": torch.ones(3), "b": torch.zeros(2)}
    stored_state = store.put(0, new)
    assert lent == [({id(new["a"])}, store.stream), ({id(new["b"])}, store.stream)]
    lent.clear()
    got = store.get(0, stored_state)
    assert lent == [({id(t) for t in got.values()}, FakeCuda.active)]


@pytest.mark.usefixtures("gpu")
def test_the_host_writes_no_row_that_is_still_read() -> None:
    """A new state must not take a free row that is still being copied."""
    store = HostStateStorage(CPU, "", 4)
    with Watch():
        stored_states = {0: store.put(0, {"c_i": torch.ones(5)})}
        store.commit()
        store.begin(stored_states, [0], ())
        stored_states = {1: {"c_i": store.adopt(torch.zeros(5))}}
        store.stream.wait_stream(FakeCuda.active)  # later queued operations see the writes of the host
        store.begin(stored_states, [1], ())
        assert store.get(1, stored_states[1])["c_i"].tolist() == [0] * 5


def test_rows_come_back_when_their_tensor_is_gone() -> None:
    pool = HostPool(ordinary)
    a, b = (pool.row(torch.Size([1000, 3]), torch.float32) for _ in range(2))
    place, slabs = a.data_ptr(), pool.nbytes
    assert pool.holds(a) and pool.holds(b) and not pool.holds(torch.ones(3)) and a.shape == (1000, 3)
    view = a[0]
    del a
    assert pool.row(b.shape, b.dtype).data_ptr() not in (b.data_ptr(), view.data_ptr() + 1)
    assert place in {pool.row(b.shape, b.dtype).data_ptr() for _ in range(1)} and pool.nbytes == slabs


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([torch.float32, torch.float64, torch.uint8]))
def test_slabs_are_powers_of_two_with_little_lost(numel: int, dtype: torch.dtype) -> None:
    pool = HostPool(ordinary)
    rows = [pool.row(torch.Size([numel]), dtype) for _ in range(20)]
    assert len({t.data_ptr() for t in rows}) == (20 if numel else 1)
    lost_bytes = (1 << (pool.nbytes - 1).bit_length()) - pool.nbytes if pool.nbytes else 0
    assert lost_bytes <= pool.nbytes / 7 or pool.nbytes < 2**20


def test_without_pinned_memory_it_is_ordinary_memory_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    shapes = []

    def refuse_memory(shape: Any, dtype: torch.dtype) -> Tensor:
        shapes.append(shape)
        raise RuntimeError("CUDA error: out of memory\nand more lines")

    pool = HostPool(refuse_memory)
    with caplog.at_level(logging.WARNING):
        rows = [pool.row(torch.Size([n]), torch.float32).fill_(n) for n in (5, 6, 7)]
    assert [float(r.sum()) for r in rows] == [25, 36, 49] and len(shapes) == 1
    assert [r.message for r in caplog.records] == [
        "no more memory can be pinned for the states of clients (CUDA error: out of memory): they go to ordinary "
        "memory, and the GPU waits for copies"
    ]


def test_a_value_in_a_weak_map_goes_with_its_tensor() -> None:
    values: WeakTensorMap[str] = WeakTensorMap()
    a, b = torch.ones(3), torch.ones(3)
    values.set(a, "a")
    assert values.get(a) == "a" and values.get(b) is None
    del a
    assert len(values) == 0


# --- ranks ---


class Pair(Ranks):
    """One of two ranks, whose messages are stored in a list."""

    drawer: ClassVar[list[Any]] = []

    def _send(self, state: Any, to: int) -> None:
        torch.save(state, buffer := io.BytesIO())
        self.drawer.append(buffer.getvalue())

    def _receive(self, source: int) -> Any:
        return torch.load(io.BytesIO(self.drawer.pop()))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "kinds",
    [
        (HostStateStorage, HostStateStorage),
        (HostStateStorage, ClientStateStorage),
        (ClientStateStorage, HostStateStorage),
    ],
)
def test_a_state_moves_to_where_the_other_rank_keeps_its_own(kinds: Any) -> None:
    own_store, other_store = (kind(CPU, "", *((4,) if kind is HostStateStorage else ())) for kind in kinds)
    state = own_store.put(3, {"c_i": torch.arange(5.0), "n": torch.tensor(2)})
    own_store.commit()
    remaining_states = Pair(0, 2).move_states({3: state}, {3: 1}, {3: 0}, own_store.adopt)
    moved_states = Pair(1, 2).move_states({}, {3: 1}, {3: 0}, other_store.adopt)
    assert remaining_states == {} and list(moved_states) == [3]
    assert all(other_store.pool.holds(t) for t in moved_states[3].values() if other_store.prefetches)
    other_store.begin(moved_states, [3], [])
    got = other_store.get(3, moved_states[3])
    assert got["c_i"].tolist() == [0, 1, 2, 3, 4] and got["n"].item() == 2 and got["n"].dtype == torch.int64


def test_of_a_row_of_the_pool_only_the_row_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_sizes = []
    monkeypatch.setattr("torch.distributed.send_object_list", lambda objects, dst: sent_sizes.append(objects))
    Ranks(0, 2)._send({"c_i": HostPool(ordinary).row(torch.Size([4]), torch.float32)}, 1)
    assert sent_sizes[0][0]["c_i"].untyped_storage().nbytes() == 16


@pytest.mark.gpu
def test_on_a_gpu_states_are_pinned_and_few_are_on_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store, stored_states, vector = HostStateStorage(device, "", 4), dict[int, Any](), 2**20
    for i in range(64):
        stored_states[i] = store.put(i, {"c_i": torch.full((vector,), float(i), device=device)})
    store.commit()
    assert all(s["c_i"].is_pinned() for s in stored_states.values()) and store.pool.pins
    allocated_before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    store.begin(stored_states, range(64), ())
    assert [float(store.get(i, stored_states[i])["c_i"][-1]) for i in range(64)] == [float(i) for i in range(64)]
    assert torch.cuda.max_memory_allocated(device) - allocated_before <= 8 * 4 * vector


# --- Client states in host memory: how few of them are on the device, and when they come. A stand-in takes the place of
# the GPU.


class Counted(HostStateStorage):
    """A store that counts the copies on the device, and their maximum."""

    most = 0

    def _fetch(self, state: dict[str, Tensor]) -> Any:
        alive = self.__dict__.setdefault("alive", [])
        entry = super()._fetch(state)
        alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(t) for t in entry.state.values()]
        Counted.most = max(Counted.most, len(alive))
        return entry


@dataclass(frozen=True)
class Tracked(fed.SCAFFOLD):
    """SCAFFOLD that knows how many states, of those it has returned, are alive on the device."""

    alive: list[Any] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        state, upload = super().finish(server, client, results, round)
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
    monkeypatch.setattr(client_state, "HostStateStorage", Counted)
    monkeypatch.setattr(Counted, "most", 0)
    algorithm = Tracked()
    options = {"rounds": 2, "participation": 1.0, "executor": executor, "slots": slots, "client_state": "host"}
    train(algorithm, sizes=(1,) * clients, **options)
    assert 4 <= Counted.most <= slots + max(slots, 4) + 1  # training, prefetched, and being fetched
    assert max(algorithm.most) <= slots + 1


def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list of requests ("get") and copies ("fetch") in their order; a state holds its client's number."""
    events: list[tuple[str, int]] = []
    fetch, get = HostStateStorage._fetch, HostStateStorage.get

    def record_fetch(self: Any, state: Any) -> Any:
        events.append(("fetch", int(state["who"])))
        return fetch(self, state)

    def got(self: Any, client: int, state: Any) -> Any:
        events.append(("get", client))
        state_on_device = get(self, client, state)
        assert int(state_on_device["who"]) == client and not self.pool.holds(state_on_device["who"])
        return state_on_device

    monkeypatch.setattr(HostStateStorage, "_fetch", record_fetch)
    monkeypatch.setattr(HostStateStorage, "get", got)
    return events


class Numbered(fed.Algorithm):
    """A client's state is its number."""

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        return {"who": torch.tensor(results.client_ids)}, fed.Upload(mean={"delta": results.delta})


COHORTS = [range(10), [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]


@pytest.mark.usefixtures("gpu")
def test_the_next_cohort_is_fetched_while_this_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of both cohorts is fetched after it has trained, with its new state."""
    monkeypatch.setattr(sampling, "make", lambda *arguments: None)
    monkeypatch.setattr(sampling, "draw", lambda sampler, t, seed: list(COHORTS[t]))
    events = copies(monkeypatch)
    train(Numbered(), rounds=4, client_state="host")
    expected = [
        *(("fetch", 0), ("fetch", 1), ("fetch", 2), ("fetch", 3)),  # no more than four are ahead
        *(("get", 0), ("fetch", 4), ("get", 1), ("fetch", 5)),  # the next cohort's
        *(("get", 2), ("fetch", 2), ("get", 3), ("fetch", 3)),  # these take part again: when they have closed
        *(("get", 2), ("fetch", 6), ("get", 3), ("fetch", 7), ("get", 4), ("fetch", 4), ("get", 5), ("fetch", 5)),
        *(("get", 4), ("get", 5), ("get", 6), ("get", 7)),
    ]
    assert events == expected


@pytest.mark.usefixtures("gpu")
def test_who_is_asked_for_before_its_turn_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events, store = copies(monkeypatch), HostStateStorage(CPU, "", 1)
    stored_states = {i: store.put(i, {"who": torch.tensor(i)}) for i in range(4)}
    store.commit()
    store.begin(stored_states, [0], [3])
    store.get(0, stored_states[0])
    store.begin(stored_states, [2, 3], [])  # 3 is there, and leaves no room for 2
    for i in (2, 3):
        store.get(i, stored_states[i])
    assert [who for what, who in events if what == "fetch"] == [0, 3, 2]


@pytest.mark.usefixtures("gpu")
def test_a_sampler_of_the_users_is_asked_once_a_round_and_in_order() -> None:
    calls = []

    def sampler(t: int, generator: torch.Generator) -> list[int]:
        calls.append((t, int(torch.randint(1000, (), generator=generator))))
        return [t % 10, (t + 1) % 10]

    result = train(fed.SCAFFOLD(), sampler=sampler, client_state="host", executor="streams", slots=2)
    first, calls = calls, []
    assert digest(train(fed.SCAFFOLD(), sampler=sampler, client_state="device")) == digest(result)
    assert [t for t, _ in first] == list(range(6)) and first == calls
