"""Executors for GPUs: on one, the bits of the plain executor; without one, their order of work with a stand-in for
CUDA."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from fastsam import fed
from fastsam.arena import Arena, Layout
from fastsam.fed.data import FederatedData
from fastsam.fed.executors import auto
from fastsam.fed.update import model_copy
from tests.helpers import oracle
from tests.helpers.crosses import one_in
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fed_ranks import ALGORITHMS, SIZES
from tests.helpers.fed_runs import digest, norm_model
from tests.helpers.setups import oracle_tasks

EXECUTORS = ("streams", "graph")
CASES = {
    **ALGORITHMS, "fedgsam": fed.FedGSAM(rho=0.05), "mimelite": fed.MimeLite(), "fedmoswa": fed.FedMoSWA(),
    "fedscam": fed.FedSCAM(rho=0.3), "fedspeed": fed.FedSpeed(rho=0.05),
}  # fmt: skip
UNCAPTURED = {"apfl": fed.APFL(), "ditto": fed.Ditto(), "fedrep": fed.FedRep(head_epochs=1), "fedsol": fed.FedSOL()}
UNCAPTURED |= {"fedbn": fed.FedBN()}


def train(
    algorithm: object, device: str = "cpu", sizes: tuple[int, ...] = SIZES, model: Any = None, augment: Any = None,
    **options: object,
) -> str:  # fmt: skip
    clients = oracle.ragged_clients(torch.float32, sizes)
    if augment is not None:
        clients = FederatedData(clients, clients[0], classes=3, augment=augment)
    keywords = {"rounds": 3, "batch_size": 5, "local_epochs": 2, "participation": 0.8, "weight_decay": 0.01} | options
    torch.manual_seed(0)
    module = oracle.smooth_model(torch.float32) if model is None else model()
    return digest(fed.run(module, clients, algorithm, test=clients[0], device=device, **keywords))


@pytest.mark.usefixtures("no_cuda")
def test_a_client_with_more_steps_than_any_before() -> None:
    keywords = {"sizes": (5, 5, 40), "participation": 1.0, "local_epochs": 3}
    cases = (("sequential", {}), ("graph", {"slots": 1}), ("graph", {"slots": 2}))
    assert len({train(fed.FedSAM(), executor=executor, **keywords, **slots) for executor, slots in cases}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_a_gpu_the_bits_are_those_of_the_plain_executor(name: str, executor: str, slots: int) -> None:
    plain = train(ALGORITHMS[name], "cuda", executor="sequential")
    assert train(ALGORITHMS[name], "cuda", executor=executor, slots=slots) == plain


SLOW = [("fedsmoo", "graph", 1), ("fedsmoo", "streams", 3), ("mimelite", "streams", 2), ("fedscam", "streams", 2)]
SLOW += [("apfl", "streams", 3), ("ditto", "streams", 3), ("fedrep", "streams", 2), ("fedsol", "streams", 3)]
SLOW += [(name, executor, 3) for name in ("fedbn",) for executor in EXECUTORS]
SLOW += [(name, "graph", 3) for name in CASES if name != "fedlesam-d"]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("name", "executor", "slots"),
    [("fedlesam-d", "graph", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_streams_are_ordered_and_replays_repeat_what_was_captured(name: str, executor: str, slots: int) -> None:
    """Two streams never touch one memory without a wait between; a replay reads and writes the memory that the capture
    did, and no number of the code has changed."""
    options = {"backend": "reference", "clip_norm": 0.5, "momentum": 0.5, "rounds": 2, "sizes": (7, 10, 1, 12, 11)}
    if name == "fedbn":  # buffers that stay with the clients
        options = {"backend": "reference", "rounds": 2, "sizes": (7, 10, 12, 13), "model": norm_model}
    algorithm = (CASES | UNCAPTURED)[name]
    plain = train(algorithm, executor="sequential", **options)
    with Watch():
        assert train(algorithm, executor=executor, slots=slots, **options) == plain
    if executor == "graph" and name != "fedbn":
        assert sum(graph.replays for graph in FakeCuda.graphs) > 5


def jitter(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + 0.01 * torch.randn(x.shape, generator=generator, device=x.device)


class Partly(torch.nn.Module):
    """A model one parameter of which has a gradient only in whole batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if len(x) == 5 else 0)


MODELS = {
    "augmented": {"augment": jitter},
    "batch norm, averaged": {"model": norm_model, "buffers": "average", "sizes": (8, 16, 24, 8), "batch_size": 8},
    "batch norm, kept": {"model": norm_model, "buffers": "keep", "sizes": (8, 16, 24, 8), "batch_size": 8},
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
@pytest.mark.parametrize("augment", [lambda x, g: x.T.contiguous().T, lambda x, g: x[:1].expand_as(x)])
def test_inputs_stay_laid_out_as_they_were(augment: object) -> None:
    """Results of libraries, and the storage of expanded tensors, depend on the layout."""
    records: set[object] = set()

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                records.add((x.shape, x.stride()))
            return super().forward(x)

    results = []
    for executor in ("sequential", "graph"):
        records.clear()
        process = train(fed.FedSAM(), executor=executor, model=lambda: Model(6, 3), augment=augment, sizes=(20, 20, 13))
        results.append((process, set(records)))
    assert results[0] == results[1]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_names_the_client_and_its_step(executor: str) -> None:
    """Also when the step is one of many in a joint graph."""
    client_sum = float(oracle.ragged_clients(torch.float32, (20,) * 4)[2][0][:, 0].sum())

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 20 and abs(float(x.detach()[:, 0].sum()) - client_sum) < 1e-4:
                raise ValueError("bad sample")
            return super().forward(x)

    options = {"sizes": (20,) * 4, "batch_size": 20, "participation": 1.0, "model": lambda: Model(6, 3), "slots": 4}
    with pytest.raises(fed.ClientError, match=r"client 2 failed in round 1, local step 0: ValueError: bad sample"):
        train(fed.FedSAM(), executor=executor, **options)


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


def hooked_model() -> torch.nn.Module:
    model = torch.nn.Linear(6, 3)
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("model", "name", "because"),
    [
        (lambda: torch.nn.Linear(6, 3), "graph", "captured steps"),
        (norm_model, "graph", "captured steps"),  # its buffers are tensors: a replay writes them
        (lambda: torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(6, 3)), "graph", "captured steps"),
        (lambda: Looks(6, 3), "streams", r"at values on the host in test_streams.py, line \d+"),
        (lambda: Counts(6, 3), "streams", r"changes Python's state \(calls\)"),
        (hooked_model, "streams", "hooks"),
    ],
)
def test_auto_takes_graphs_on_a_gpu_unless_a_capture_would_fail_or_freeze(
    monkeypatch: MonkeyPatch, model: Callable[[], torch.nn.Module], name: str, because: str
) -> None:
    monkeypatch.setattr(FakeCuda, "waits", False)
    module = model()
    layout = Layout.from_tensors(list(module.parameters()))
    example = oracle.ragged_clients(torch.float32, (8,))[0]
    monkeypatch.setattr(model_copy, "Arena", lambda layout, device: Arena(layout))  # on the CPU
    result, reason = rule_of(monkeypatch, model=module, layout=layout, example=example)
    assert result == name and re.search(because, reason), reason


def setup_on_a_gpu(options: Any = None, **changes: object) -> Any:
    setup = oracle_tasks()[2]
    population, options = (
        replace(setup.population, device=torch.device("cuda")),
        replace(setup.options, **(options or {})),
    )
    return replace(setup, population=population, options=options, **changes)


def rule_of(monkeypatch: MonkeyPatch, options: Any = None, **changes: object) -> tuple[str, str]:
    """Return the executor that "auto" selects for unstacked clients on a GPU, and the reason."""
    monkeypatch.setattr(auto, "_not_stacked", lambda setup: "not in this test")
    return auto.rule(setup_on_a_gpu(options, **changes))


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("streams", "and steps are not captured: the model has hooks, which", "which. Remove the hooks of the model"),
        ("streams", "not captured: the model looks at values on the host in a.py", "attn_implementation ('sdpa'"),
        ("streams", "torch.vmap cannot map the model or the loss over clients", "another precision"),
        ("sequential", "something else", "See docs/executors.md"),
        ("graph", "captured steps, because the model has hooks", ""),
        ("vmap", "stacked clients", ""),
    ],
)
def test_auto_warns_if_clients_train_one_by_one_on_a_gpu(name: str, reason: str, words: str) -> None:
    warning = auto.warning_of(setup_on_a_gpu(), name, reason)
    assert (words in warning) if words else (warning == "")
    assert not words or f"takes {name!r} on a GPU, where a round takes as long as in a plain PyTorch loop" in warning
    assert auto.warning_of(oracle_tasks()[2], name, reason) == ""  # on a CPU


def test_the_warning_comes_once_in_a_run(monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(auto, "warning_of", lambda setup, name, reason: "one by one")
    train(fed.FedAvg(), executor="auto", rounds=2)
    assert [record.getMessage() for record in caplog.records].count("one by one") == 1


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("options", "facts", "name"),
    [
        ({"on_client_error": "exclude"}, {}, "graph"),
        ({}, {"draws": frozenset({torch.nn.functional.dropout})}, "graph"),
        ({}, {"loop": "FedRobust"}, "streams"),
    ],
)
def test_auto_on_a_gpu_by_the_facts_of_a_run(
    options: dict[str, Any], facts: dict[str, Any], name: str, monkeypatch: MonkeyPatch
) -> None:
    result, reason = rule_of(monkeypatch, options=options, **facts)
    assert result == name and "not captured" not in reason


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("model", [lambda: Looks(6, 3), lambda: Counts(6, 3)])
def test_graph_by_name_refuses_what_a_capture_would_fail_on_or_freeze(model: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "waits", False)
    words = r"(looks at values on the host in test_streams.py, line \d+|changes Python's state \(calls\))"
    with pytest.raises(ValueError, match=f"executor 'graph' cannot serve here: .*{words}"):
        train(fed.FedAvg(), executor="graph", model=model)
