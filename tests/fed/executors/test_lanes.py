"""Lanes of `graph` and `streams`, with a stand-in for CUDA: clients that train at the same time, and their graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed import executors
from fastsam.fed.algorithms.fedswa import Falling
from fastsam.fed.executors import graph_lanes, streams
from fastsam.fed.executors.cuda import CaptureError
from fastsam.fed.executors.graph_lanes import equal_steps
from fastsam.fed.update.steps import SAM, Shifted, Step
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda, FakeStream, Watch
from tests.helpers.fed_runs import digest, excluded_clients
from tests.helpers.setups import ends_of, oracle_tasks

EXECUTORS = ("streams", "graph")
LANES = 8

pytestmark = pytest.mark.usefixtures("no_cuda")


def run(executor: str, sizes: tuple[int, ...], algorithm: Any = None, **options: Any) -> fed.Result:
    clients = oracle.ragged_clients(torch.float32, sizes)
    keywords = {"rounds": 3, "batch_size": 8, "participation": 1.0, "slots": 4} | options
    torch.manual_seed(0)
    model = oracle.smooth_model(torch.float32)
    return fed.run(model, clients, algorithm or fed.FedSAM(), executor=executor, **keywords)


# ---- steps of one graph


def chunks_of(sizes: tuple[int, ...], epoch: int, copied: frozenset[int], most: int) -> list[range]:
    """Return the steps of a client as they are taken together."""
    chunks, k = list[range](), 0
    while k < len(sizes):
        chunks.append(range(k, k + equal_steps(k, sizes, epoch, copied, most)))
        k = chunks[-1].stop
    return chunks


@pytest.mark.parametrize("most", [1, 4, 8])
@pytest.mark.parametrize("copied", [(), (0, 45, 69)])
def test_a_graph_holds_equal_steps_of_a_block(copied: tuple[int, ...], most: int) -> None:
    """35 batches of an epoch are two blocks, and the last batch is partial."""
    sizes = (((8,) * 34 + (3,)) * 2)[:69]
    chunks = chunks_of(sizes, 35, frozenset(copied), most)
    for steps in chunks:
        assert len({sizes[k] for k in steps}) == 1
        assert len(steps) & (len(steps) - 1) == 0 and len(steps) <= most
        assert len({(k // 35, k % 35 // 32) for k in steps}) == 1, "they are in one block"
        assert len(steps) == 1 or not set(steps) & set(copied)
    assert [k for steps in chunks for k in steps] == list(range(69))
    if most == 8 and not copied:
        assert [len(steps) for steps in chunks] == [8, 8, 8, 8, 2, 1, 8, 8, 8, 8, 2]


def test_a_client_with_less_samples_than_a_batch_has_one_step() -> None:
    assert chunks_of((3, 3), 1, frozenset(), 8) == [range(0, 1), range(1, 2)]


# ---- graphs


def test_a_chunk_is_captured_once_per_lane_and_not_per_round() -> None:
    for rounds in (2, 4):
        run("graph", (64,) * 6, rounds=rounds, slots=3, batch_size=32)
        assert len(FakeCuda.graphs) == 3


def test_there_are_no_more_graphs_than_lanes_and_sorts() -> None:
    """All batches are full: each lane has chunks of 1, 2, 4 and 8 steps, whatever the sizes of its clients."""
    run("graph", tuple(range(8, 104, 8)), rounds=6, participation=0.6)
    assert len(FakeCuda.graphs) <= 4 * 4


def test_a_lane_keeps_a_limited_number_of_graphs(monkeypatch: MonkeyPatch) -> None:
    sizes, options = tuple(range(9, 16)), {"slots": 1, "rounds": 4}
    plain = digest(run("graph", sizes, **options))
    assert len(FakeCuda.graphs) == 8  # a full batch, and seven partial ones
    monkeypatch.setattr(graph_lanes, "_MAX_GRAPHS", 3)
    assert digest(run("graph", sizes, **options)) == plain and len(FakeCuda.graphs) == 3


def test_graphs_are_released_together_at_the_end_of_a_run() -> None:
    run("graph", (5, 20, 40), slots=1, local_epochs=3, batch_size=5)
    assert FakeCuda.ends == ["synchronize", *["end"] * len(FakeCuda.graphs)] and len(FakeCuda.graphs) > 1


def test_replayed_steps_follow_a_schedule() -> None:
    tasks, start, setup = oracle_tasks((10, 15, 8), 5, Falling(end=0.5), facts={"backend": "foreach"})
    plain = ends_of(executors.registry["sequential"](setup).train(start, [], iter(tasks)))
    cls = executors.registry["graph"](setup)
    for _ in range(3):
        results = sorted(ends_of(cls.train(start, [], iter(tasks))), key=lambda results: results.client_ids)
        for a, b in zip(results, plain, strict=True):
            assert torch.equal(a.delta, b.delta) and torch.equal(a.losses, b.losses)
    assert sum(graph.replays for graph in FakeCuda.graphs) > 3


def test_lanes_of_several_steps_and_own_starts() -> None:
    """Neighbours of one key begin and end together, whatever their vectors are."""
    tasks, start, setup = oracle_tasks((6, 6, 4, 6, 5, 6), 3, slots=4, local_epochs=1)
    vectors = torch.randn(3, len(start), generator=torch.Generator().manual_seed(0))
    steps: list[Step] = [SAM(rho=0.05, q=vectors[i], start=start + i) for i in range(3)]
    steps.append(Shifted(rho=0.05, e=vectors[0]))
    for task, i in zip(tasks, (0, 1, 3, 2, 3, 2), strict=True):
        task.step = steps[i]
    plain = ends_of(executors.registry["sequential"](setup).train(start, [], iter(tasks)))
    cls = executors.registry["graph"](setup)
    with Watch():
        for _ in range(2):
            results = sorted(ends_of(cls.train(start, [], iter(tasks))), key=lambda results: results.client_ids)
            for a, b in zip(results, plain, strict=True):
                assert torch.equal(a.delta, b.delta) and torch.equal(a.losses, b.losses)
                assert (a.start is None) == (b.start is None) and (a.start is None or torch.equal(a.start, b.start))
    assert sum(graph.replays for graph in FakeCuda.graphs) > 1


def test_batches_of_many_layouts_have_inputs_only_for_graphs(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(graph_lanes, "_MAX_GRAPHS", 2)
    tasks, start, setup = oracle_tasks(range(6, 11), 5, Step(), slots=1, facts={"store": None, "backend": "foreach"})
    cls = executors.registry["graph"](setup)
    for _ in range(4):
        list(cls.train(start, [], iter(tasks)))
    assert len(FakeCuda.graphs) == 2 == sum(x.inputs is not None for x in cls.lanes[0].steps_by_key.values())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_round_that_is_left_in_the_middle_leaves_the_executor_usable(executor: str) -> None:
    tasks, start, setup = oracle_tasks()
    cls = executors.registry[executor](setup)
    results = cls.train(start, [], iter(tasks))
    next(results)
    results.close()
    repeat = sorted(ends_of(cls.train(start, [], iter(tasks))), key=lambda results: results.client_ids)
    plain = ends_of(executors.registry["sequential"](setup).train(start, [], iter(tasks)))
    for a, b in zip(repeat, plain, strict=True):
        assert torch.equal(a.delta, b.delta) and torch.equal(a.losses, b.losses) and a.num_steps == b.num_steps


# ---- lanes that train at the same time


def drops() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.4), oracle.smooth_model(torch.float32))


DROPOUT = {"draws": frozenset({F.dropout})}


@pytest.mark.parametrize(
    ("executor", "facts"), [("graph", {}), ("streams", {}), ("graph", DROPOUT), ("streams", DROPOUT)]
)
def test_lanes_train_at_the_same_time(executor: str, facts: dict[str, Any]) -> None:
    """In a steady round the operations are at least .8 lanes wide (their number over their longest chain), and the host
    queues little besides the replays."""
    options = {"model": drops() if facts else None, "facts": {"backend": "foreach", **facts}}
    samples, rounds = (64, 2) if executor == "graph" else (24, 1)  # eager steps are alike
    tasks, start, setup = oracle_tasks((samples,) * LANES, 8, Step(), slots=LANES, local_epochs=1, **options)
    cls = executors.registry[executor](setup)
    with Watch() as watch:
        for _ in range(rounds):
            list(cls.train(start, [], iter(tasks)))
        operations, waits = watch.host_operations, FakeCuda.num_waits
        replays = [graph.replays for graph in FakeCuda.graphs]
        overlap = watch.overlap(lambda: list(cls.train(start, [], iter(tasks))))
    assert overlap >= 0.8 * LANES
    assert FakeCuda.num_waits - waits <= 4 * LANES
    if executor == "graph":
        assert [graph.replays for graph in FakeCuda.graphs] == [n + 1 for n in replays] and len(replays) == LANES
        assert watch.host_operations - operations <= 8 * LANES


def test_lanes_are_filled_again_before_results_are_yielded() -> None:
    """The receiver waits for the device, and meanwhile the next clients train."""
    tasks, start, setup = oracle_tasks((10,) * 7)
    begun: list[int] = []
    source = (begun.append(task.client) or task for task in tasks)
    results = executors.registry["graph"](setup).train(start, [], source)
    assert [(list(group.client_ids), list(begun)) for group in results] == [
        ([0, 1, 2], [0, 1, 2, 3, 4, 5]), ([3, 4, 5], [0, 1, 2, 3, 4, 5, 6]), ([6], [0, 1, 2, 3, 4, 5, 6]),
    ]  # fmt: skip


def test_streams_that_end_together_close_together() -> None:
    """And are refilled together: the clients of a group begin together, and its numbers are read once."""
    tasks, start, setup = oracle_tasks((10, 10, 10, 10, 10, 4, 4))
    groups = [list(part.client_ids) for part in executors.registry["streams"](setup).train(start, [], iter(tasks))]
    assert groups == [[0, 1, 2], [5], [3, 4, 6]] or groups == [[0, 1, 2], [5], [3, 4], [6]]


class ReturnsWeights(fed.FedAvg):
    """A loop that returns a view of its model's weights."""

    def train_client(self, client: Any, server: Any, state: Any, round: Any) -> dict[str, Tensor]:
        for x, y in client.batches():
            client.step(x, y)
        return {"w": client.w}

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> tuple[Any, fed.Upload]:
        return client, fed.Upload(mean={"delta": results.extra["w"] - server["w"]})


def test_results_of_a_loop_are_received_before_their_lane_trains_again() -> None:
    sizes = (7, 30, 1, 52, 12, 47)
    plain, other = (digest(run(name, sizes, ReturnsWeights(), slots=2)) for name in ("sequential", "streams"))
    assert plain == other


# ---- errors


def loss(scores: Tensor, y: Tensor) -> Tensor:
    """Raise an error for a batch of two."""
    if len(y) == 2:
        raise ValueError("a batch of two")
    return F.cross_entropy(scores, y)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_client_that_raises_is_excluded(executor: str) -> None:
    sizes, options = (26, 32, 16, 18, 40, 16), {"loss": loss, "on_client_error": "exclude", "local_epochs": 2}
    plain = run("sequential", sizes, **options)
    result = run(executor, sizes, slots=3, **options)
    assert digest(result) == digest(plain) and excluded_clients(result) == [[0, 3]] * 3


def test_steps_that_raise_are_not_captured() -> None:
    """A capture that fails ends the run."""
    raised = list[bool]()

    def record(scores: Tensor, y: Tensor) -> Tensor:
        raised.extend([FakeCuda.is_in_graph] * (len(y) == 2))
        return loss(scores, y)

    run("graph", (26, 16, 10, 16), loss=record, on_client_error="exclude", max_excluded=0.5, slots=1)
    assert len(raised) >= 6 and not any(raised)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_failed_capture_ends_the_run_with_its_reason(slots: int, monkeypatch: MonkeyPatch) -> None:
    """Also where nothing can be waited for afterwards, and if clients with errors are excluded."""
    tasks, start, setup = oracle_tasks((64, 64, 64), batch=16, on_client_error="exclude")
    cls = executors.registry["graph"](replace(setup, options=replace(setup.options, slots=slots)))
    error: Exception = CaptureError("the step cannot be captured as a CUDA graph: it was refused")
    if slots == 1:
        error = fed.ClientError("client 0 failed: it was refused")
        error.client_ids = (0,)

    def refuses(*operands: object) -> None:
        monkeypatch.setattr(FakeStream, "wait_stream", dead)
        raise error

    def dead(stream: object, other_stream: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(cls.cuda, "capture", refuses)
    with pytest.raises((CaptureError, fed.ClientError), match="it was refused"):
        list(cls.train(start, [], iter(tasks)))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_memory_that_is_too_small_names_slots(executor: str, monkeypatch: MonkeyPatch) -> None:
    def fail(*operands: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    tasks, start, setup = oracle_tasks((12, 12, 12), slots=6)
    cls = executors.registry[executor](setup)
    monkeypatch.setattr(streams.Lane, "__init__", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory for 6 clients at once .*2 GiB.*slots=3"):
        list(cls.train(start, [], iter(tasks)))


# ---- losses


@pytest.mark.parametrize("executor", ["sequential", "threads", *EXECUTORS])
def test_losses_are_added_in_float64_in_the_order_of_the_steps(executor: str) -> None:
    losses: list[float] = []

    def scaled(scores: Tensor, y: Tensor) -> Tensor:
        result = F.cross_entropy(scores, y) * 10.0 ** (len(losses) % 13)
        losses.append(float(result.detach()))
        return result

    tasks, start, setup = oracle_tasks((122,), 2, Step(), scaled, slots=1, local_epochs=1)
    results = list(executors.registry[executor](setup).train(start, [], iter(tasks)))
    expected = 0.0
    for value in losses:
        expected += 2 * value
    assert len(losses) == 61 and results[0].losses.tolist() == [expected]
