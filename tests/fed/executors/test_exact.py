"""Exact executors have the plain executor's bits for every algorithm and number of slots; an error stops all
clients."""

import _thread
import json
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastsam import fed
from fastsam.fed import executors
from fastsam.fed.executors import auto, threads
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.fed_runs import FLOAT, Drops, digest, run
from tests.helpers.places import ROOT


class Shared(nn.Module):
    """Keeps something of the forward pass in the module, which threads must not share."""

    def __init__(self):
        super().__init__()
        self.inner, self.activation = oracle.smooth_model(FLOAT), None

    def forward(self, x):
        self.activation = x * 2
        time.sleep(1e-4)  # another thread's turn
        return self.inner(self.activation - x)


def test_a_model_that_keeps_what_it_sees_is_not_shared_between_threads():
    plain, threaded_result = (
        run(fed.FedAvg(), executor, 3, Shared(), rounds=1) for executor in ("sequential", "threads")
    )
    assert digest(plain) == digest(threaded_result)


def test_one_thread_inside_an_operation_for_every_client_and_the_users_afterwards():
    old_threads, records = torch.get_num_threads(), set()

    def loss(out, y):
        records.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return F.cross_entropy(out, y)

    torch.set_num_threads(2)
    try:
        run(fed.FedAvg(), "threads", 3, loss=loss, rounds=1)
        assert torch.get_num_threads() == 2
        assert records == {(True, 1), (False, 1)}  # the trial step, the clients
        fresh = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert fresh == [2]
    finally:
        torch.set_num_threads(old_threads)


def alive():
    return [t for t in threading.enumerate() if t.name.startswith("fastsam")]


def test_an_error_in_one_client_stops_the_round_at_once():
    started_clients = []

    def loss(out, y):
        if threading.current_thread() is not threading.main_thread():
            started_clients.append(1)
            if len(started_clients) == 4:
                raise RuntimeError("enough")
            time.sleep(0.02)
        return F.cross_entropy(out, y)

    model = oracle.smooth_model(FLOAT)  # which is seeded
    state = torch.get_rng_state()
    with pytest.raises(fed.ClientError, match="failed in round 1, local step .*: RuntimeError: enough"):
        run(fed.FedAvg(), "threads", 3, model, sizes=(50,) * 8, participation=1.0, loss=loss)
    assert not alive() and len(started_clients) <= 8  # 160 steps were to be taken
    assert torch.equal(state, torch.get_rng_state())


def test_ctrl_c_comes_out_and_leaves_no_thread_behind():
    old_threads, calls = torch.get_num_threads(), []

    def loss(out, y):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return F.cross_entropy(out, y)

    with pytest.raises(KeyboardInterrupt):
        run(fed.FedAvg(), "threads", 2, sizes=(500,) * 4, participation=1.0, loss=loss)
    assert not alive() and len(calls) < 40 and torch.get_num_threads() == old_threads


@pytest.mark.parametrize("comes_late", [False, True], ids=["before it starts", "while it starts"])
def test_ctrl_c_in_the_start_of_a_thread_comes_out(comes_late, monkeypatch):
    """The interpreter sees a signal there too; the thread that comes late finds the round over."""
    calls, steps, begin = [], [], threading.Thread.start

    def raise_interrupt(thread):
        calls.append(thread)
        if len(calls) < 2:
            return begin(thread)
        if comes_late:
            threading._limbo[thread] = thread
            _thread.start_new_thread(lambda: (time.sleep(0.3), thread._bootstrap()), ())
        raise KeyboardInterrupt

    def loss(out, y):
        steps.append(threading.current_thread().name)
        return F.cross_entropy(out, y)

    monkeypatch.setattr(threading.Thread, "start", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(fed.FedAvg(), "threads", 3, sizes=(50,) * 6, participation=1.0, loss=loss)
    time.sleep(0.6 if comes_late else 0)
    assert not alive() and calls[-1].name not in steps


def test_ctrl_c_that_falls_into_no_grad_leaves_autograd_on(monkeypatch):
    enter_no_grad, model = torch.no_grad.__enter__, oracle.smooth_model(FLOAT)

    def enter_interrupted(self):
        enter_no_grad(self)
        raise KeyboardInterrupt  # before the block whose end would switch it on again

    monkeypatch.setattr(torch.no_grad, "__enter__", enter_interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(fed.FedAvg(), "sequential", None, model)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_an_error_of_the_receiver_leaves_no_thread_behind():
    class Breaks(fed.FedAvg):
        def finish(self, server, client, results, round):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        run(Breaks(), "threads", 3)
    assert not alive()


class Noisy(torch.autograd.Function):
    """Draws where no function of torch is called: in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 0.1 * torch.randn_like(g)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = oracle.smooth_model(FLOAT)

    def forward(self, x):
        return Noisy.apply(self.inner(F.dropout(x, 0.4, self.training)))


def test_what_draws_unseen_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="'threads' cannot serve.*draws random numbers.*executor='sequential'"):
        run(fed.FedAvg(), "threads", 3, Hidden())
    state = torch.get_rng_state()
    data = [*oracle.ragged_clients(FLOAT, (20, 9)), (torch.full((5, 6), 100.0), torch.zeros(5, dtype=torch.long))]
    with pytest.raises(fed.ClientError, match="draws random numbers.*executor='sequential'"):
        fed.run(Drops(threshold=99.0), data, fed.FedAvg(), executor="threads", slots=2, rounds=2, participation=1.0)
    assert torch.equal(state, torch.get_rng_state()) and not alive()


# --- the rule ---


def choose_executor(model, tmp_path, algorithm=None, x=(6,), **options):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, *x, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(3)]
    path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    options = {"rounds": 1, "cohort": 2, "executor": "auto", "run_dir": path} | options
    result = fed.run(model, data, algorithm or fed.FedAvg(), **options)
    record = json.loads((path / "environment.json").read_text())["executor"]
    assert record["name"] == result.summary()["executor"]
    return record


def test_auto_takes_what_serves_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "cpus", lambda: 2)
    dense = choose_executor(oracle.smooth_model(FLOAT), tmp_path)
    assert dense["name"] == "vmap" and "share the cost" in dense["reason"] and dense["numbers"].startswith("vmap ")
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    result = choose_executor(conv, tmp_path, x=(1, 6, 6))
    assert (result["name"], result["numbers"], result["slots"]) == ("threads", "exact", 2)
    assert "convolution" in result["reason"]
    dropout = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    assert choose_executor(dropout, tmp_path)["name"] == "vmap"
    result = choose_executor(nn.Sequential(Hidden(), nn.Identity()), tmp_path)
    assert result["name"] == "sequential" and "torch.vmap cannot map" in result["reason"]
    norm_model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    result = choose_executor(norm_model, tmp_path, buffers="keep")
    assert result["name"] == "threads" and "buffers" in result["reason"]
    assert choose_executor(oracle.smooth_model(FLOAT), tmp_path, fed.FedRobust())["name"] == "threads"
    width = auto._MAX_NUMEL["cpu"] // 8
    wide = nn.Sequential(nn.Linear(6, width), nn.ELU(), nn.Linear(width, 3))
    result = choose_executor(wide, tmp_path)
    assert result["name"] == "threads" and "no row program" in result["reason"]
    if native.why_not("cpu") is None:
        rowwise = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
        assert choose_executor(rowwise, tmp_path)["name"] == "vmap"
    width = auto._MAX_NUMEL_ROWWISE // 8
    wider = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    result = choose_executor(wider, tmp_path)
    assert result["name"] == "threads" and "keeps a processor busy" in result["reason"]
    monkeypatch.setattr(threads, "cpus", lambda: 1)
    assert choose_executor(conv, tmp_path, x=(1, 6, 6))["name"] == "sequential"
    single_slot = choose_executor(oracle.smooth_model(FLOAT), tmp_path, slots=1)
    assert single_slot["name"] == "sequential" and "one at a time" in single_slot["reason"]


def test_processes_of_one_machine_share_its_cpus(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    results = []
    for processes in ("1", "2", "3", "20"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        results.append(threads.cpus())
    assert results == [8, 4, 2, 1]


def test_auto_does_not_stack_a_model_that_somebody_watches(tmp_path):
    calls = []
    model = oracle.smooth_model(FLOAT)
    model.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    result = choose_executor(model, tmp_path)
    assert result["name"] != "vmap" and "hooks" in result["reason"] and calls


def test_the_names_are_those_of_the_registry_and_auto():
    assert executors.names() == ("auto", "graph", "sequential", "streams", "threads", "vmap")
    with pytest.raises(ValueError, match="one of 'auto', 'graph', 'sequential', 'streams', 'threads', 'vmap'"):
        run(fed.FedAvg(), "parallel")


# --- The page's table of operations without a deterministic CUDA form, compared with torch's documentation.


SAID = str(torch.use_deterministic_algorithms.__doc__)
SERVED, REFUSED = SAID.split("operations will throw a\n", 1)
NO_MODEL_TRAINS_WITH = ("resize_",)  # quantized tensors


def names(text: str) -> set[str]:
    """Return the class names in a text of torch's list, such as MaxPool3d for `nn.MaxPool3d`."""
    return {name.split(".")[-1] for name in re.findall(r"\* :(?:class|func):`torch\.([\w.]+)`", text)}


def test_the_page_names_what_torch_refuses() -> None:
    page = (ROOT / "docs" / "about_federated.md").read_text()
    table = page[page.index("## Operations without a deterministic form") :]
    refused_names = names(REFUSED) - set(NO_MODEL_TRAINS_WITH) - {"scatter_reduce"}
    families = {re.sub(r"[123]d$", "", name) for name in refused_names if name != "use_deterministic_algorithms"}
    assert len(families) > 10
    missing_families = {family for family in families if not re.search(rf"\b{family}", table)}
    assert not missing_families, f"torch refuses {sorted(missing_families)}"
    for advice in ("MaxPool3d", "ReplicationPad2d"):
        assert advice in names(SERVED), f"the page sends people to {advice}"


def test_one_pixel_of_adaptive_pooling_is_a_mean() -> None:
    """So it serves on a GPU, where other sizes are refused."""
    records = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            records.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    with Seen():
        torch.nn.AdaptiveAvgPool2d(1)(x).sum().backward()
    assert "aten.mean.dim" in records and not any("adaptive" in name for name in records)
