"""Times of steady rounds: no round that captures or records is reported, none before it; and the jobs of a device."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bench import record as records
from bench.fed import on_gpu, steady
from bench.fed.steady import Enough, SteadyRounds
from bench.fed.workload import Workload
from fastsam.fed.executors import streams
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_devices import install_step_graphs

pytestmark = pytest.mark.of_each_kind


def rounds_of(seconds: Sequence[float], prepares: Sequence[int] = (), limit: float = 1e9, **options: Any) -> Any:
    """Return the steady rounds of a loop whose rounds take so many seconds; some of them prepare something."""
    now, count = 0.0, 0
    rounds = SteadyRounds("cpu", lambda: count, limit, clock=lambda: now, **options)
    try:
        for number, duration in enumerate(seconds, 1):
            now, count = now + duration, count + prepares.count(number)
            rounds()
    except Enough:
        pass
    return rounds


def test_five_rounds_are_dropped_and_ten_are_stored() -> None:
    figures = rounds_of([64, 32, 16, 8, 4, *range(1, 12)]).figures()
    assert figures == {"first": 64, "rounds": 15, "seconds": 5.5, "times": list(range(1, 11))}


@pytest.mark.parametrize("prepares", [(1, 5), (6,), (6, 14), (15,), (1, 8, 9)])
def test_the_ten_begin_after_the_last_round_that_prepares(prepares: tuple[int, ...]) -> None:
    times = [1.0 if number > max(prepares) else 100.0 for number in range(1, 40)]
    rounds = rounds_of(times, prepares)
    assert rounds.figures()["times"] == [1.0] * 10 and rounds.num_rounds == max(5, *prepares) + 10


def test_a_row_says_so_if_time_is_over() -> None:
    figures = rounds_of([1.0] * 40, limit=7.5).figures()
    assert figures["times"] == [1.0] * 3 and figures["note"] == "3 of 10 rounds"
    figures = rounds_of([1.0] * 40, range(1, 40), limit=7.5).figures()
    words = "no time left: no steady round among 8, the last one that captured or recorded is 8"
    assert figures["absent"] == words and "seconds" not in figures


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors for GPUs and captured steps run on a stand-in for CUDA."""
    monkeypatch.setattr(streams, "Cuda", FakeCuda)
    monkeypatch.setattr(streams, "why_not", lambda setup: None)
    install_step_graphs(monkeypatch)
    monkeypatch.setattr(steady, "Cuda", FakeCuda)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("executor", "local_epochs"), [("graph", 1), ("vmap", 1), ("vmap", 2)])
def test_no_round_of_an_executor_is_reported_in_which_it_captured(executor: str, local_epochs: int) -> None:
    """The number of graphs after each round says in which rounds an executor captured."""
    load, graphs = Workload("cnn", clients=2, cohort=2), list[int]()
    data = [(x[:16, :, ::2, ::2], y[:16]) for x, y in load.tensors()]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

    def train(tick: Callable[..., None]) -> None:
        def count(record: Any) -> None:
            graphs.append(len(FakeCuda.graphs))
            tick(record)

        options = {"executor": executor, "slots": 2, "local_epochs": local_epochs, "backend": "reference"}
        on_gpu.train_model(model, data, "fedavg", count, batch=8, **options)

    rounds = steady.measure("cpu", train, 60, dropped=1, rounds=2)
    assert graphs[-1] > 0, "nothing was captured"
    assert len(rounds.times) == 2 and graphs[-3] == graphs[-1], f"a reported round captured: {graphs}"


def test_passes_that_are_not_replayed_are_counted_with_the_reason() -> None:
    """A model that counts its calls cannot be replayed: two steps a round, each for both clients."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    data = [(torch.randn(16, 8), torch.randint(10, (16,))) for _ in range(2)]
    for model, count in ((Counts(8, 10), 2.0), (nn.Linear(8, 10), None)):
        options = {"executor": "vmap", "slots": 2, "backend": "reference"}
        train = functools.partial(on_gpu.train_model, model, data, "fedavg", batch=8, **options)
        figures = steady.measure("cpu", train, 60, dropped=2, rounds=3).figures()
        assert figures.get("slow_passes") == count and len(figures["times"]) == 3
        assert ("changes calls" in figures.get("note", "")) == (count is not None)


def test_a_compilation_is_noticed() -> None:
    pytest.importorskip("torch._dynamo.utils")
    with steady.count_preparations() as number:
        before = number()
        function = torch.compile(lambda x: x + 1, backend="eager")
        function(torch.ones(2))
        compiled = number()
        function(torch.ones(2))
        assert before < compiled == number()


def test_published_rounds_of_captured_steps_are_steady() -> None:
    """Convolutions under `vmap` capture in their third round, so their rows have the times that show a steady run."""
    record = records.read(records.RESULTS / "federated-cuda.json")
    rows = [row for case in record["cases"] if case["title"].startswith("CNN") for row in case["rows"]]
    rows = [row for row in rows if row["executor"] == "vmap" and not records.has_failed(row)]
    assert all(row.get("times") for row in rows), rows


def test_what_fails_or_has_no_time_is_named() -> None:
    def fails(seconds: float) -> dict[str, Any]:
        raise RuntimeError("no memory")

    def items(work: Any) -> Iterator[on_gpu.Item]:
        yield "gpu", "title", "vmap", 8, work

    for work, seconds, reason in (
        (fails, 1e9, {"problem": "RuntimeError: no memory"}), (fails, 0.0, {"absent": "no time left"}),
        (lambda seconds: {"seconds": 2.0}, 1e9, {"seconds": 2.0}),
    ):  # fmt: skip
        case = next(on_gpu.measure(items(work), seconds))
        assert reason.items() <= case["rows"][0].items() and case["name"] == "title"


def test_jobs_cover_executors_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process per executor and model; most clients before fewer; no more slots than torch has streams."""
    calls: list[tuple[Any, ...]] = []

    def train(load: Workload, tick: object, **options: Any) -> None:
        calls.append((load.algorithm, options["executor"], options.get("slots")))

    def time_rounds(device: str, train: on_gpu.Loop, seconds: float) -> dict[str, float]:
        train(int)
        return {"seconds": 1.0}

    monkeypatch.setattr(on_gpu, "train_load", train)
    monkeypatch.setitem(on_gpu.OTHERS, "bare loop", lambda load, tick: None)
    monkeypatch.setattr(on_gpu, "time_rounds", time_rounds)
    jobs = on_gpu.jobs("cuda")
    assert {"mlp graph", "cnn auto", "table 8 bare loop", "table 8 graph"} < set(jobs)
    for model in ("cnn", "mlp"):
        for executor in ("bare loop", "sequential", "streams", "graph", "vmap", "auto"):
            rows = [case["rows"][0] for case in on_gpu.measure(jobs[f"{model} {executor}"](), 1e9)]
            assert [(row["at"], row["executor"]) for row in rows] == [(n, executor) for n in (100, 100, 20, 20, 8, 8)]
    assert ("fedsam", "streams", 31) in calls and ("fedavg", "vmap", 100) in calls and ("fedavg", "auto", None) in calls


def test_a_job_that_fails_costs_itself() -> None:
    (case,) = on_gpu.run("no such job", "cpu", 30)
    assert case["rows"] == [{"name": "no such job", "title": "no such job", "ours": True,
                               "problem": "KeyError: 'no such job'"}]  # fmt: skip
    rows = [case["rows"][0] for case in on_gpu.run("table 8 bare loop", "cpu", 11)]
    assert [row["absent"] for row in rows] == ["no time left"]
