"""Executors for GPUs: on one, the bits of the plain executor; without one, their order of work with a stand-in for
CUDA."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.arena import Arena, Layout
from fastsam.fed import executors
from fastsam.fed.data import FederatedData
from fastsam.fed.executors import LocalOptions, Setup, Task, Work, auto, capturable
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.cuda import CaptureError, Cuda
from fastsam.fed.step.local_update import ClientResults, Direction, LocalUpdate
from tests.helpers import oracle
from tests.helpers.crosses import one_in
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fed_ranks import ALGORITHMS, SIZES, digest

EXECUTORS = ("streams", "graph")
CASES = {
    **ALGORITHMS, "fedgsam": fed.FedGSAM(rho=0.05), "mimelite": fed.MimeLite(), "fedmoswa": fed.FedMoSWA(),
    "fedscam": fed.FedSCAM(rho=0.3), "fedspeed": fed.FedSpeed(rho=0.05),
}  # fmt: skip
UNCAPTURED = {"apfl": fed.APFL(), "ditto": fed.Ditto(), "fedrep": fed.FedRep(head_epochs=1), "fedsol": fed.FedSOL()}


def train(
    algorithm: object,
    device: str = "cpu",
    sizes: tuple[int, ...] = SIZES,
    model: object = None,
    augment: object = None,
    **options: object,
) -> str:
    clients = oracle.ragged_clients(torch.float32, sizes)
    if augment is not None:
        clients = FederatedData(clients, clients[0], classes=3, augment=augment)
    keywords = {"rounds": 3, "batch_size": 5, "local_epochs": 2, "participation": 0.8, "weight_decay": 0.01} | options
    torch.manual_seed(0)
    made = oracle.smooth_model(torch.float32) if model is None else model()
    return digest(fed.run(made, clients, algorithm, test=clients[0], device=device, **keywords))


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("options", "slots", "name"), one_in(8, [{}, {"clip_norm": 0.5, "momentum": 0.5}], [1, 3, 7], ALGORITHMS), ids=str
)
def test_the_order_of_work_gives_the_bits_of_the_plain_executor(options: dict, slots: int, name: str) -> None:
    plain = train(ALGORITHMS[name], executor="sequential", **options)
    for executor in EXECUTORS:
        assert train(ALGORITHMS[name], executor=executor, slots=slots, **options) == plain, executor


@pytest.mark.usefixtures("no_cuda")
def test_a_step_is_captured_once_per_sort_not_per_round() -> None:
    sizes = (64,) * 6
    clients = oracle.ragged_clients(torch.float32, sizes)
    keywords = {"executor": "graph", "slots": 3, "batch_size": 32, "participation": 1.0, "local_epochs": 2}
    for rounds in (2, 4):
        fed.run(oracle.smooth_model(torch.float32), clients, fed.FedSAM(), rounds=rounds, **keywords)
        assert len(FakeCuda.captured) == 1


@pytest.mark.usefixtures("no_cuda")
def test_a_client_with_more_steps_than_any_before() -> None:
    clients = oracle.ragged_clients(torch.float32, (5, 5, 40))
    keywords = {"rounds": 3, "batch_size": 5, "participation": 1.0, "local_epochs": 3}
    results = [
        fed.run(oracle.smooth_model(torch.float32), clients, fed.FedSAM(), executor=executor, **keywords, **slots)
        for executor, slots in (("sequential", {}), ("graph", {"slots": 1}), ("graph", {"slots": 2}))
    ]
    assert len({tuple(round["train_loss"] for round in result.history) for result in results}) == 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_without_a_gpu_it_says_so(executor: str) -> None:
    with pytest.raises(ValueError, match=rf"executor '{executor}' cannot serve here: it runs on CUDA devices.*CPU"):
        train(fed.FedAvg(), executor=executor)


@pytest.mark.usefixtures("no_cuda")
def test_a_loop_of_an_algorithm_is_not_captured() -> None:
    with pytest.raises(ValueError, match="FedRobust trains each client in a loop of its own"):
        train(fed.FedRobust(), executor="graph")


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_a_gpu_the_bits_are_those_of_the_plain_executor(name: str, executor: str, slots: int) -> None:
    plain = train(ALGORITHMS[name], "cuda", executor="sequential")
    assert train(ALGORITHMS[name], "cuda", executor=executor, slots=slots) == plain


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("name", "executor", "slots"),
    [
        *(pytest.param(name, "graph", 3, marks=[] if name == "fedlesam-d" else pytest.mark.slow) for name in CASES),
        pytest.param("fedsmoo", "graph", 1, marks=pytest.mark.slow),
        pytest.param("fedsmoo", "streams", 3, marks=pytest.mark.slow),
        pytest.param("mimelite", "streams", 2, marks=pytest.mark.slow),
        pytest.param("fedscam", "streams", 2, marks=pytest.mark.slow),
        pytest.param("apfl", "streams", 3, marks=pytest.mark.slow),
        pytest.param("ditto", "streams", 3, marks=pytest.mark.slow),
        pytest.param("fedrep", "streams", 2, marks=pytest.mark.slow),
        pytest.param("fedsol", "streams", 3, marks=pytest.mark.slow),
    ],
)
def test_streams_are_ordered_and_replays_repeat_what_was_captured(name: str, executor: str, slots: int) -> None:
    """Two streams never touch one memory without a wait between; a replay reads and writes the memory that the capture
    did, and no number of the code has changed."""
    options = {"backend": "reference", "clip_norm": 0.5, "momentum": 0.5, "rounds": 2, "sizes": (7, 10, 1, 12, 11)}
    algorithm = (CASES | UNCAPTURED)[name]
    plain = train(algorithm, executor="sequential", **options)
    with Watch():
        assert train(algorithm, executor=executor, slots=slots, **options) == plain
    if executor == "graph":
        assert sum(graph.replays for graph in FakeCuda.captured) > 5


@pytest.mark.slow
@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_buffers_that_stay_with_the_clients_are_ordered_too(executor: str) -> None:
    def made() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))

    options = {"backend": "reference", "rounds": 2, "sizes": (7, 10, 12, 13), "model": made}
    plain = train(fed.FedBN(), executor="sequential", **options)
    with Watch():
        assert train(fed.FedBN(), executor=executor, slots=3, **options) == plain


def test_the_stand_in_notices_what_it_is_for() -> None:
    cuda, x = FakeCuda(torch.device("cpu")), torch.ones(100)
    stream, number = cuda.stream(), [1.0]
    with Watch():
        y = x + 1
        with cuda.on(stream), pytest.raises(AssertionError, match="reads .* before it is sure to be written"):
            y + 1
        stream.wait_stream(cuda.current())
        with cuda.on(stream):
            z = y + 1
        with pytest.raises(AssertionError, match="writes .* while it may still be read"):
            y.zero_()
        cuda.current().wait_stream(stream)
        y.zero_()
        graph = cuda.capture(lambda: z.add_(y, alpha=number[0]), stream)
        graph.replay()
        graph.replay()
        number[0] = 2.0
        with pytest.raises(AssertionError):
            graph.replay()
        with pytest.raises(AssertionError, match="captured step: the host would wait"):
            cuda.capture(lambda: float(y.sum()), stream).replay()


def jitter(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + 0.01 * torch.randn(x.shape, generator=generator, device=x.device)


def normed() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))


class Partly(torch.nn.Module):
    """A model one parameter of which has a gradient only in whole batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.whole = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.whole(x) if len(x) == 5 else 0)


MODELS = {
    "augmented": {"augment": jitter},
    "batch norm, averaged": {"model": normed, "buffers": "average", "sizes": (8, 16, 24, 8), "batch_size": 8},
    "batch norm, kept": {"model": normed, "buffers": "keep", "sizes": (8, 16, 24, 8), "batch_size": 8},
    "measured along the path": {"measures": ["drifts", "consistency"]},
    "in stored order": {"shuffle": False},
    "a parameter without a gradient now and then": {"model": Partly},
}


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("case", "name"), one_in(3, MODELS, ["fedsmoo", "fedgsam", "fedlesam-d"]))
def test_models_and_data_of_all_sorts(case: str, name: str) -> None:
    plain = train(CASES[name], executor="sequential", **MODELS[case])
    for executor in EXECUTORS:
        assert train(CASES[name], executor=executor, slots=3, **MODELS[case]) == plain, executor


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    "augment", [lambda x, g: x.T.contiguous().T, lambda x, g: x[:1].expand_as(x)], ids=["transposed", "expanded"]
)
def test_inputs_stay_laid_out_as_they_were(augment: object) -> None:
    """Results of libraries, and the storage of expanded tensors, depend on the layout."""
    seen: set[object] = set()

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                seen.add((x.shape, x.stride()))
            return super().forward(x)

    found = []
    for executor in ("sequential", "graph"):
        seen.clear()
        done = train(fed.FedSAM(), executor=executor, model=lambda: Model(6, 3), augment=augment, sizes=(20, 20, 13))
        found.append((done, set(seen)))
    assert found[0] == found[1]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_names_the_client_and_its_step(executor: str) -> None:
    """Also when the step is one of many in a joint graph."""
    clients = oracle.ragged_clients(torch.float32, (20,) * 4)
    bad = float(clients[2][0][:, 0].sum())

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 20 and abs(float(x.detach()[:, 0].sum()) - bad) < 1e-4:
                raise ValueError("bad sample")
            return super().forward(x)

    with pytest.raises(fed.ClientError, match=r"client 2 failed in round 1, local step 0: ValueError: bad sample"):
        fed.run(
            Model(6, 3), clients, fed.FedSAM(), rounds=1, batch_size=20, participation=1.0, executor=executor, slots=4
        )


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_round_that_is_left_in_the_middle_leaves_the_executor_usable(executor: str) -> None:
    tasks, start, setup = oracle_tasks()
    made = executors.registry[executor](setup)
    results = made.train(start, [], iter(tasks))
    next(results)
    results.close()
    again = sorted(ends_of(made.train(start, [], iter(tasks))), key=lambda results: results.client_ids)
    plain = ends_of(executors.registry["sequential"](setup).train(start, [], iter(tasks)))
    for a, b in zip(again, plain, strict=True):
        assert torch.equal(a.delta, b.delta) and torch.equal(a.losses, b.losses) and a.num_steps == b.num_steps


def ends_of(groups: Iterable[ClientResults]) -> list[ClientResults]:
    return [group.take([i]) for group in groups for i in range(len(group.client_ids))]


def oracle_tasks(sizes: tuple[int, ...] = (12, 3, 7, 9), batch: int = 5) -> tuple[list[Task], torch.Tensor, Setup]:
    clients, model = oracle.ragged_clients(torch.float32, sizes), oracle.smooth_model(torch.float32)
    layout = Layout.of(list(model.parameters()))
    start = torch.zeros(layout.row_size)
    layout.gather([p.detach() for p in model.parameters()], start)
    loss = torch.nn.functional.cross_entropy
    setup = Setup(model, layout, loss, LocalOptions(momentum=0.5), torch.device("cpu"), "reference", slots=3)
    step = LocalUpdate(Direction.GRADIENT, rho=0.05)
    work = Work(0, 0.1, 2, batch, True, 100, clients, [len(y) for _, y in clients])
    tasks = [Task(i, work, step) for i in range(len(clients))]
    return tasks, start, setup


@pytest.mark.usefixtures("no_cuda")
def test_there_are_no_more_graphs_than_slots_and_sorts() -> None:
    """Clients that train at the same time change all the time, and no graph is made for every set of them."""
    clients = oracle.ragged_clients(torch.float32, tuple(range(8, 104, 8)))
    fed.run(
        oracle.smooth_model(torch.float32), clients, fed.FedSAM(), rounds=6, batch_size=8, participation=0.6,
        executor="graph", slots=4,
    )  # fmt: skip
    # All batches are full, for each slot by itself and for the first 2, 3 and 4 slots together.
    assert len(FakeCuda.captured) <= 7


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_models_and_data_of_all_sorts_on_a_gpu(executor: str, case: str) -> None:
    for name in ("fedsmoo", "fedgsam"):
        plain = train(CASES[name], "cuda", executor="sequential", **MODELS[case])
        assert train(CASES[name], "cuda", executor=executor, slots=3, **MODELS[case]) == plain


class Looks(torch.nn.Linear):
    """A model that cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)


class Counts(torch.nn.Linear):
    """A model that a capture would freeze."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.gpu
def test_a_model_that_looks_at_its_values_cannot_be_captured() -> None:
    """It is seen before a capture fails, so the process goes on, and "auto" takes streams."""
    options = {"model": lambda: Looks(6, 3), "sizes": (40, 40)}
    with pytest.raises(ValueError, match="executor 'graph' cannot serve here: .* looks at values on the host"):
        train(fed.FedSAM(), "cuda", executor="graph", slots=2, **options)
    assert train(fed.FedSAM(), "cuda", executor="streams", **options) == train(fed.FedSAM(), "cuda", **options)


# ---- what "auto" takes


def hooked() -> torch.nn.Module:
    model = torch.nn.Linear(6, 3)
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("model", "name", "because"),
    [
        (lambda: torch.nn.Linear(6, 3), "graph", "one captured graph"),
        (normed, "graph", "one captured graph"),  # its buffers are tensors: a replay writes them
        (lambda: Looks(6, 3), "streams", "looks at values on the host"),
        (lambda: Counts(6, 3), "streams", r"changes Python's state \(calls\)"),
        (hooked, "streams", "hooks"),
    ],
)
def test_auto_takes_graphs_on_a_gpu_and_streams_where_a_capture_would_fail_or_freeze(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], torch.nn.Module], name: str, because: str
) -> None:
    monkeypatch.setattr(FakeCuda, "waits", False)
    _, _, setup = oracle_tasks()
    made = model()
    layout = Layout.of(list(made.parameters()))
    x, y = oracle.ragged_clients(torch.float32, (8,))[0]
    setup = replace(setup, model=made, layout=layout, example=(x, y))
    monkeypatch.setattr(auto, "_not_stacked", lambda setup: "it is not asked here")
    monkeypatch.setattr(capturable, "Arena", lambda layout, device: Arena(layout))  # on the CPU
    found, reason = auto.rule(replace(setup, device=torch.device("cuda")))
    assert found == name and re.search(because, reason), reason


@pytest.mark.usefixtures("no_cuda")
def test_auto_takes_streams_where_a_client_that_raises_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(oracle_tasks()[2], excludes_errors=True)
    monkeypatch.setattr(auto, "_not_stacked", lambda setup: "it is not asked here")
    found, reason = auto.rule(replace(setup, device=torch.device("cuda")))
    assert found == "streams" and "on_client_error='exclude'" in reason


@pytest.mark.usefixtures("no_cuda")
def test_a_model_that_cannot_be_captured_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "waits", False)
    with pytest.raises(ValueError, match="executor 'graph' cannot serve here: .* looks at values on the host"):
        train(fed.FedSAM(), executor="graph", model=lambda: Looks(6, 3))


# ---- lanes that end together


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_lanes_that_end_together_close_together(executor: str) -> None:
    """And are refilled together: the clients of a group begin together, and its numbers are read once."""
    tasks, start, setup = oracle_tasks((10, 10, 10, 10, 10, 4, 4))
    groups = [list(results.client_ids) for results in executors.registry[executor](setup).train(start, [], iter(tasks))]
    assert groups == [[0, 1, 2], [5], [3, 4, 6]] or groups == [[0, 1, 2], [5], [3, 4], [6]]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("slots", [1, 3])
def test_a_failed_capture_ends_the_run_with_its_reason(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing can be waited for afterwards."""
    tasks, start, setup = oracle_tasks((64, 64, 64), batch=16)
    made = executors.registry["graph"](replace(setup, slots=slots))

    def refuses(work: object, stream: object) -> None:
        monkeypatch.setattr(type(made.joint), "wait_stream", dead)
        raise CaptureError("the step cannot be captured as a CUDA graph: it was refused")

    def dead(stream: object, other: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(made.graphs, "capture", refuses)
    with pytest.raises((CaptureError, fed.ClientError), match="it was refused"):
        list(made.train(start, [], iter(tasks)))


# --- A capture that fails: the caller's stream is back, and the error says why. With a stand-in for torch's graphs.


class Torch:
    """torch's captures: a capture with an error cannot be ended, which hides the error and keeps its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = "before"
        places = {
            "torch.cuda.CUDAGraph": object, "torch.cuda.graph": lambda *a, **k: Context(self, **k),
            "torch.cuda.current_stream": lambda device: self.stream, "torch.cuda.set_stream": self._set,
        }  # fmt: skip
        for name, value in places.items():
            monkeypatch.setattr(name, value, raising=False)

    def _set(self, stream: str) -> None:
        self.stream = stream


class Context:
    def __init__(self, world: Torch, stream: str, capture_error_mode: str) -> None:
        self.world, self.own = world, stream

    def __enter__(self) -> None:
        self.before, self.world.stream = self.world.stream, self.own

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.world.stream = self.before


@pytest.mark.parametrize(
    ("raised", "seen", "words"),
    [
        (ValueError("the model looks at its values"), CaptureError,
            "ValueError: the model looks at its values. Use executor='streams'"),
        (ClientError("client 3 failed"), ClientError, "client 3 failed"),
    ],
)  # fmt: skip
def test_a_capture_that_fails_says_why(
    raised: Exception, seen: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, cuda, stream = Torch(monkeypatch), Cuda(torch.device("cuda", 0)), "a stream"

    def work() -> None:
        raise raised

    with pytest.raises(seen, match=words):
        cuda.capture(work, stream)  # type: ignore[arg-type]
    assert world.stream == "before"
    cuda.capture(lambda: None, stream)  # type: ignore[arg-type]
    assert world.stream == "before"
